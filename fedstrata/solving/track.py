"""Log runs to CSV files, TensorBoard, MLflow or Weights & Biases.

    fs.solve(…, callbacks=[fs.track.TensorBoard("logs"), fs.track.MLflow("http://localhost:5000")])

Unlike other callbacks, trackers are not called after every evaluation, which would cut the compiled run into
single evaluations: they get the new rows of the history about twice a second. A tracker that cannot be opened
raises before anything is computed; one that fails later warns once, and the run continues.
"""

from __future__ import annotations

import csv
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from fedstrata.support.lazy import extra
from fedstrata.support.words import misspelt

Row = Mapping[str, float]  # an evaluation: the round, what was sent so far, seconds, metrics


class Run(NamedTuple):
    """A description of a run, which trackers get before it begins.

    Attributes:
        name: the method's name and the seed, ``FedAvg-seed0``.
        parameters: the method, its hyper-parameters, the seed, and what else was given to `fedstrata.solve`.
        resumed: whether it continues from a checkpoint; trackers get its history from the start.
    """

    name: str
    parameters: Mapping[str, Any]
    resumed: bool = False


class Tracker:
    """Base of all trackers: `open` with the runs of a `solve` or `sweep`, `log` with rows, then `close`."""

    def open(self, runs: Sequence[Run]) -> None:
        """Start logging these runs; a sweep has several."""

    def log(self, lane: int, rows: Sequence[Row]) -> None:
        """Log new evaluations of the run with this number in ``runs``."""

    def close(self, statuses: Sequence[str]) -> None:
        """End the runs: ``"done"``, ``"stopped"``, ``"diverged"``, ``"interrupted"`` or ``"failed"``."""

    def __call__(self, progressed: Any) -> None:
        """Do nothing: a tracker is listed among the callbacks, but not called after evaluations."""


class Tracking:
    """Passes new rows of histories to trackers; a tracker that fails is left out from then on."""

    def __init__(self, trackers: Sequence[Tracker], runs: Sequence[Run]) -> None:
        self.trackers, self.runs, self.statuses = list(trackers), runs, ["failed"] * len(runs)
        self._logged = [0] * len(runs)
        self._opened: list[Tracker] = []

    def __enter__(self) -> Tracking:
        try:
            for tracker in self.trackers:
                tracker.open(self.runs)
                self._opened.append(tracker)
        except BaseException:
            self._close()
            raise
        return self

    def update(self, histories: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Pass new rows of the lanes' histories to the trackers."""
        if not self._opened:
            return
        for lane, history in enumerate(histories):
            first, self._logged[lane] = self._logged[lane], len(history.get("round", ()))
            rows = [{n: v[j] for n, v in history.items()} for j in range(first, self._logged[lane])]
            for tracker in list(self._opened) if rows else []:
                try:
                    tracker.log(lane, rows)
                except Exception as error:  # a server that is gone must not cost what is computed
                    self._opened.remove(tracker)
                    self._warn(tracker, error)

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        for tracker in self._opened:
            try:
                tracker.close(self.statuses)
            except Exception as error:
                self._warn(tracker, error)
        self._opened = []

    def _warn(self, tracker: Tracker, error: Exception) -> None:
        warnings.warn(
            f"fs.track.{type(tracker).__name__} failed ({type(error).__name__}: {error}). The run continues "
            "without it; the result's history has everything.",
            stacklevel=7,
        )


def _names(runs: Sequence[Run], given: str | None) -> list[str]:
    """The names of the runs: as given, numbered if there are several."""
    if given is None:
        return [run.name for run in runs]
    return [given] if len(runs) == 1 else [f"{given}-{i}" for i in range(len(runs))]


def _finite(row: Row) -> dict[str, float]:
    """The metrics of a row, without the round and NaNs."""
    return {name: float(v) for name, v in row.items() if name != "round" and not math.isnan(v)}


class Csv(Tracker):
    """A row for each evaluation, in a file that a spreadsheet reads during the run.

    Args:
        path: the file. In a sweep its first column, ``run``, has the run's name.
        overwrite: whether an existing file may be replaced; a resumed run always replaces it.

    >>> import tempfile, numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     csv = fs.track.Csv(f"{folder}/run.csv")
    ...     result = fs.solve(
    ...         problem, fs.FedAvg(1.0), data, np.zeros(1), rounds=1, callbacks=[csv], progress=False
    ...     )
    ...     print(csv.path.read_text().splitlines()[0])
    round,exchanges,bytes_up,bytes_down,oracle_calls,seconds,loss
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self.path, self.overwrite = Path(path), overwrite
        self._file: IO[str] | None = None
        self._writer: csv.DictWriter[str] | None = None

    def open(self, runs: Sequence[Run]) -> None:  # noqa: D102
        if self.path.exists() and not (self.overwrite or any(run.resumed for run in runs)):
            raise FileExistsError(
                f"{self.path} exists already. Give another path, or Csv(…, overwrite=True)."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", newline="", encoding="utf-8")
        self._names = [run.name for run in runs] if len(runs) > 1 else None
        self._writer = None

    def log(self, lane: int, rows: Sequence[Row]) -> None:  # noqa: D102
        assert self._file is not None
        which = {} if self._names is None else {"run": self._names[lane]}
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, [*which, *rows[0]], extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerows({**which, **row} for row in rows)
        self._file.flush()

    def close(self, statuses: Sequence[str]) -> None:  # noqa: D102
        if self._file is not None:
            self._file.close()


class TensorBoard(Tracker):
    """Scalars for ``tensorboard --logdir DIR``, each run in a folder of its own.

    Needs ``pip install 'fedstrata[track]'`` (tensorboardX, which writes without TensorFlow).

    Args:
        folder: the folder for the runs' folders.
        name: the run's folder; by default the method's name and the seed, numbered if it exists.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str | None = None) -> None:
        self.folder, self.name = Path(folder), name
        self._writers: list[Any] = []

    def open(self, runs: Sequence[Run]) -> None:  # noqa: D102
        with extra("track", "fs.track.TensorBoard"):
            from tensorboardX import SummaryWriter
        self._writers = []
        for run, name in zip(runs, _names(runs, self.name), strict=True):
            place = self.folder / name
            for number in range(2, 10**6):
                if run.resumed or not place.exists():
                    break
                place = self.folder / f"{name}-{number}"
            # a run that is resumed is written from its start, in place of what was there
            self._writers.append(SummaryWriter(str(place), purge_step=0 if run.resumed else None))
            text = "\n".join(f"| {key} | {value} |" for key, value in run.parameters.items())
            self._writers[-1].add_text("parameters", f"| | |\n|---|---|\n{text}")

    def log(self, lane: int, rows: Sequence[Row]) -> None:  # noqa: D102
        for row in rows:
            for name, value in _finite(row).items():
                self._writers[lane].add_scalar(name, value, int(row["round"]))
        self._writers[lane].flush()

    def close(self, statuses: Sequence[str]) -> None:  # noqa: D102
        for writer in self._writers:
            writer.close()


