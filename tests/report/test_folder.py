import html.parser
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fedstrata.data.federated import FederatedData
from fedstrata.lab.report import (
    Claim,
    Column,
    PaperClaims,
    PlotSpec,
    ReportError,
    RunRecord,
    Split,
    Statement,
    TableSpec,
    build_table,
    load_report,
    rebuild,
    split_of,
    write_report,
)
from fedstrata.lab.report import folder as folder_module
from fedstrata.lab.report.headline import headline
from fedstrata.lab.report.page import duration, markdown
from fedstrata.lab.report.split import plot_of
from fedstrata.support.threads import cores

TABLE = TableSpec((Column("loss", better="low"), Column("seconds", "run")), ("label", "H"))
PAPER = PaperClaims(
    "Table 1",
    (Claim({"label": "FedMSA", "H": 5}, "loss", 0.5), Claim({"label": "FedMSA", "H": 99}, "loss", 0.25)),
    (Statement("It improves with H.", "It does.", "reproduced"),),
)
FILES = {
    "config.json",
    "runs.csv",
    "history.csv",
    "table.csv",
    "table.md",
    "report.html",
    "plots/loss-by-round-h.png",
    "plots/loss-by-round-h.svg",
}


def write(place, runs, **changes):
    fields = {
        "config": {"problem": "min f", "settings": {"H": [1, 5], "gamma": np.float32(0.5)}},
        "table": TABLE,
        "plots": [PlotSpec("loss", panels="H")],
        "paper": PAPER,
        "notes": "A *note*.",
        "command": "fedstrata run x --out y",
    }
    return write_report(place, "A title", runs, **(fields | changes))


def content(place):
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_runs):
    return write(tmp_path_factory.mktemp("written") / "deep" / "report", make_runs()).parent


@pytest.fixture
def report(tmp_path, written):
    return shutil.copytree(written, tmp_path / "deep" / "report")


def test_a_report_holds_what_was_given(report, runs):
    assert content(report).keys() == FILES
    config = json.loads((report / "config.json").read_text())
    assert config["command"] == "fedstrata run x --out y"
    assert config["config"] == {"problem": "min f", "settings": {"H": [1, 5], "gamma": 0.5}}
    assert config["versions"]["numpy"] == np.__version__
    assert config["machine"]["cores"] == cores()
    assert (report / "table.md").read_text() == build_table(runs, TABLE, PAPER).to_markdown()
    loaded = load_report(report)
    assert loaded.definition.plots == (PlotSpec("loss", panels="H"),)
    assert loaded.definition.paper == PAPER
    assert loaded.table == build_table(runs, TABLE, PAPER)
    assert [run.label for run in loaded.runs] == [run.label for run in runs]


def test_rebuilding_gives_the_same_files(report):
    before = content(report)
    for file in ("table.csv", "table.md", "report.html", "plots/loss-by-round-h.svg"):
        (report / file).unlink()
    assert rebuild(report) == report / "report.html"
    assert content(report) == before


def test_a_changed_definition_is_rebuilt(report):
    config = json.loads((report / "config.json").read_text())
    config["notes"] = "Another note."
    config["plots"][0]["name"] = "renamed"
    config["table"]["columns"] = config["table"]["columns"][:1]
    (report / "config.json").write_text(json.dumps(config))
    (report / "plots" / "mine.txt").write_text("kept")
    rebuild(report)
    assert "Another note." in (report / "report.html").read_text()
    assert "seconds" not in (report / "table.csv").read_text()
    assert sorted(p.name for p in (report / "plots").iterdir()) == ["mine.txt", "renamed.png", "renamed.svg"]


def test_other_files_in_the_folder_stay(tmp_path, runs, monkeypatch):
    """The folder may be a volume: nothing is moved into it from elsewhere."""
    place, real = tmp_path / "report", os.replace
    place.mkdir()

    def moved(source, target):
        assert place in source.parents
        real(source, target)

    monkeypatch.setattr(os, "replace", moved)
    (place / "checkpoint.bin").write_text("precious")
    write(place, runs)
    assert content(place).keys() == FILES | {"checkpoint.bin"}


class Stop(Exception):
    pass


def _stop(*_args, **_kwargs):
    raise Stop


