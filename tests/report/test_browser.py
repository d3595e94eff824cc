"""The page in a real browser: it draws its plots, complains of nothing and asks nobody."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image
import pytest

from fedstrata.report import Column, PlotSpec, Reference, TableSpec, write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser on the PATH: install one of {', '.join(NAMES)}"
)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    # The browser's own services find nobody either.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
]


class Visit(NamedTuple):
    dom: str
    console: list[str]
    requests: list[str]


def browse(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={folder / 'user'}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def visit(page: Path, folder: Path, *flags: str) -> Visit:
    log = folder / "net.json"
    done = browse(page, folder, *flags, f"--log-net-log={log}", "--dump-dom")
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)
    events = json.loads(log.read_text())["events"]
    # What the browser asks for on its own account has no initiator.
    asked = [
        e["params"]
        for e in events
        if e.get("params", {}).get("initiator", "not an origin") != "not an origin"
    ]
    local = ("file:", "data:", "blob:")
    return Visit(
        done.stdout, console, [p["url"] for p in asked if not p.get("url", "file:").startswith(local)]
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory, make_runs):
    return write_report(
        tmp_path_factory.mktemp("page") / "report",
        "A title",
        make_runs(),
        config={"problem": "min f"},
        table=TableSpec((Column("loss"),), ("label", "H")),
        plots=[
            PlotSpec("loss", panels="H", log_y=True, references=(Reference(0.5, "level"),)),
            PlotSpec("accuracy", x="bytes_up", lines=("label", "H")),
            PlotSpec("loss", x="H", kind="bar"),
            PlotSpec("loss", x="H", kind="heatmap", down="label", name="heat"),
        ],
        notes="![x](http://127.0.0.1:9/x.png)",
    )


def test_the_visit_sees_errors_and_requests(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("boom"); missing()</script>')
    seen = visit(bad, tmp_path)
    assert any("boom" in line for line in seen.console)
    assert any("missing is not defined" in line for line in seen.console)
    assert "http://127.0.0.1:9/x.png" in seen.requests


@pytest.mark.parametrize("scheme", [1, 0], ids=["light", "dark"])
def test_the_page_draws_its_plots_and_asks_nobody(page, tmp_path, scheme):
    seen = visit(page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert seen.console == []
    assert seen.requests == []
    drawn = re.findall(r'<div class="drawn.*?</figcaption>', seen.dom, re.DOTALL)
    assert len(drawn) == 4
    assert all('class="main-svg"' in plot for plot in drawn)
    lines, by_bytes, bars, heat = drawn
    # A band and a line for each of four curves, in two panels or in one.
    assert lines.count('class="trace scatter') == by_bytes.count('class="trace scatter') == 8
    assert bars.count('class="point"') == 4
    assert 'class="hm"' in heat
    colours = ("rgb(0, 114, 178)", "rgb(74, 168, 224)")
    assert [colour in lines for colour in colours] == [scheme == 1, scheme == 0]
    for said in ("level", "H = 5", "FedMSA", "communication round"):
        assert said in lines


def test_without_scripts_the_static_plots_stay(page, tmp_path):
    still, bare = tmp_path / "still.html", tmp_path / "bare.html"
    still.write_text(page.read_text().replace("script-src 'unsafe-inline'", "script-src 'none'", 1))
    bare.write_text(re.sub(r"<img .*?>", "", still.read_text()))

    def coloured(page):
        browse(page, tmp_path, "--window-size=900,3000", f"--screenshot={tmp_path / 'shot.png'}")
        pixels = np.asarray(PIL.Image.open(tmp_path / "shot.png").convert("RGB"))
        return (pixels == (0xD5, 0x5E, 0x00)).all(axis=-1).sum()

    assert coloured(still) > 1000
    assert coloured(bare) == 0


def test_where_plotly_does_not_load_the_static_plots_stay(page, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('id="plotly">', 'id="plotly">AAAA', 1))
    seen = visit(broken, tmp_path)
    assert "main-svg" not in seen.dom
    assert '<html lang="en" class="">' in seen.dom  # the class that hides the pictures is gone
    assert "the static ones are shown" in seen.console[0]
