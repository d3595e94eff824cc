import csv
import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedstrata.core.counting import Ledger
from fedstrata.lab.report import (
    Claim,
    Column,
    PaperClaims,
    ReportError,
    RunRecord,
    TableSpec,
    build_table,
    history_table,
)
from fedstrata.lab.report.statistics import mean_error
from fedstrata.lab.report.tables import ledger_table


def of(runs, label, H):
    return [run for run in runs if run.label == label and run.setting["H"] == H]


def read(table):
    return list(csv.DictReader(io.StringIO(table.to_csv())))


def text(table, width=200):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


REDUCTIONS = {
    Column("loss"): lambda run: run.history["loss"][-1],
    Column("loss", "first"): lambda run: run.history["loss"][0],
    Column("loss", "min"): lambda run: min(run.history["loss"]),
    Column("loss", "max"): lambda run: max(run.history["loss"]),
    Column("accuracy", "best", better="high"): lambda run: max(run.history["accuracy"]),
    Column("loss", "best", better="low"): lambda run: min(run.history["loss"]),
    Column("loss", "mean_last", last=3): lambda run: sum(run.history["loss"][-3:]) / 3,
    Column("bytes_up", "ledger"): lambda run: 1_600_000,
    Column("seconds", "run"): lambda run: run.seconds,
}


@pytest.mark.parametrize("column", REDUCTIONS, ids=lambda column: column.heading)
def test_means_and_standard_errors_are_numpys(runs, column):
    rows = read(build_table(runs, TableSpec((column,), ("label", "H"))))
    assert [(row["label"], row["H"], row["seeds"]) for row in rows] == [
        ("FedAvg", "1", "4"),
        ("FedAvg", "5", "4"),
        ("FedMSA", "1", "4"),
        ("FedMSA", "5", "4"),
    ]
    for row in rows:
        values = np.array([REDUCTIONS[column](run) for run in of(runs, row["label"], int(row["H"]))])
        np.testing.assert_allclose(float(row[f"{column.heading} mean"]), np.mean(values), rtol=1e-14)
        error = np.std(values, ddof=1) / np.sqrt(4)
        np.testing.assert_allclose(float(row[f"{column.heading} se"]), error, rtol=1e-12, atol=0)


def test_reach_is_the_first_time_a_target_is_met():
    def run(seed, accuracy):
        history = {"round": [0, 5, 10], "accuracy": accuracy, "bytes_up": [0, 50, 100]}
        return RunRecord("A", {}, seed, history, {}, 0.0, "A")

    column = Column("accuracy", "reach", better="high", target=0.9, at="bytes_up")
    both = build_table([run(0, [0, 0.95, 0.8]), run(1, [0, 0.5, 0.9])], TableSpec((column,)))
    assert both.rows[0].cells[0].mean == 75
    half = build_table([run(0, [0, 0.95, 0.8]), run(1, [0, 0.5, 0.8])], TableSpec((column,)))
    assert "reached by 1 of 2" in half.to_markdown()
    none = build_table([run(0, [0, 0.1, 0.2])], TableSpec((column,)))
    assert "not reached" in none.to_markdown()


def test_one_seed_has_no_standard_error(runs):
    table = build_table(runs[:1], TableSpec((Column("loss"),)))
    row = read(table)[0]
    assert row["loss se"] == ""
    assert row["seeds"] == "1"
    assert "±" not in table.to_markdown()


def test_settings_across_are_columns_and_a_missing_one_is_a_dash(runs):
    kept = [run for run in runs if (run.label, run.setting["H"]) != ("FedMSA", 5)]
    table = build_table(kept, TableSpec((Column("loss"),), across="H"))
    assert table.to_markdown().splitlines()[0] == "| method | seeds | H = 1 | H = 5 |"
    assert table.to_markdown().splitlines()[3].endswith("| – |")
    expected = np.mean([run.history["loss"][-1] for run in of(runs, "FedAvg", 5)])
    assert math.isclose(table.rows[0].cells[1].mean, expected, rel_tol=1e-14)


def test_a_mean_over_settings_is_not_taken_for_one_over_seeds(runs):
    with pytest.raises(ReportError, match="label=FedAvg: these runs differ in 'H'"):
        build_table(runs, TableSpec((Column("loss"),)))
    with pytest.raises(ReportError, match="a seed occurs twice"):
        build_table([runs[0], runs[0]], TableSpec((Column("loss"),)))


def rivals(**values):
    return [
        RunRecord(label, {"H": h}, seed, {"round": [0], "m": [last]}, {}, 0.0, label)
        for name, seeds in values.items()
        for label, h in [(name[0], int(name[1:]))]
        for seed, last in enumerate(seeds)
    ]