@pytest.mark.parametrize("step", ["to_png", "render", "write_history", "build_plot"])
def test_a_failure_leaves_nothing_behind(tmp_path, runs, monkeypatch, step):
    monkeypatch.setattr(folder_module, step, _stop)
    with pytest.raises(Stop):
        write(tmp_path / "report", runs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before_it", range(len(FILES)))
def test_a_failure_while_writing_leaves_the_old_report(report, runs, monkeypatch, before_it):
    before, real, count = content(report), type(report).write_bytes, iter(range(100))

    def full(path, data):
        if next(count) == before_it:
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(type(report), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write(report, runs[:8], table=TableSpec((Column("accuracy"),), ("H",)), paper=None)
    monkeypatch.undo()
    assert content(report) == before
    assert [p.name for p in report.parent.iterdir()] == ["report"]


def test_a_report_replaces_another(report, runs):
    write(report, runs[:4], plots=[], table=TableSpec((Column("accuracy"),), ("H",)), paper=None)
    assert content(report).keys() == {file for file in FILES if not file.startswith("plots/")}
    assert len(load_report(report).runs) == 4


@pytest.mark.parametrize("file", ["config.json", "runs.csv", "history.csv"])
def test_a_missing_file_is_named(report, file):
    (report / file).unlink()
    with pytest.raises(ReportError, match=f"has no {file}"):
        rebuild(report)


@pytest.mark.parametrize("file", ["runs.csv", "history.csv"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b.replace(b"FedMSA", b"FedMSB"), lambda b: b""]
)
def test_damaged_data_is_refused(report, file, damage):
    (report / file).write_bytes(damage((report / file).read_bytes()))
    before = content(report)
    with pytest.raises(ReportError, match=rf"{file} is not what the report was written with"):
        rebuild(report)
    assert content(report) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b'{"title": ', "is not valid JSON"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "not the definition of a report"),
        (b'{"title": "x"}', "table: Field required"),
        (
            b'{"title": "x", "table": {"columns": [{"metric": "loss"}]}, "format": 2}',
            "format: Input should be 1",
        ),
        (b'{"title": "x", "table": {"columns": [{"metric": "l", "reduce": "best"}]}}', "needs better"),
    ],
)
def test_a_damaged_definition_is_explained(report, config, message):
    (report / "config.json").write_bytes(config)
    with pytest.raises(ReportError, match=message):
        rebuild(report)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"the folder '.*nowhere' does not exist"):
        rebuild(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"has no config\.json: it is not the folder of a report"):
        rebuild(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="is a file"):
        write(tmp_path / "file", [RunRecord("A", {"H": 5}, 0, {"round": [0], "loss": [1.0]}, {}, 0.0, "A")])


def test_bad_definitions_are_refused_before_anything_is_written(tmp_path, runs):
    with pytest.raises(ReportError, match="JSON cannot hold"):
        write(tmp_path / "a", runs, config={"f": lambda x: x})
    with pytest.raises(ValueError, match="two plots have the same name"):
        write(tmp_path / "b", runs, plots=[PlotSpec("loss", panels="H")] * 2)
    with pytest.raises(ReportError, match="needs runs"):
        write(tmp_path / "c", [])
    assert list(tmp_path.iterdir()) == []


def test_a_plot_that_no_run_has_a_series_for_is_left_out_in_words(tmp_path, runs):
    plots = [PlotSpec("regret", panels="H"), PlotSpec("loss", panels="H"), PlotSpec("loss", x="exchanges")]
    page = write(tmp_path / "report", runs, plots=plots)
    assert content(page.parent).keys() == FILES
    words = "Not drawn, because no run has the series: regret by communication round; loss by exchanges."
    assert words in page.read_text("utf-8")
    regret, by_exchanges = load_report(page.parent).left_out
    assert regret.startswith("plot 'regret-by-round-h': no run has 'regret' beside 'round'; the histories")
    assert "'loss' beside 'exchanges'" in by_exchanges
    assert rebuild(page.parent) == page


def test_a_copied_folder_is_the_same_report(report, tmp_path):
    shutil.copytree(report, tmp_path / "copy")
    rebuild(tmp_path / "copy")
    assert content(tmp_path / "copy") == content(report)