class MLflow(Tracker):
    """A run of an MLflow experiment: parameters, metrics by round, and how it ended.

    Needs ``pip install 'fedstrata[mlflow]'`` (mlflow-skinny, the client; a server has the whole of mlflow).

    Args:
        uri: the tracking server, ``"http://localhost:5000"``; None is MLflow's own default.
        experiment: its name; created if it does not exist.
        name: the run's; by default the method's name and the seed.
        tags: of the run.
    """

    BATCH = 1000  # metrics that a server takes at once
    ENDS: Mapping[str, str] = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "fedstrata",
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.uri, self.experiment, self.name, self.tags = uri, experiment, name, dict(tags or {})
        self.run_ids: list[str] = []

    def open(self, runs: Sequence[Run]) -> None:  # noqa: D102
        with extra("mlflow", "fs.track.MLflow"):
            import mlflow
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        known = self._client.get_experiment_by_name(self.experiment)
        place = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        self.run_ids = []
        for run, name in zip(runs, _names(runs, self.name), strict=True):
            made = self._client.create_run(place, run_name=name, tags=self.tags)
            self.run_ids.append(made.info.run_id)
            parameters = [self._entities.Param(k, str(v)[:500]) for k, v in run.parameters.items()]
            self._client.log_batch(made.info.run_id, params=parameters)

    def log(self, lane: int, rows: Sequence[Row]) -> None:  # noqa: D102
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, value, now, int(row["round"]))
            for row in rows
            for name, value in _finite(row).items()
        ]
        for first in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self.run_ids[lane], metrics=metrics[first : first + self.BATCH])

    def close(self, statuses: Sequence[str]) -> None:  # noqa: D102
        for run_id, status in zip(self.run_ids, statuses, strict=True):
            self._client.set_tag(run_id, "fedstrata.status", status)
            self._client.set_terminated(run_id, self.ENDS.get(status, "FAILED"))


class WandB(Tracker):
    """A run of Weights & Biases.

    Needs ``pip install 'fedstrata[wandb]'``; ``mode="offline"`` sends nothing until ``wandb sync``.

    Args:
        project: its name.
        name: the run's; by default the method's name and the seed.
        options: further arguments of ``wandb.init``.
    """

    def __init__(self, project: str = "fedstrata", name: str | None = None, **options: Any) -> None:
        self.project, self.name, self.options = project, name, options
        self._runs: list[Any] = []

    def open(self, runs: Sequence[Run]) -> None:  # noqa: D102
        with extra("wandb", "fs.track.WandB"):
            import wandb
        self._runs = []
        for run, name in zip(runs, _names(runs, self.name), strict=True):
            options = {"config": dict(run.parameters), "reinit": "create_new", **self.options}
            self._runs.append(wandb.init(project=self.project, name=name, **options))

    def log(self, lane: int, rows: Sequence[Row]) -> None:  # noqa: D102
        for row in rows:
            self._runs[lane].log(_finite(row), step=int(row["round"]))

    def close(self, statuses: Sequence[str]) -> None:  # noqa: D102
        for run, status in zip(self._runs, statuses, strict=True):
            run.summary["status"] = status
            run.finish(exit_code=0 if status in ("done", "stopped") else 1)


__all__ = ["Csv", "MLflow", "Row", "Run", "TensorBoard", "Tracker", "WandB"]

if not TYPE_CHECKING:  # to which a module with a __getattr__ has every name
    __getattr__ = misspelt(__name__)
