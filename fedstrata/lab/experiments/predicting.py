"""Predictions for the rows of a CSV file, by a model that a run has kept: `fedstrata predict`."""

from __future__ import annotations

from pathlib import Path

from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report.records import to_csv
from fedstrata.solving.result import load


def predictions(folder: Path, table: Path, probabilities: bool = False) -> str:
    """A CSV text with a row for each row of the table.

    Args:
        folder: of a saved result; or of an experiment's runs, with one model in ``models/``.
        table: the CSV file.
        probabilities: whether to add the probability of each class.

    Raises:
        ExperimentError: if the folder has no result, or several.
    """
    known = load(_result_in(folder)).predictor
    head, columns = ["prediction"], [list(map(str, known.predict(table).tolist()))]
    if probabilities:
        chances = known.predict_proba(table)
        head += [f"P({name})" for name in known.classes or range(chances.shape[1])]
        columns += [[f"{value:.6g}" for value in column] for column in chances.T.tolist()]
    return to_csv([head, *map(list, zip(*columns, strict=True))])


def _result_in(folder: Path) -> Path:
    if (folder / "result.safetensors").is_file():
        return folder
    found = sorted(file.parent for file in folder.glob("models/*/result.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ExperimentError(f"{folder} has several models, name one: {', '.join(map(str, found))}.")
    raise ExperimentError(
        f"{folder} has no saved result. `result.save(folder)` and `fedstrata run --models` write one."
    )