class Page(html.parser.HTMLParser):
    """The elements of a page, its text, and the text of every cell."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.rows, self._open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self._open or "style" in self._open:
            return
        self.text.append(data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


def words_at(report, words):
    return (report / "report.html").read_text().index(words)


def test_the_page_says_everything(report, runs):
    page = Page((report / "report.html").read_text())
    titles = [attrs["id"] for tag, attrs in page.tags if tag == "section"]
    assert titles == ["top", "results", "solved", "paper", "ledger", "reproduce", "notes"]
    words = " ".join(page.text)
    for said in (
        "A title",
        "fedstrata run x --out y",
        "0, 1, 2, 3",
        "Table 1",
        "t-intervals of 95%",
    ):
        assert said in words
    assert re.search(rf"numpy\s+{re.escape(np.__version__)}", words)
    for line in build_table(runs, TABLE, PAPER).texts()[1]:
        assert line in page.rows
    (none,) = (row for row in page.rows if "FedMSA, H = 99" in row)
    assert none[2:] == ["0.25"]
    assert "1 printed number was not run here" in words
    assert (report / "report.html").read_text().index("<details>") < words_at(report, "FedMSA, H = 99")
    assert ["It improves with H.", "It does.", "reproduced"] in page.rows
    assert any(row[-2:-1] == ["1.6 MB"] for row in page.rows)


def test_nothing_on_the_page_comes_from_elsewhere(report):
    page = Page((report / "report.html").read_text())
    assert page.links
    assert all(link.startswith(("data:", "#")) for link in page.links)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


EVIL = """</script><script>alert("'1&")</script><img src=http://127.0.0.1:9/x onerror=alert(2)>"""


def test_everything_is_escaped(tmp_path):
    run = RunRecord(EVIL, {EVIL: EVIL}, 0, {"round": [0, 1], EVIL: [1.0, 2.0]}, {EVIL: 1}, 0.0, EVIL)
    harmless = RunRecord("A", {"B": "C"}, 0, {"round": [0, 1], "D": [1.0, 2.0]}, {"E": 1}, 0.0, "A")

    def page(run, word, key, metric):
        write_report(
            tmp_path / "report",
            word,
            [run],
            config={word: word, "nested": {word: [word, {word: word}]}},
            table=TableSpec((Column(metric, title=word),), ("label", key)),
            plots=[PlotSpec(metric, panels=key, title=word, caption=word, x_label=word, name="plot")],
            paper=PaperClaims(
                word, (Claim({"label": run.label}, word, 1),), (Statement(word, word, "partly"),)
            ),
            notes=f"{word}\n\n`{word}`\n\n![{word}](http://127.0.0.1:9/y)\n\n[a](javascript:alert(3))",
            command=word,
        )
        return Page((tmp_path / "report" / "report.html").read_text())

    evil, plain = page(run, EVIL, EVIL, EVIL), page(harmless, "word", "B", "D")
    # The same elements, so none of them came from a name; and the name can be read.
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert all(link.startswith(("data:", "#")) for link in evil.links if link != "http://127.0.0.1:9/y")
    assert not any(name.startswith("on") for _, attrs in evil.tags for name in attrs)
    assert EVIL in "".join(evil.text)
    figures = re.findall(
        r'id="figure-plot">(.*?)</script>', (tmp_path / "report" / "report.html").read_text()
    )
    assert [("<" in text, json.loads(text)["data"][0]["name"]) for text in figures] == [(False, "A")]


def test_notes_are_markdown_without_pictures_or_tags():
    made = markdown("a **b**\n\n| x |\n|---|\n| 1 |")
    assert "<strong>b</strong>" in made
    assert "<td>1</td>" in made
    assert "<img" not in markdown("![a](http://127.0.0.1:9/x) <img src=y>")


def test_runs_that_diverged_are_named(tmp_path):
    runs = [
        RunRecord("A", {"H": 1}, seed, {"round": [0, 1], "loss": [1.0, last]}, {}, 1.0, "A")
        for seed, last in enumerate([0.5, np.nan])
    ]
    words = " ".join(Page(write(tmp_path / "r", runs, paper=None).read_text()).text)
    assert "not finite: A, H = 1, seed 1: loss." in words
    assert duration(3725) == "1 h 2 min"


