"""The page in a real browser: it draws, obeys clicks, complains of nothing and asks nobody."""

import pytest

from fedstrata.lab.report import (
    Claim,
    Column,
    PaperClaims,
    PlotSpec,
    Reference,
    Split,
    TableSpec,
    build_table,
    write_report,
)

from .chromium import ABSENT, FOUND, Chromium

pytestmark = [pytest.mark.long, pytest.mark.skipif(FOUND is None, reason=ABSENT)]

TABLE = TableSpec((Column("loss", better="low"), Column("seconds", "run")), ("label", "H"))
WIDTHS = {"desktop": 1280, "phone": 390}
VIEWS = [(width, dark) for width in WIDTHS for dark in (False, True)]


PAPER = PaperClaims(
    "Table 1",
    (Claim({"label": "FedMSA", "H": 5}, "loss", 0.5), Claim({"label": "FedMSA", "H": 99}, "loss", 0.25)),
)
DRAWN = "[...document.querySelectorAll('.drawn')]"
SWITCH = "[...document.querySelectorAll('.plot')[1].querySelectorAll('.axes button')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def file(tmp_path_factory, make_runs):
    return write_report(
        tmp_path_factory.mktemp("page") / "report",
        "A title",
        make_runs(),
        config={"problem": "min_x 1/m Σ_i f_i(x, ξ)", "what": "a test " * 30},
        table=TABLE,
        plots=[
            PlotSpec("loss", panels="H", log_y=True, references=(Reference(0.5, "level"),)),
            PlotSpec("accuracy", x="bytes_up", lines=("label", "H"), references=(Reference(1e6, "MB", "x"),)),
            PlotSpec("loss", x="H", kind="bar"),
            PlotSpec("loss", x="H", kind="heatmap", down="label", name="heat"),
        ],
        paper=PAPER,
        split=Split((30, 50, 20), {"0": (10, 40, 5), "1": (20, 10, 15)}, ("north", "south", "east")),
        notes="![x](http://127.0.0.1:9/x.png)",
    )


@pytest.fixture
def visit(browser, file):
    """Opens the page and waits for its plots; afterwards it must have complained of nothing."""
    opened = []

    def visit(width="desktop", dark=False):
        page = browser.open(file.as_uri(), width=WIDTHS[width], dark=dark)
        opened.append(page)
        page.wait("document.documentElement.classList.contains('ready')")
        return page

    yield visit
    for page in opened:
        assert page.complaints == []
        assert page.requests == []
        page.close()


