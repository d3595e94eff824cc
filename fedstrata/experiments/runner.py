"""Running an experiment: what is done is kept, what is missing is run, and a report is written.

Every finished run is one file in ``finished/`` of the experiment's folder, written as a whole; a run that
takes long has a checkpoint in ``unfinished/``. After Ctrl-C or a kill the same command goes on where it was.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich import progress as bars
from rich.console import Console

import fedstrata
from fedstrata.checkpoint import Checkpoint, CheckpointError, write_atomically
from fedstrata.experiments.base import Experiment, ExperimentError, Scalar, Setting, Task
from fedstrata.experiments.data import present
from fedstrata.report import PlotSpec, ReportError, Run, TableSpec, write_report
from fedstrata.report.records import read_runs, write_history, write_runs
from fedstrata.result import BOOKKEEPING
from fedstrata.solve import Diverged, solve


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; what was finished is stored."""


@dataclass(frozen=True)
class Plan:
    """An experiment as it is to be run.

    Args:
        experiment: with all changes made.
        changed: whether parameters differ from the definition's, so that its claims do not apply.
        remarks: what the reader should know about the changes.
    """

    experiment: Experiment
    changed: bool = False
    remarks: tuple[str, ...] = ()


def prepare(
    experiment: Experiment,
    *,
    quick: bool = False,
    seeds: int | None = None,
    changes: Mapping[str, Scalar | Sequence[Scalar]] | None = None,
) -> Plan:
    """Apply ``--quick``, ``--set``, ``--seeds``, and the fallback where data is missing.

    Raises:
        ExperimentError: for a change that does not fit.
    """
    asked: dict[str, Any] = {**(experiment.quick if quick else {}), **(changes or {})}
    if seeds is not None:
        asked["seeds"] = seeds
    plan, remarks = experiment.change(asked), []
    if quick:
        remarks.append("A quick run: it shows that all works, not what the methods can do.")
    used = {value for block in plan.grid for value in block.get("data", [])} | {plan.parameters.get("data")}
    missing = [n for n in experiment.needs if (used == {None} or n in used) and not present(n)]
    if missing and experiment.fallback is not None:
        plan = plan.change({k: v for k, v in experiment.fallback.items() if k not in (changes or {})})
        instead = experiment.fallback.get("data", "other data")
        remarks.append(
            f"{', '.join(missing)} is not on this machine (FEDSTRATA_DATA); run on {instead} instead."
        )
    return Plan(plan, plan.parameters != experiment.parameters, tuple(remarks))


def run(
    plan: Plan | Experiment,
    folder: str | Path,
    *,
    command: str = "",
    fresh: bool = False,
    progress: bool = True,
    console: Console | None = None,
) -> Path:
    """Run what is missing and write the report.

    Args:
        plan: what `prepare` made of an experiment.
        folder: where runs and report go.
        command: stands on the page.
        fresh: forget the runs that are stored.
        progress: show a bar, or lines where there is no terminal.
        console: where to.

    Returns:
        The path of the page.

    Raises:
        ExperimentError: where a setting cannot be built.
        Interrupted: on Ctrl-C.
    """
    plan = plan if isinstance(plan, Plan) else Plan(plan)
    experiment, folder = plan.experiment, Path(folder)
    store = Store(folder, experiment)
    if fresh:
        store.clear()
    settings = experiment.settings
    done = {i: runs for i, setting in enumerate(settings) if (runs := store.load(setting)) is not None}
    numbers = {id(setting): i for i, setting in enumerate(settings)}
    missing = [setting for i, setting in enumerate(settings) if i not in done]
    with Display(len(settings), len(done), console, progress) as display:
        try:
            for setting, runs in _runs(experiment, missing, store, display):
                done[numbers[id(setting)]] = runs
                store.save(setting, runs)
                display.finished(setting, runs)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(done)} of {len(settings)} runs are stored in {folder}; the same command goes on there."
            ) from None
    return report(plan, folder, [run for i in sorted(done) for run in done[i]], command)


