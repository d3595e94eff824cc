from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.core.counting import Ledger
from fedstrata.lab.report import ReportError, RunRecord
from fedstrata.lab.report.records import read_runs, write_history, write_runs
from fedstrata.solving.certificate import Certificate

FLOATS = st.floats(allow_nan=False, width=64)
SCALARS = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | FLOATS | st.text(max_size=8)
NAMES = st.text("abc_,\"'é .", min_size=1, max_size=5)


def run(**changes):
    fields = {"label": "A", "setting": {}, "seed": 0, "history": {"round": [0, 1]}}
    fields |= {"ledger": {}, "seconds": 0.5, "method": "A"}
    return RunRecord(**(fields | changes))


@given(
    settings=st.lists(st.dictionaries(NAMES, SCALARS, max_size=3), min_size=1, max_size=4),
    values=st.lists(st.floats(width=64), min_size=1, max_size=4),
    label=st.text(min_size=1, max_size=5),
)
@example([{"a": None}, {"b": None, "a": False}], [0.0], "A")
@example([{}], [0.0], "\r")
def test_what_is_written_is_read_back_exactly(settings, values, label):
    rounds = np.arange(len(values))
    # Every second run lacks the series, and has a ledger.
    runs = [
        run(
            label=label,
            setting=setting,
            seed=k,
            history={"round": rounds} | ({"loss": values} if k % 2 else {}),
            ledger={} if k % 2 else {"bytes_up": 2**70 + k, "levels": {"main": {"exchanges": k}}},
            seconds=k / 3,
        )
        for k, setting in enumerate(settings)
    ]
    again = read_runs(write_runs(runs), write_history(runs))
    assert len(again) == len(runs)
    for one, two in zip(runs, again, strict=True):
        for field in ("label", "setting", "seed", "ledger", "seconds", "method"):
            assert getattr(one, field) == getattr(two, field)
        assert {k: type(v) for k, v in one.setting.items()} == {k: type(v) for k, v in two.setting.items()}
        assert one.history.keys() == two.history.keys()
        for name in one.history:
            np.testing.assert_array_equal(one.history[name], two.history[name], strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": ""}, "label"),
        ({"history": {"loss": [1.0]}}, "no 'round'"),
        ({"history": {"round": [0, 1], "loss": [1.0]}}, "differ in length"),
        ({"history": {"round": []}}, "empty"),
        ({"history": {"round": [0, 1], "loss": [[1.0], [2.0]]}}, "one axis"),
        ({"history": {"round": [1, 1]}}, "does not increase"),
        ({"history": {"round": [0, 1], "loss": ["a", "b"]}}, "must hold real numbers"),
        ({"setting": {"H": [1, 2]}}, "setting 'H'"),
        ({"setting": {"seed": 3}}, "own field"),
        ({"ledger": {"bytes_up": "many"}}, "an entry is a number"),
    ],
)
def test_bad_fields_are_refused(changes, message):
    with pytest.raises(ReportError, match=message):
        run(**changes)


def test_the_record_of_a_result():
    class FedAvg:
        def describe(self):
            return {"gamma": 0.1, "H": [1, 2]}

    result = SimpleNamespace(
        history={"round": np.arange(2), "loss": np.array([2.0, 1.0], np.float32)},
        ledger=Ledger(rounds=1, gradients=6, levels={"lower": {"exchanges": 4}}),
        seconds=1.5,
        method=FedAvg(),
        measured_on="all clients",
        status="done",
        verdict=None,
    )
    record = RunRecord.of(result, "FedAvg, H = 5", seed=3, setting={"H": np.int32(5)})
    assert record.arguments == {"gamma": 0.1, "H": "[1, 2]"}
    assert (record.method, record.seed, record.setting, record.seconds) == ("FedAvg", 3, {"H": 5}, 1.5)
    assert record.history["loss"].dtype == np.float64
    assert record.ledger["oracle_calls"] == 6
    assert record.ledger["lower_rounds"] == record.ledger["levels.lower.exchanges"] == 4
    assert record.verdict == ""
    result.verdict = "solved"
    result.certificate = Certificate(True, "solved", 1e-9, (0.0, 1e-9), "", objective=0.5)
    record = RunRecord.of(result, "A", seed=3)
    (again,) = read_runs(write_runs([record]), write_history([record]))
    assert again.certificate["objective"] == 0.5
    assert again.verdict == "solved"
    result.status, result.verdict = "diverged", None
    assert RunRecord.of(result, "A", seed=3).verdict == "diverging"
    result.measured_on = "1000 of 20000 clients"
    assert RunRecord.of(result, "A", seed=3).setting == {"measured_on": "1000 of 20000 clients"}


def test_tables_that_do_not_fit_together_are_refused():
    runs = [run(seed=0), run(seed=1)]
    with pytest.raises(ReportError, match=r"history\.csv has no line of run '1'"):
        read_runs(write_runs(runs), write_history(runs[:1]))
    with pytest.raises(ReportError, match=r"history\.csv, line 3: 2 cells"):
        read_runs(write_runs(runs), "run,label,seed,round\n0,A,0,0\n0,A\n")
    with pytest.raises(ReportError, match=r"history\.csv, run 0: .*'one'"):
        read_runs(write_runs(runs[:1]), "run,label,seed,round\n0,A,0,one\n")
    with pytest.raises(ReportError, match=r"runs\.csv is empty"):
        read_runs("", "")