def test_a_page_without_plots_is_small(tmp_path, runs):
    text = write(tmp_path / "r", runs, plots=[], config={}, notes="", paper=None).read_text()
    assert len(text) < 60_000
    sections = [a["id"] for tag, a in Page(text).tags if tag == "section"]
    assert sections == ["top", "results", "ledger", "reproduce"]


def test_the_first_paragraph_of_the_findings_comes_first(tmp_path, runs):
    text = write(tmp_path / "r", runs, findings="It **works**.\n\nIn detail, it does.").read_text()
    places = [text.index(said) for said in ("It <strong>works", 'class="plot"', "In detail", "<table>")]
    assert places == sorted(places)


def test_without_findings_a_sentence_is_made_of_the_table(tmp_path, runs):
    said = headline(build_table(runs, TABLE))
    assert said in " ".join(Page(write(tmp_path / "r", runs).read_text()).text)


def rivals(*rows, seeds=3, H=(1,)):
    """Runs of methods A, B, … whose final values are a row's base plus a bit for the seed."""
    return [
        RunRecord(
            label, {"H": h}, s, {"round": [0], "loss": [base + 0.1 * s + 0.01 * (s == k)]}, {}, 0.0, label
        )
        for k, (label, base) in enumerate(zip("ABC", rows, strict=False))
        for h in H
        for s in range(seeds)
    ]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (rivals(1.0, 2.0), "A has the lowest loss, 1.103 ± 0.055: ahead of every other in a paired"),
        (
            rivals(1.0, 1.0),
            "No significant difference in loss: the lowest mean is 1.103 ± 0.055 (A)",
        ),
        (
            rivals(1.0, 2.0, seeds=1),
            "With one seed, loss is between 1.01 (A) and 2 (B); one seed",
        ),
        (
            rivals(1.0, 2.0, H=(1, 5)),
            "Of 2 settings, by loss: significantly ahead are A in 2 (paired t-tests",
        ),
        (rivals(1.0), "A: loss 1.103 ± 0.055, mean over 3 seeds."),
        (rivals(float("nan")), "No run ended with a finite number for loss."),
    ],
)
def test_the_sentence_says_no_more_than_the_seeds_allow(runs, said):
    spec = TableSpec((Column("seconds", "run"), Column("loss", better="low")), ("label", "H"))
    assert headline(build_table(runs, spec)).startswith(said)


def test_the_split_is_drawn(tmp_path, runs):
    clients = [{"x": np.ones((n, 2)), "y": np.arange(n) % 2} for n in (3, 5)]
    data = replace(FederatedData.from_clients(clients), names=("north", "south"))
    split = split_of(data, caption="By nature.")
    assert split == Split((3, 5), {"0": (2, 3), "1": (1, 2)}, ("north", "south"), "By nature.")
    page = Page(write(tmp_path / "r", runs, split=split).read_text())
    (panel,) = plot_of(split).panels
    assert (panel.grid.rows, panel.grid.columns) == (["north (3)", "south (5)"], ["0", "1"])
    np.testing.assert_array_equal(panel.grid.means, [[2, 1], [3, 2]])
    assert "2 clients, 8 training samples, 3 to 5 each. By nature." in " ".join(page.text)
    assert load_report(tmp_path / "r").definition.split == split


def test_a_split_over_many_clients_is_a_histogram_of_their_sizes(tmp_path, runs):
    split = Split(tuple(range(1, 101)))
    words = " ".join(Page(write(tmp_path / "r", runs, split=split).read_text()).text)
    assert "100 clients, 5050 training samples, 1 to 100 each." in words
    (curve,) = plot_of(split).panels[0].curves
    assert curve.y.mean.sum() == 100
    with pytest.raises(ValueError, match="a split of 2 clients has 1 names"):
        Split((1, 2), names=("a",))


def test_formulas_are_set_and_keys_are_words(tmp_path, runs):
    text = write(
        tmp_path / "r", runs, config={"problem": "min_x 1/m Σ_i f_i(x, ξ)", "eta_lam": 1}
    ).read_text()
    assert "min<sub>x</sub> 1/m Σ<sub>i</sub> f<sub>i</sub>(x, ξ)" in text
    assert "eta_lam" not in " ".join(Page(text).text)