def _runs(
    experiment: Experiment, settings: Sequence[Setting], store: Store, display: Display
) -> Iterator[tuple[Setting, list[Run]]]:
    if experiment.run is not None:
        if settings:
            for setting, runs in experiment.run(settings):
                yield setting, [runs] if isinstance(runs, Run) else list(runs)
        return
    assert experiment.build is not None
    for setting in settings:
        display.started(setting)
        try:
            built = experiment.build(setting)
            yield (
                setting,
                (
                    [_solve(built, setting, store.checkpoint(setting), display)]
                    if isinstance(built, Task)
                    else [built]
                    if isinstance(built, Run)
                    else list(built)
                ),
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, ReportError):
                raise
            raise ExperimentError(f"{setting.words or experiment.name}: {error}") from error


def _solve(task: Task, setting: Setting, checkpoint: Path, display: Display) -> Run:
    label = task.label or str(setting.get("method") or type(task.method).__name__)
    arguments: dict[str, Any] = {
        "y0": task.y0,
        "rounds": task.rounds,
        "seed": setting.seed,
        "participation": task.participation,
        "metrics": task.metrics,
        "eval_every": task.eval_every,
        "progress": False,
        "callbacks": (display.advanced,),
        **task.options,
    }
    saving = Checkpoint(checkpoint, overwrite=True)
    try:
        try:
            result = solve(
                task.problem, task.method, task.data, task.x0, checkpoint=saving, resume=True, **arguments
            )
        except CheckpointError:  # of an older version of the experiment
            saving.file.unlink(missing_ok=True)
            result = solve(task.problem, task.method, task.data, task.x0, checkpoint=saving, **arguments)
    except Diverged as error:
        result = replace(error.result, history=_cut(error.result.history, task.rounds))
    if result.status == "interrupted":
        raise KeyboardInterrupt
    saving.file.unlink(missing_ok=True)
    cell = {key: value for key, value in setting.cell.items() if key != "method"}
    return Run.of(result, label, seed=setting.seed, setting=cell)


def _cut(history: Mapping[str, np.ndarray], rounds: int) -> dict[str, np.ndarray]:
    """The history of a run that diverged: its metrics are not numbers at the last round."""
    return {
        name: np.append(values, rounds if name == "round" else values[-1] if name in BOOKKEEPING else np.nan)
        for name, values in history.items()
    }


def report(plan: Plan, folder: Path, runs: Sequence[Run], command: str = "") -> Path:
    """Write the report of some runs of an experiment; returns the path of its page."""
    e = plan.experiment
    notes = "\n\n".join([*(f"*{remark}*" for remark in plan.remarks), *filter(None, [e.notes])])
    if plan.changed and e.claims is not None:
        notes = "*Parameters differ from the paper's, so what it printed is not shown.*\n\n" + notes
    config = {
        "what": e.description,
        "problem": e.problem,
        "paper": e.paper,
        "parameters": e.parameters,
        "settings": {
            key: list(dict.fromkeys(v for b in e.grid for v in b.get(key, []))) for key in e.grid_keys
        },
        "seeds": e.seeds,
    }
    claims = e.claims
    if claims is not None:
        known = {"label", "method", *(key for run in runs for key in run.setting)}
        claims = replace(claims, claims=tuple(c for c in claims.claims if c.where.keys() <= known))
    return write_report(
        folder,
        e.title,
        runs,
        config={key: value for key, value in config.items() if value},
        table=fit_table(e.table, runs),
        plots=[fit_plot(plot, runs) for plot in e.plots],
        paper=None if plan.changed else claims,
        notes=notes,
        command=command,
    )


def _keys(runs: Sequence[Run]) -> tuple[set[str], list[str]]:
    """The keys that runs have, and those among them (and the label) that vary."""
    keys = list(dict.fromkeys(key for run in runs for key in ("label", *run.setting)))
    varied = [key for key in keys if len({repr(run.value(key)) for run in runs}) > 1]
    return {*keys, "method"}, varied


def fit_table(table: TableSpec, runs: Sequence[Run]) -> TableSpec:
    """The table without keys that no run has, and with all that vary."""
    known, varied = _keys(runs)
    across = table.across if table.across in known else None
    rows = [key for key in table.rows if key in known] or ["label"]
    named = {*rows, across, *(["label"] if "method" in rows else [])}
    return replace(table, rows=(*rows, *(key for key in varied if key not in named)), across=across)


