from pathlib import Path

import pytest

from tests.check_docstrings import faults, report

PACKAGE = Path(__file__).parents[1] / "fedstrata"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists())

FULL = (
    "A program is traced once and runs many times, so that what is counted is known when traced, to factors"
)
ROW = "    series    v = the sum of the powers of (I - H/l) times b, an approximation      N - 1 exchanges"
STEP = "    1  server: toss coins until the first success, which has probability p, then send both x and"


def torn(*lines: str) -> list[int]:
    return [row for row, _ in faults("\n".join(['"""Title.', "", *lines, '"""', ""]))]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_whole(room):
    assert report(PACKAGE / room) == []


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        ([FULL, "that", "are known only when it runs."], [4]),
        (["Args:", f"    x: {FULL[:95]}", "        that", "        are known."], [5]),
        (["| a | b |", "|---|---|", "| 1 |", "2 |"], [5]),
        ([f"{ROW} or more", "    times the last v: an inexact step      N exchanges"], [4]),
        ([f"{STEP} the T of", "        coins", "    2  client: x"], [4]),
        (["    1  server: x", "    3  client: y"], [4]),
    ],
)
def test_what_a_reflow_tears_is_found(lines, rows):
    assert torn(*lines) == rows


@pytest.mark.parametrize(
    "lines",
    [
        [FULL, "that are known only when it runs.", "", "Short.", "", "Two words"],
        ["Args:", "    x: a point.", "    y, z: others.", "", "Returns:", "    A number."],
        ["- one", "- two", "", ">>> 1 + 1", "2"],
        ["| a | b |", "|---|---|", "| 1 | 2 |", "", "| a |", "|---|"],
        [f"{ROW} or more", "    none      v = 0".ljust(ROW.index("N - 1")) + "no exchange"],
        ["    1  server: x", "    2  client: y", "           more of it", "", "    1  another: z"],
    ],
)
def test_what_is_whole_is_left_alone(lines):
    assert torn(*lines) == []


def test_comments_are_read():
    assert [row for row, _ in faults(f"# {FULL}\n# that\n# are known.\nx = 1  # one\ny = 2  # two\n")] == [2]
