"""Results of `solve` meet the report's functions as they are."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import fedstrata as fs
from fedstrata.lab.report import Column, PlotSpec, RunRecord, TableSpec, write_report


@pytest.fixture(scope="module")
def results():
    data = fs.FederatedData.from_clients([jnp.array([[1.0], [3.0]]), jnp.array([[5.0]])])
    problem = fs.Minimization(lambda x, sample: jnp.sum((x - sample) ** 2))
    method = fs.FedAvg(gamma=0.1, H=2, batch_size=None)
    metrics = {"distance": lambda x, y: jnp.abs(x - 3.5)[0]}
    options = {"rounds": 4, "metrics": metrics, "progress": False}
    return [fs.solve(problem, method, data, jnp.full(1, float(k)), seed=k, **options) for k in range(2)]


def test_a_result_shows_itself(results):
    console = Console(width=200, file=io.StringIO())
    console.print(results[0].table())
    shown = console.file.getvalue()
    assert "distance" in shown
    assert f"exchanges {results[0].ledger.exchanges}" in " ".join(shown.split())
    figure = results[0].plot("distance", x="bytes_up")
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), results[0].history["distance"])


def test_results_make_a_report(results, tmp_path):
    runs = [RunRecord.of(result, "FedAvg", seed=k, setting={"H": 2}) for k, result in enumerate(results)]
    table = TableSpec((Column("distance"), Column("bytes_up", "ledger", format="bytes")))
    page = write_report(
        tmp_path / "report",
        "FedAvg",
        runs,
        config={},
        table=table,
        plots=[PlotSpec("distance", x="bytes_up")],
    )
    last = [float(result.history["distance"][-1]) for result in results]
    row = (tmp_path / "report" / "table.csv").read_text().splitlines()[1].split(",")
    assert row[:2] == ["FedAvg", "2"]
    np.testing.assert_allclose(float(row[2]), np.mean(last), rtol=1e-12)
    assert float(row[4]) == results[0].ledger.bytes_up
    assert runs[0].method == "FedAvg"
    assert "gradients" in page.read_text()


def test_a_loaded_result_keeps_its_methods_name(results, tmp_path):
    results[0].save(tmp_path)
    again = RunRecord.of(fs.Result.load(tmp_path), "A", seed=0)
    assert again.method == "FedAvg"
    assert again.ledger == RunRecord.of(results[0], "A", seed=0).ledger
