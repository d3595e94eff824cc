"""Several reports in one page."""

import re

import pytest

from fedstrata.lab.report import Column, PlotSpec, ReportError, TableSpec, compare, write_report

LOSS, ACCURACY = Column("loss", better="low"), Column("accuracy", better="high")


@pytest.fixture
def write(tmp_path, make_runs):
    def write(name, columns, plots, **changes):
        fields = {"config": {}, "table": TableSpec(columns, ("label", "H")), "plots": plots}
        return write_report(tmp_path / name, f"Title of {name}", make_runs(**changes), **fields).parent

    return write


def cells(text):
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_what_reports_have_in_common_stands_side_by_side(write, tmp_path):
    by_round, by_time = PlotSpec("loss", panels="H"), PlotSpec("loss", x="seconds", panels="H")
    a = write("a", (LOSS, ACCURACY), [by_round, by_time])
    b = write("b", (LOSS,), [by_round], seeds=3)
    page = compare([a, b], tmp_path / "out" / "both.html")
    text = page.read_text()
    assert [p.name for p in page.parent.iterdir()] == ["both.html"]
    together = text[text.index('id="together"') : text.index("<article")]
    table = cells(together)
    assert table[0] == ["method", "H", "seeds", "loss"]
    assert [row[:3] for row in table[1:3]] == [["FedAvg · a", "1", "4"], ["FedAvg · a", "5", "4"]]
    assert ["FedMSA · b", "5", "3"] in [row[:3] for row in table]
    assert re.findall(r'data-figure="(.*?)"', together) == ["figure-all-loss-by-round-h"]
    assert text.count("<article") == 2
    ids = re.findall(r' id="(.*?)"', text)
    assert len(set(ids)) == len(ids)
    assert {"r0-results", "r1-results", "figure-r0-loss-by-seconds-h"} <= set(ids)
    for link in re.findall(r'href="#(.*?)"', text):
        assert link in ids


def test_reports_with_nothing_in_common_stand_below_each_other(write, tmp_path):
    a, b = write("a", (LOSS,), []), write("b", (ACCURACY,), [])
    text = compare([a, b], tmp_path / "both.html", "Both").read_text()
    assert "<title>Both</title>" in text
    assert 'id="together"' not in text
    assert text.count("<article") == 2


def test_what_cannot_be_compared_is_said(write, tmp_path):
    a = write("a", (LOSS,), [])
    with pytest.raises(ReportError, match="two folders or more"):
        compare([a])
    with pytest.raises(ReportError, match="given twice"):
        compare([a, tmp_path / "b" / ".." / "a"])
    with pytest.raises(ReportError, match="does not exist"):
        compare([a, tmp_path / "nowhere"])


def test_folders_of_one_name_are_told_apart_by_their_paths(write, tmp_path):
    folders = [write("x/run", (LOSS,), []), write("y/run", (LOSS,), [])]
    text = compare(folders, tmp_path / "both.html").read_text()
    assert "FedAvg · x/run" in text
    assert "FedAvg · y/run" in text