def fit_plot(plot: PlotSpec, runs: Sequence[Run]) -> PlotSpec:
    """The plot without keys that no run has, and with all that vary."""
    known, varied = _keys(runs)
    panels = plot.panels if plot.panels in known else None
    lines = [key for key in plot.lines if key in known] or ["label"]
    named = {*lines, panels, *(["label"] if "method" in lines else [])}
    if plot.kind != "line":
        named |= {plot.x, plot.down}
    more = [key for key in varied if key not in named]
    if plot.kind == "heatmap" and more and panels is None:
        panels, more = more[0], more[1:]
    return replace(plot, lines=(*lines, *more), panels=panels)


class Store:
    """The finished runs of an experiment, one file for each setting."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        function = experiment.build or experiment.run
        module = inspect.getmodule(function)
        try:
            source = inspect.getsource(module) if module else ""
        except OSError:
            source = ""
        source += getattr(function, "content", "")  # a TOML file's
        self._origin = [experiment.name, fedstrata.__version__, hashlib.sha256(source.encode()).hexdigest()]

    def digest(self, setting: Setting) -> str:
        """Changes with the setting, the parameters, the experiment's module and the version."""
        facts = json.dumps([*self._origin, sorted(setting.items()), sorted(setting.cell), setting.seed])
        return hashlib.sha256(facts.encode()).hexdigest()[:20]

    def file(self, setting: Setting) -> Path:
        """Where a setting's runs are kept."""
        return self.folder / "finished" / f"{self.digest(setting)}.json"

    def checkpoint(self, setting: Setting) -> Path:
        """Where a run that is not finished is kept."""
        return self.folder / "unfinished" / f"{self.digest(setting)}.safetensors"

    def save(self, setting: Setting, runs: Sequence[Run]) -> None:
        """Keep a setting's runs: all of them or, if this is interrupted, none."""
        content = {
            "setting": dict(setting),
            "seed": setting.seed,
            "runs": write_runs(runs),
            "history": write_history(runs),
        }
        write_atomically(self.file(setting), json.dumps(content, ensure_ascii=False).encode())

    def load(self, setting: Setting) -> list[Run] | None:
        """A setting's runs, or None where they are missing or damaged."""
        try:
            content = json.loads(self.file(setting).read_text("utf-8"))
            return read_runs(content["runs"], content["history"])
        except (OSError, ValueError, KeyError):
            return None

    def clear(self) -> None:
        """Forget everything that is stored."""
        for name in ("finished", "unfinished"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


class Display:
    """Runs done, and how the present one is doing: bars in a terminal, a line per run elsewhere."""

    def __init__(self, total: int, done: int, console: Console | None, enabled: bool) -> None:
        self.total, self.done, self.enabled = total, done, enabled
        self.console = console or Console()
        self._bar: Any = None
        self._words = ""
        self._began = time.perf_counter()

    def __enter__(self) -> Display:
        if self.enabled and self.done:
            self.console.print(f"{self.done} of {self.total} runs are there already.")
        if self.enabled and self.console.is_terminal and self.done < self.total:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(bar_width=24),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TextColumn("{task.fields[metrics]}"),
                console=self.console,
                transient=True,
            )
            self._all = self._bar.add_task("runs", total=self.total, completed=self.done, metrics="")
            self._one = self._bar.add_task("", total=None, metrics="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, setting: Setting) -> None:
        """A run begins."""
        self._words = ", ".join(filter(None, [setting.words, f"seed {setting.seed}"]))
        if self._bar is not None:
            self._bar.reset(self._one, total=None, description=self._words, metrics="compiling")

    def advanced(self, progressed: Any) -> None:
        """A run goes on; a callback of `solve`."""
        if self._bar is not None:
            latest = {n: v[-1] for n, v in progressed.history.items() if n not in BOOKKEEPING}
            self._bar.update(
                self._one, completed=progressed.round, total=progressed.rounds, metrics=_metrics(latest)
            )

    def finished(self, setting: Setting, runs: Sequence[Run]) -> None:
        """A run is stored."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._all, completed=self.done)
        elif self.enabled:
            words = ", ".join(filter(None, [setting.words, f"seed {setting.seed}"]))
            latest = {n: v[-1] for n, v in runs[-1].history.items() if n not in BOOKKEEPING} if runs else {}
            seconds = sum(run.seconds for run in runs)
            self.console.print(
                f"[{self.done}/{self.total}] {words}: {_metrics(latest)} ({seconds:.1f} s)",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _metrics(latest: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in latest.items())
