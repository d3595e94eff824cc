"""Client by client: the series of `fs.per_client` in a report."""

import numpy as np
import pytest

from fedstrata.lab.report import Column, RunRecord, TableSpec, write_report
from fedstrata.lab.report.clients import by_client
from fedstrata.lab.report.curves import build_plot

WHO = ("Cleveland", "Zurich")


@pytest.fixture
def runs():
    rng, made = np.random.default_rng(0), []
    for label in ("A", "B"):
        for seed in range(3):
            values = rng.random((4, 2))  # rounds × clients
            history = {
                "round": np.arange(4),
                "loss": values.mean(1),
                "loss/best": values.min(1),
                "loss/worst": values.max(1),
                "loss/q25": np.quantile(values, 0.25, axis=1),
                "loss/median": np.quantile(values, 0.5, axis=1),
                "loss/spread": values.std(1),
                **{f"loss/{who}": values[:, i] for i, who in enumerate(WHO)},
            }
            made.append(RunRecord(label, {}, seed, history, {}, 0.0, label))
    return made


def test_statistics_are_a_table_and_clients_are_bars(runs):
    (found,) = by_client(runs, ["label"])
    head, _, _ = found.table.texts()
    assert head == ["method", "seeds", "mean", "worst", "best", "25 % quantile", "median", "spread"]
    worst = [run.history["loss/worst"][-1] for run in runs if run.label == "A"]
    assert found.table.rows[0].cells[1].mean == pytest.approx(np.mean(worst), rel=1e-12)
    bars, lines = (build_plot(runs, spec) for spec in found.plots)
    assert [(curve.name, curve.x) for curve in bars.panels[0].curves] == [("A", list(WHO)), ("B", list(WHO))]
    zurich = [run.history["loss/Zurich"][-1] for run in runs if run.label == "A"]
    assert bars.panels[0].curves[0].y.mean[1] == pytest.approx(np.mean(zurich), rel=1e-12)
    assert [panel.title for panel in lines.panels] == ["worst", "median", "best"]
    assert [curve.name for curve in lines.panels[0].curves] == ["A", "B"]
    np.testing.assert_allclose(
        lines.panels[0].curves[0].y.mean,
        np.mean([run.history["loss/worst"] for run in runs if run.label == "A"], axis=0),
    )


def test_clients_without_names_stand_in_their_order():
    each = {f"loss/{i}": [float(i)] for i in sorted(map(str, range(11)))}
    history = {"round": [0], "loss": [5.0], "loss/best": [0.0], "loss/worst": [10.0], **each}
    (found,) = by_client([RunRecord("A", {}, 0, history, {}, 0.0, "A")], ["label"])
    assert found.plots[0].series == tuple(f"loss/{i}" for i in range(11))


def test_the_page_has_a_part_for_it_where_there_is_something_to_say(runs, tmp_path, make_runs):
    page = write_report(tmp_path / "a", "A", runs, config={}, table=TableSpec((Column("loss"),)))
    assert '<section id="clients">' in page.read_text()
    assert page.read_text().count('class="plot"') == 2
    assert 'id="plotly"' in page.read_text()
    none = make_runs()
    page = write_report(
        tmp_path / "b", "B", none, config={}, table=TableSpec((Column("loss"),), ("label", "H"))
    )
    assert "Results by client" not in page.read_text()
    assert by_client(none, ["label"]) == []
