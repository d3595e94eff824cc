"""What a party tells over HTTP."""

import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from fedstrata.engines.network.watching import Gauge, address_of, served
from fedstrata.lab.experiments.net import STYLE, _gauges

from ..report.chromium import ABSENT, FOUND, Chromium

SITE = {"connected": True, "expires": 4e9, "waited": 0.5, "sent": 10, "received": 20, "failures": 1}
FACTS = {
    "pid": 1, "time": 0.0, "round": 3, "rounds": 8, "attempts": 5, "exchanges": 9, "seconds": 0.5,
    "epsilon": 1.5, "sites": {'a"b': SITE},
}  # fmt: skip


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()


def test_metrics_health_and_a_page():
    with served(lambda: _gauges(FACTS), "0", "a run <b>", "h1 { color: red }") as port:
        text = get(port, "/metrics")
        assert "# TYPE fedstrata_sent_bytes_total counter\n" in text
        assert 'fedstrata_sent_bytes_total{site="a\\"b"} 10\n' in text
        assert "fedstrata_round 3\n" in text
        assert get(port, "/healthz") == "ok\n"
        page = get(port, "/")
        assert "a run &lt;b&gt;" in page
        assert "<b>" not in page
        assert "<style>h1 { color: red }</style>" in page
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(port, "/etc/passwd")
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


@pytest.mark.long
@pytest.mark.skipif(FOUND is None, reason=ABSENT)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_in_a_browser(width, dark, tmp_path):
    """It is drawn in the report's style, follows the run by itself, and asks nobody else."""
    facts = {**FACTS, "round": 3}
    told = served(lambda: _gauges(facts), "0", "a run <b>", STYLE.read_text("utf-8"))
    with told as port, Chromium(tmp_path / "profile") as browser:
        page = browser.open(f"http://127.0.0.1:{port}/", width=width, dark=dark)
        cell = "[...document.querySelectorAll('tr')].find(row => row.innerText.includes('evaluated'))"
        assert page("document.querySelector('h1').innerText") == "a run <b>"
        assert page(f"{cell}.cells[2].innerText") == "3"
        colour = page("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, colour.strip("rgb()").split(","))) < 384) == dark
        assert page("document.documentElement.scrollWidth") <= width
        page.screenshot(tmp_path / "page.png")
        facts["round"] = 4
        page.wait(f"{cell}?.cells[2].innerText === '4'", 10.0)
        assert {urlsplit(url).netloc for url in page.requests} == {f"127.0.0.1:{port}"}
        assert page.complaints == []


def test_where_it_listens():
    assert address_of("9464") == ("127.0.0.1", 9464)
    assert address_of("[::1]:80") == ("::1", 80)
    with pytest.raises(ValueError, match="--watch needs a port"):
        address_of("everywhere")
    with served(lambda: [Gauge("round", 1, "the round")], None, "") as port:
        assert port is None