def test_complaints_and_requests_are_seen(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("boom"); missing()</script>')
    page = browser.open(bad.as_uri())
    page.wait("document.readyState === 'complete'")
    assert any("boom" in line for line in page.complaints)
    assert any("missing is not defined" in line for line in page.complaints)
    assert "http://127.0.0.1:9/x.png" in page.requests
    page.close()


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_the_page_draws_its_plots(visit, width, dark):
    page = visit(width, dark)
    count = page(f"{DRAWN}.map(d => d.querySelectorAll('.main-svg').length)")
    assert len(count) == 5  # and how the samples lie with the clients
    assert all(count)
    traces = page(f"{DRAWN}.map(d => d.querySelectorAll('.trace.scatter').length)")
    assert traces[:2] == [8, 8]  # a band and a line for each of four curves, in two panels or in one
    assert page("document.querySelectorAll('.drawn')[2].querySelectorAll('.point').length") == 4
    assert page("document.querySelectorAll('.drawn')[3].querySelectorAll('.hm').length") == 1
    stroke = page("getComputedStyle(document.querySelectorAll('.drawn .scatterlayer .js-line')[1]).stroke")
    assert stroke == ("rgb(74, 168, 224)" if dark else "rgb(0, 114, 178)")
    words = page("document.querySelector('.drawn').textContent")
    for said in ("level", "H = 5", "communication round"):
        assert said in words
    # Nothing but tables, the line of links and commands is wider than the screen.
    assert page("document.documentElement.scrollWidth") <= WIDTHS[width]


def test_the_sentence_and_the_main_plot_come_first(visit):
    page = visit("phone")
    top = page("document.querySelector('.lead p').getBoundingClientRect().bottom")
    plot = page("document.querySelector('.lead .plot').getBoundingClientRect().top")
    table = page("document.querySelector('table').getBoundingClientRect().top")
    assert 0 < top < 844  # the sentence is on a phone's first screen
    assert top <= plot < table


@pytest.mark.parametrize("width", WIDTHS)
def test_one_click_hides_a_method_in_all_plots(visit, width):
    page = visit(width)
    visible = f"{DRAWN}.map(d => d.data.filter(t => t.visible && t.meta.role !== 'band').map(t => t.name))"
    before = page(visible)
    page.click(".legend button[data-name='FedMSA']")
    after = page(visible)
    for all_, left in zip(before[:3], after[:3], strict=True):
        assert left == [name for name in all_ if not name.startswith("FedMSA")] != all_
    pressed = "[...document.querySelectorAll('.legend button')].map(b => [b.dataset.name, b.ariaPressed])"
    assert all((state == "false") == name.startswith("FedMSA") for name, state in page(pressed))
    page.click(".legend button[data-name='FedMSA, H = 5']")
    assert page(visible)[1] == ["FedAvg, H = 1", "FedAvg, H = 5", "FedMSA, H = 5"]
    assert page(visible)[0] == after[0]
    page.click(".legend button[data-name='FedMSA']")
    assert page(visible)[0] == before[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_axis_can_be_switched(visit, width, make_runs):
    page = visit(width)
    one = "document.querySelectorAll('.drawn')[1]"
    assert page(f"{SWITCH}.map(b => b.textContent)") == ["rounds", "bytes", "seconds"]
    assert "bytes uploaded" in page(f"{one}.layout.xaxis.title.text")
    assert page(f"{one}.layout.shapes.length") == 1
    page.click(".axes button[data-axis=seconds]", 1)
    assert page(f"{one}.layout.xaxis.title.text") == "time [s]"
    assert page(f"{one}.layout.shapes.length") == 0  # what was marked at a number of bytes
    runs = [run for run in make_runs() if (run.label, run.setting["H"]) == ("FedAvg", 1)]
    band, line = page(f"{one}.data.slice(0, 2).map(t => [t.x, t.y])")
    expected = [sum(run.history["seconds"][k] for run in runs) / len(runs) for k in range(11)]
    assert line[0] == pytest.approx(expected, rel=1e-4)
    assert band[0] == pytest.approx([*expected, *expected[::-1]], rel=1e-4)
    assert all(high >= low for high, low in zip(band[1][:11], band[1][:10:-1], strict=True))
    assert page(f"{SWITCH}.map(b => b.ariaPressed)") == ["false", "false", "true"]


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_sort_by_numbers_and_by_words(visit, width, make_runs):
    page = visit(width)
    means = [row.cells[0].mean for row in build_table(make_runs(), TABLE).rows]
    rows = "[...document.querySelectorAll('#results tbody tr')]"
    column = f"{rows}.map(r => [r.cells[0].textContent, Number(r.cells[3].dataset.value)])"
    assert [value for _, value in page(column)] == means
    page.click("#results thead button", 3)
    assert [value for _, value in page(column)] == sorted(means)
    page.click("#results thead button", 3)
    assert [value for _, value in page(column)] == sorted(means, reverse=True)
    assert page("document.querySelectorAll('#results thead th')[3].ariaSort") == "descending"
    page.click("#results thead button", 0)
    assert [name for name, _ in page(column)] == ["FedAvg", "FedAvg", "FedMSA", "FedMSA"]


def test_a_tables_first_column_stays_when_it_scrolls(visit):
    page = visit("phone")
    place = "document.querySelector('#results tbody th').getBoundingClientRect().left"
    before = page(place)
    page("document.querySelector('#results .scroll').scrollLeft = 60")
    page.wait("document.querySelector('#results .scroll').classList.contains('slid')")
    assert page("document.querySelector('#results .scroll').scrollLeft") > 20
    assert page(place) == pytest.approx(before, abs=1)


def test_tables_can_be_copied_and_saved(visit, file, make_runs, tmp_path):
    page = visit()
    page.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.click("#results [data-do=copy]")
    page.wait("document.querySelector('#results [data-do=copy]').textContent === 'Copied'")
    lines = page("navigator.clipboard.readText()").split("\n")
    head, texts, _ = build_table(make_runs(), TABLE, PAPER).texts()
    assert [line.split("\t") for line in lines] == [head, *texts]
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#results [data-do=csv]")
    page.until(lambda: (tmp_path / "results.csv").exists())
    assert (tmp_path / "results.csv").read_text() == (file.parent / "table.csv").read_text().replace(
        "\r\n", "\n"
    )


def test_claims_that_were_not_run_are_folded_away(visit):
    page = visit()
    rows = "[...document.querySelectorAll('#paper tbody tr')].filter(r => r.checkVisibility()).length"
    before = page(rows)
    page.click("#paper summary")
    assert page(rows) == before + 1


def test_without_scripts_the_static_plots_stay(browser, file, tmp_path):
    still = tmp_path / "still.html"
    still.write_text(file.read_text().replace("script-src 'unsafe-inline'", "script-src 'none'", 1))
    page = browser.open(still.as_uri())
    shown = "[...document.querySelectorAll('.plot img')].map(i => i.checkVisibility() && i.naturalWidth > 0)"
    assert page(shown) == [True] * 4
    assert not page("document.querySelector('.tools').checkVisibility()")
    page.close()


def test_where_plotly_does_not_load_the_static_plots_stay(browser, file, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(file.read_text().replace('id="plotly">', 'id="plotly">AAAA', 1))
    page = browser.open(broken.as_uri())
    page.wait("document.documentElement.classList.contains('still')")
    assert page("document.querySelector('.plot img').checkVisibility()")
    assert page("document.querySelectorAll('.main-svg').length") == 0
    assert page("document.querySelector('.tools').checkVisibility()")
    assert "the static ones are shown" in page.complaints[0]
    page.close()