def test_best_is_per_setting_and_follows_the_direction():
    runs = rivals(A1=(1.0, 1.1), B1=(2.0, 2.1), A5=(8.0, 9.0), B5=(4.0, 5.0), C5=(math.nan, math.nan))
    keys = ("label", "H")
    assert build_table(runs, TableSpec((Column("m", better="low"),), keys)).best(0) == {0, 3}
    assert build_table(runs, TableSpec((Column("m", better="high"),), keys)).best(0) == {1, 2}
    assert build_table(runs, TableSpec((Column("m"),), keys)).best(0) == set()
    markdown = build_table(runs, TableSpec((Column("m", better="low"),), keys)).to_markdown()
    assert "| A | 1 | 2 | **1.050 ± 0.050** |" in markdown
    assert "| C | 5 | 2 | not finite |" in markdown


def test_best_is_what_a_paired_test_over_seeds_finds():
    rng = np.random.default_rng(3)
    for _ in range(200):
        shared = rng.normal(size=5)  # what a seed does to every method: pairing takes it away
        a, b, c = (shared + rng.normal(shift, 0.2, 5) for shift in (0, 0.25, 0.25))
        table = build_table(rivals(A1=a, B1=b, C1=c), TableSpec((Column("m", better="low"),), ("label", "H")))
        values = dict(zip((0, 1, 2), (a, b, c), strict=True))
        first = min(values, key=lambda i: values[i].mean())
        p = [stats.ttest_rel(values[first], values[i]).pvalue for i in values if i != first]
        assert table.best(0) == ({first} if max(p) < 0.05 else set())


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        (rivals(A1=(1.0,), B1=(9.0,)), set()),  # one seed
        (rivals(A1=(1.0, 2.0), B1=(1.0, 2.0)), set()),  # equal
        (rivals(A1=(1.0, 2.0), B1=(1.5, 2.5)), {0}),  # the same difference in every seed
        (rivals(A1=(1.0, 2.0)), set()),  # nobody to compare with
        (rivals(A1=(1.0, 2.0), B1=(5.0, math.nan)), set()),  # a rival that diverged sometimes
        (rivals(A1=(1.0, 2.0), B1=(math.nan, math.inf)), {0}),  # and one that always did
        (rivals(A1=(1.0, math.nan), B1=(5.0, 6.0)), set()),
    ],
)
def test_nothing_is_best_without_evidence(runs, best):
    assert build_table(runs, TableSpec((Column("m", better="low"),), ("label", "H"))).best(0) == best


def test_a_reference_without_the_setting_competes_in_every_one():
    def best(**values):
        reference = [replace(run, setting={}) for run in rivals(R0=values.pop("R"))]
        table = build_table(
            rivals(**values) + reference, TableSpec((Column("m", better="low"),), ("label", "H"))
        )
        return {table.rows[i].values for i in table.best(0)}

    methods = {"A1": (1.0, 1.1), "B1": (2.0, 2.1), "A5": (8.0, 8.1), "B5": (4.0, 4.1)}
    assert best(**methods, R=(0.5, 0.6)) == {("R", None)}
    assert best(**methods, R=(3.0, 3.1)) == {("A", 1)}  # ahead with H = 5 alone, which is not everywhere
    assert best(**methods, R=(9.0, 9.1)) == {("A", 1), ("B", 5)}


def test_claims_stand_beside_the_numbers(runs):
    claims = (
        Claim({"label": "FedMSA", "H": 5}, "loss", 0.5, error=0.1),
        Claim({"label": "X", "H": 1}, "loss", 1),
    )
    table = build_table(runs, TableSpec((Column("loss"),), ("label", "H")), PaperClaims("Table 1", claims))
    row = read(table)[3]
    mean = np.mean([run.history["loss"][-1] for run in of(runs, "FedMSA", 5)])
    assert float(row["loss paper"]) == 0.5
    np.testing.assert_allclose(float(row["loss deviation"]), (mean - 0.5) / 0.5, rtol=1e-12)
    assert f"| 0.5 ± 0.1 | {100 * (mean - 0.5) / 0.5:+.3g} % |".replace("-", "−") in table.to_markdown()
    assert read(table)[0]["loss paper"] == ""
    hidden = TableSpec((Column("loss"),), ("label", "H"), paper=False)
    assert "paper" not in build_table(runs, hidden, PaperClaims("", claims)).to_csv()


def test_what_names_nothing_is_refused(runs):
    keys = ("label", "H")
    with pytest.raises(ReportError, match=r"'regret'.*\['round', 'loss'"):
        build_table(runs, TableSpec((Column("regret"),), keys))
    with pytest.raises(ReportError, match=r"the ledgers have \['rounds'"):
        build_table(runs, TableSpec((Column("bytes_down", "ledger"),), keys))
    with pytest.raises(ReportError, match=r"no run has a 'K'; .*\['label', 'method', 'H'\]"):
        build_table(runs, TableSpec((Column("loss"),), ("label", "K")))
    with pytest.raises(ReportError, match="needs runs"):
        build_table([], TableSpec((Column("loss"),), keys))
    spec = TableSpec((Column("loss"),), keys)
    with pytest.raises(ReportError, match="about the column 'los'"):
        build_table(runs, spec, PaperClaims("", (Claim({"label": "FedAvg", "H": 1}, "los", 1),)))
    with pytest.raises(ReportError, match="no run has a 'h'"):
        build_table(runs, spec, PaperClaims("", (Claim({"label": "FedAvg", "h": 1}, "loss", 1),)))
    with pytest.raises(ReportError, match="fits several rows"):
        build_table(runs, spec, PaperClaims("", (Claim({"label": "FedAvg"}, "loss", 1),)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reduce": "best"}, "needs better"),
        ({"reduce": "reach", "better": "low"}, "needs a target"),
        ({"reduce": "run"}, "'seconds'"),
        ({"reduce": "median"}, "final"),
        ({"last": 0}, "at least one"),
        ({"format": ".3q"}, "not a format"),
    ],
)
def test_bad_columns_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Column("loss", **fields)


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match="same heading"):
        TableSpec((Column("loss"), Column("loss")))
    with pytest.raises(ValueError, match="both down and across"):
        TableSpec((Column("loss"),), ("H",), across="H")
    with pytest.raises(ValueError, match="at least one column"):
        TableSpec(())


