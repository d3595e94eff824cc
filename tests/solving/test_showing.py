"""What objects say of themselves: in a line, in a table, in a notebook; and how long a run compiled."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest
from rich.console import Console

import fedstrata as fs
from fedstrata.lab.report import history_table
from fedstrata.testing.cases import all_cases

CASES = {case.name: case for case in all_cases()}
data = fs.FederatedData.from_clients([{"a": np.full((n, 2), float(n))} for n in (4, 2, 8)])


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


def solve(**more):
    metrics = {"<b>": lambda x, y: x[0], "each": fs.per_client(loss)}
    return fs.solve(
        fs.Minimization(loss), fs.FedAvg(0.1, H=2), data, np.zeros(2), rounds=4, metrics=metrics,
        progress=False, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return solve()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_line_and_a_fragment(case):
    for thing in (case.method, case.problem, case.data):
        line = repr(thing)
        assert "\n" not in line
        assert len(line) <= 110
        assert line.startswith(type(thing).__name__)
        assert " at 0x" not in line
    for thing in (case.method, case.problem):
        assert " at 0x" not in thing._repr_html_()
        ET.fromstring(thing._repr_html_())


def test_data_has_a_picture_of_its_split():
    page = ET.fromstring(fs.data.heart()._repr_html_())
    assert len(list(page.iter("{http://www.w3.org/2000/svg}svg"))) == 1


def test_what_is_said():
    assert repr(fs.FedAvg(gamma=0.1, H=5)) == "FedAvg(gamma=0.1, H=5)"
    assert (
        repr(fs.FedAvg(0.1, H=np.array([1, 2, 0]), batch_size=8))
        == "FedAvg(gamma=0.1, H=[1, 2, 0], batch_size=8)"
    )
    assert repr(fs.Minimization(loss)) == "Minimization(loss=loss)"
    assert repr(data) == "FederatedData(3 clients, 14 samples (2–8 each), a float64[2])"
    said = []
    jax.eval_shape(lambda gamma: said.append(repr(fs.FedAvg(1.0).replaced({"gamma": gamma}))), 1.0)
    assert said == ["FedAvg(gamma=traced)"]


def test_a_result(result):
    line, advice = repr(result).splitlines()
    assert len(line) <= 110
    assert advice == "  Solved? result.certificate tells."
    assert line.startswith("Result(FedAvg, 4 rounds, <b> 0 → ")
    assert "uniform weights" in line
    assert repr(result.ledger) == (
        "Ledger(rounds=4, exchanges=4, bytes_up=96, bytes_down=96, oracle_calls=112)"
    )
    page = ET.fromstring(result._repr_html_())
    axes = [g for g in page.iter("{http://www.w3.org/2000/svg}g") if g.get("id", "").startswith("axes_")]
    assert len(axes) == 3  # loss, <b> and each, not its quantiles
    assert "<b>" in "".join(page.itertext())
    assert page.find(".//b") is None
    ET.fromstring(result.ledger._repr_html_())


def test_tables_in_a_notebook_are_tables(result):
    bundle = result.table()._repr_mimebundle_()
    assert bundle["text/plain"] == str(result.table())
    page = ET.fromstring(f"<div>{bundle['text/html']}</div>")
    assert len(page.findall(".//tr")) == 6
    assert "exchanges 4" in page.findall("./div")[-1].text
    fits = fs.applicable(fs.Selection(loss, lambda x: x @ x))
    assert len(ET.fromstring(fits._repr_html_()).findall(".//tr")) == len(fits) + 1


def test_a_table_is_text_where_it_is_printed(result, monkeypatch):
    for width in (200, 60, 36):
        monkeypatch.setenv("COLUMNS", str(width))
        text = str(result.table())
        assert max(map(len, text.splitlines())) <= width
        words = text.split()
        for name in ["loss", "each/worst", "each/spread"]:
            assert words.count(name) == 1
        assert "\x1b" not in text
    assert words.count("round") > 3  # the narrow one is in parts, each with its rounds


@pytest.mark.parametrize("names", [[], ["loss"]])
def test_the_words_below_a_narrow_table_are_as_wide_as_the_page(names, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    history = {"round": np.arange(3), **{name: np.ones(3) for name in names}}
    text = str(history_table(history, {"rounds": 3, "exchanges": 3, "bytes_up": 24, "bytes_down": 24}))
    assert text.splitlines()[-1] == "rounds 3, exchanges 3, bytes up 24 B, bytes down 24 B"


@pytest.mark.parametrize("width", [40, 120])
def test_no_number_is_cut_in_a_terminal(width):
    history = {"round": np.arange(3), **{f"metric-{j}": np.full(3, 1234.5678 + j) for j in range(9)}}
    console = Console(width=width, file=io.StringIO())
    console.print(history_table(history))
    text = console.file.getvalue()
    assert all(text.count(f"metric-{j}") == 1 for j in range(9))
    assert "…" not in text


def test_compiling_is_told_apart(result, tmp_path):
    assert 0 < result.compiling < result.seconds
    running = result.seconds - result.compiling
    assert 0 < result.history["seconds"][-1] <= running
    loaded = fs.Result.load(result.save(tmp_path).parent)
    assert loaded.compiling == result.compiling
    assert repr(loaded) == repr(result).splitlines()[0]


def test_what_is_compiled_already_takes_no_time(tmp_path):
    problem, method = fs.Minimization(loss), fs.FedAvg(0.1, H=2)

    def run(**more):
        return fs.solve(problem, method, data, np.zeros(2), rounds=2, progress=False, **more)

    first = run(checkpoint=tmp_path)
    assert run().compiling == 0
    resumed = run(checkpoint=tmp_path, resume=True)
    assert resumed.compiling == first.compiling
    assert resumed.seconds >= first.seconds - first.compiling