def test_markdown_is_escaped():
    run = RunRecord("a|b*c", {}, 0, {"round": [0], "loss": [1.0]}, {}, 0.0, "A")
    assert r"| a\|b\*c |" in build_table([run], TableSpec((Column("loss"),))).to_markdown()


def test_the_terminal_shows_the_same_cells(runs):
    table = build_table(
        runs,
        TableSpec(
            (Column("loss", better="low"), Column("bytes_up", "ledger", format="bytes")), ("label", "H")
        ),
    )
    shown = text(table.to_rich("Losses"))
    assert "Losses" in shown
    for line in table.texts()[1]:
        assert all(cell in shown for cell in line)
    assert "1.6 MB" in shown


def test_a_wide_table_stands_in_blocks_that_fit(runs):
    columns = tuple(
        Column("loss", "reach", f"rounds until the loss is {t}", better="low", target=t)
        for t in (1.5, 1.4, 1.3)
    )
    table = build_table(runs, TableSpec((Column("loss"), *columns), ("label",), across="H"))
    cells = table.texts()[1]
    shown = text(table.to_rich("Losses"), width=60)
    assert max(map(len, shown.splitlines())) <= 60
    assert "…" not in shown
    assert shown.count("Losses") == 1
    words = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    for row in cells:  # a row's blocks one after the other are the row, each beginning with its key
        blocks = [line for line in words if line[0] == row[0]]
        assert len(blocks) > 1
        assert [cell for block in blocks for cell in block[1:]] == row[1:]
    assert len(text(table.to_rich(), width=60).splitlines()) > len(text(table.to_rich()).splitlines())
    assert len([line for line in text(table.to_rich(), width=300).splitlines() if "FedAvg" in line]) == 1


def test_equal_numbers_have_no_error():
    value = 13815.840000000002
    assert mean_error([value] * 3) == (value, 0.0)


def test_a_label_in_brackets_is_no_markup():
    run = RunRecord("[red]A[/red]", {}, 0, {"round": [0], "loss": [1.0]}, {}, 0.0, "A")
    assert "[red]A[/red]" in text(build_table([run], TableSpec((Column("loss"),))).to_rich())


def test_ledger_totals_and_levels(runs):
    table = ledger_table(runs, ("label", "H"))
    assert [head.title for head in table.heads] == ["rounds", "exchanges", "bytes up", "seconds"]
    assert ledger_table(runs, ("label", "H"), by_level=True) is None
    ledger = Ledger(
        levels={"main": {"exchanges": 2, "bytes_up": 8}, "lower": {"exchanges": 6, "bytes_up": 4}}
    )
    run = RunRecord("A", {}, 0, {"round": [0]}, ledger, 0.0, "A")
    levels = ledger_table([run], ("label",), by_level=True)
    assert {head.title: cell.mean for head, cell in zip(levels.heads, levels.rows[0].cells, strict=True)} == {
        "main: exchanges": 2,
        "main: bytes up": 8,
        "lower: exchanges": 6,
        "lower: bytes up": 4,
    }
    bare = RunRecord("A", {}, 0, {"round": [0]}, {}, 0.0, "A")
    assert ledger_table([bare], ("label",)) is None


def test_a_history_shows_its_first_and_last_round():
    history = {"loss": np.linspace(1, 0, 101), "round": np.arange(101) * 7}
    shown = text(history_table(history, {"bytes_up": 4_200_000, "rounds": 700}, title="FedAvg", rows=5))
    assert "bytes up 4.2 MB, rounds 700" in " ".join(shown.split())
    lines = [line.split() for line in shown.splitlines() if line.split() and line.split()[0].isdigit()]
    assert lines == [["0", "1"], ["175", "0.75"], ["350", "0.5"], ["525", "0.25"], ["700", "0"]]


def test_many_seeds_are_counted_per_row(make_runs):
    runs = make_runs(seeds=3, labels=("A",), H=(1,)) + make_runs(seeds=2, labels=("A",), H=(5,))
    assert build_table(runs, TableSpec((Column("loss"),), across="H")).rows[0].seeds == "2–3"
