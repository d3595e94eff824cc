"""Run an experiment: keep finished runs, compute missing ones, and write a report.

Every finished run is one file in ``finished/`` of the experiment's folder, written as a whole; a run that
takes long has a checkpoint in ``unfinished/``. After Ctrl-C or a kill the same command continues it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from fedstrata.lab.experiments._display import Display
from fedstrata.lab.experiments._solving import identity_of, solve_all
from fedstrata.lab.experiments._store import RunStore
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.data import present
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import PlotSpec, ReportError, RunRecord, Split, TableSpec, split_of, write_report
from fedstrata.lab.report.records import Scalar
from fedstrata.solving.certificate import Certify

_DRAWN = 10_000  # clients; the sizes of more would fill the definition


class ExperimentInterrupted(KeyboardInterrupt):
    """Ctrl-C; what was finished is stored."""


@dataclass(frozen=True)
class PreparedExperiment:
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
) -> PreparedExperiment:
    """Apply ``--quick``, ``--set``, ``--seeds``, and the fallback where data is missing.

    Raises:
        ExperimentError: for a change that does not fit.
    """
    asked: dict[str, Any] = {**(experiment.quick if quick else {}), **(changes or {})}
    if seeds is not None:
        asked["seeds"] = seeds
    changed, remarks = experiment.change(asked), []
    if quick:
        remarks.append(
            "A quick run: it checks that everything works, and does not show how good the methods are."
        )
    used = {value for block in changed.grid for value in block.get("data", [])}
    used |= {changed.parameters.get("data")}
    missing = [n for n in experiment.needs if (used == {None} or n in used) and not present(n)]
    wanted = "data" in (changes or {})  # data that the user names is downloaded, or its absence is an error
    if missing and experiment.fallback is not None and not wanted:
        changed = changed.change({k: v for k, v in experiment.fallback.items() if k not in (changes or {})})
        instead = experiment.fallback.get("data", "other data")
        remarks.append(
            f"{', '.join(missing)} is not on this machine (FEDSTRATA_DATA); run on {instead} instead."
        )
    return PreparedExperiment(changed, changed.parameters != experiment.parameters, tuple(remarks))


def run_experiment(
    prepared: PreparedExperiment | Experiment,
    folder: str | Path,
    *,
    command: str = "",
    fresh: bool = False,
    together: bool | None = None,
    progress: bool = True,
    console: Console | None = None,
    models: bool = False,
    certify: Certify = "auto",
    shard: tuple[int, int] | None = None,
    again: str = "the same command continues there",
    notes: Callable[[], str] = str,
    draws_split: bool = True,
) -> Path:
    """Run what is missing and write the report.

    Args:
        prepared: what `prepare` made of an experiment, or one as it is.
        folder: where runs and report go.
        command: stands on the page.
        fresh: discard the runs that are stored.
        together: whether runs that share a program are solved side by side (`fedstrata.sweep`), which fills a
            GPU; by default they are unless there is only a CPU.
        progress: show a bar, or lines without a terminal.
        console: where to.
        models: keep what each run has found, for `fedstrata.load` and `fedstrata predict`, in a folder of
            ``models/``.
        certify: whether each run is judged at its end (`fedstrata.certify`), as in `fedstrata.solve`.
        shard: ``(i, n)``, to run the i-th of n parts of what there is to run, and write no report: array jobs
            share a folder so, and the same call without a shard writes the report.
        again: what an interrupted user is told to do.
        notes: further Markdown for the page, when the runs have ended.
        draws_split: whether the page shows how the data is distributed, if it is on this machine.

    Returns:
        The path of the page; of a shard the folder.

    Raises:
        ExperimentError: if a setting cannot be built.
        CheckpointError: if the folder cannot be written, or what is stored is damaged.
        ExperimentInterrupted: on Ctrl-C; there is a report of the runs so far.
    """
    prepared = PreparedExperiment(prepared) if isinstance(prepared, Experiment) else prepared
    experiment, folder = prepared.experiment, Path(folder)
    store = RunStore(folder, experiment)
    if fresh:
        store.clear()
    store.prepare(alone=shard is None)
    settings, (done, remarks) = experiment.settings, _stored(experiment, store, models)
    numbers = {id(setting): i for i, setting in enumerate(settings)}
    # Seed by seed: an interrupted experiment has something of every setting, and data is split once a seed.
    first, step = (1, 1) if shard is None else shard
    mine = range(first - 1, len(settings), step)
    missing = sorted((settings[i] for i in mine if i not in done), key=lambda s: s.seed)
    side_by_side = jax.default_backend() != "cpu" if together is None else together
    metrics = [column.metric for column in experiment.table.columns if column.reduce not in ("ledger", "run")]
    with Display(len(mine), len(done.keys() & mine), metrics, console, progress) as display:
        try:
            for solved in solve_all(experiment, missing, store, display, side_by_side, certify):
                number = numbers[id(solved.setting)]
                done[number], remarks[number] = solved.runs, solved.remarks
                if models and solved.result is not None:
                    solved.result.save(store.model(solved.setting, solved.identity))
                store.save(solved.setting, solved.runs, solved.identity, solved.remarks)
                display.finished(solved.setting, solved.runs)
        except KeyboardInterrupt:
            so_far = f"{len(done)} of {len(settings)} runs"
            if done and shard is None:
                part = replace(prepared, remarks=(*prepared.remarks, f"Interrupted: {so_far}."))
                with contextlib.suppress(ReportError):
                    report_runs(part, folder, _in_order(done), command)
            raise ExperimentInterrupted(f"{so_far} are stored in {folder}; {again}.") from None
    if shard is not None:
        return folder
    store.tidy()
    said = _merged([(settings[i], remark) for i in sorted(remarks) for remark in remarks[i]])
    if console is not None:
        for remark in said:
            console.print(f"[yellow]{escape(remark)}[/yellow]")
    told = experiment.model_copy(update={"notes": "\n\n".join(filter(None, [experiment.notes, notes()]))})
    prepared = replace(prepared, experiment=told, remarks=(*prepared.remarks, *said))
    return report_runs(
        prepared, folder, _in_order(done), command, _split(experiment) if draws_split else None
    )


def _merged(remarks: Sequence[tuple[Setting, str]]) -> list[str]:
    """The warnings, each once if those of several runs differ only in numbers."""
    alike: dict[str, list[tuple[Setting, str]]] = {}
    for setting, text in remarks:
        alike.setdefault(re.sub(r"[-−]?\d[\d.,]*(e[-+]?\d+)?", "0", text), []).append((setting, text))
    said = []
    for (setting, text), *others in alike.values():
        more = f" So in {len(others)} other run{'s' * (len(others) > 1)}." if others else ""
        said.append(f"{setting.run}: {text}{more}")
    return said


def _stored(
    experiment: Experiment, store: RunStore, models: bool
) -> tuple[dict[int, list[RunRecord]], dict[int, tuple[str, ...]]]:
    """The stored runs and their remarks, by the number of their setting."""
    done, remarks = {}, {}
    for i, setting in enumerate(experiment.settings):
        if not store.holds(setting):
            continue
        identity = identity_of(experiment, setting)
        if (stored := store.load(setting, identity)) is not None:
            if models and "build" not in identity and not store.model(setting, identity).is_dir():
                raise ExperimentError(
                    f"{setting.words or experiment.name}, seed {setting.seed}: the stored run was done "
                    "without --models, so its model was not kept. Give another folder (--out), or discard "
                    "what is stored (--fresh)."
                )
            done[i], remarks[i] = stored
    return done, remarks


def _in_order(done: Mapping[int, list[RunRecord]]) -> list[RunRecord]:
    return [run for i in sorted(done) for run in done[i]]


def report_runs(
    prepared: PreparedExperiment,
    folder: Path,
    runs: Sequence[RunRecord],
    command: str = "",
    split: Split | None = None,
) -> Path:
    """Write the report of some runs of an experiment; returns the path of its page."""
    e = prepared.experiment
    notes = "\n\n".join([*(f"*{remark}*" for remark in prepared.remarks), *filter(None, [e.notes])])
    if prepared.changed and e.claims is not None:
        notes = "*Parameters differ from the paper's, so what it printed is not shown.*\n\n" + notes
    methods: dict[str, dict[str, list[Scalar]]] = {}
    for run in runs:
        for key, value in run.arguments.items():
            values = methods.setdefault(run.label, {}).setdefault(key, [])
            values += [value] * (value not in values)
    config = {
        "what": e.description,
        "problem": e.problem,
        "paper": e.paper,
        "parameters": e.parameters,
        "methods": methods,
        "settings": {key: e.values_of(key) for key in e.grid_keys},
        "seeds": e.seeds,
    }
    claims = e.claims
    if claims is not None:
        known = {"label", "method", *(key for run in runs for key in run.setting)}
        claims = replace(claims, claims=tuple(c for c in claims.claims if c.where.keys() <= known))
    return write_report(
        folder, e.title, runs, config={key: value for key, value in config.items() if value},
        table=fit_table(e.table, runs), plots=[fit_plot(plot, runs) for plot in e.plots],
        paper=None if prepared.changed else claims, findings="" if e.findings is None else e.findings(runs),
        notes=notes, split=split, command=command,
    )  # fmt: skip


def _split(experiment: Experiment) -> Split | None:
    """How the data of the first setting is distributed, if it is on this machine.

    It has been built before, for its runs or to compare them with what is stored.
    """
    if experiment.records:
        return None
    setting = experiment.settings[0]
    task = experiment.build(setting)
    if not isinstance(task, Task) or not isinstance(task.options.get("engine", ""), str):
        return None
    if task.data.clients > _DRAWN:
        return None
    return split_of(task.data, caption=f"Of {setting.run}.")


def _keys(runs: Sequence[RunRecord]) -> tuple[set[str], list[str]]:
    """The keys that runs have, and those among them (and the label) that vary."""
    keys = list(dict.fromkeys(key for run in runs for key in ("label", *run.setting)))
    varied = [key for key in keys if len({repr(run.value(key)) for run in runs}) > 1]
    return {*keys, "method"}, varied


def fit_table(table: TableSpec, runs: Sequence[RunRecord]) -> TableSpec:
    """The table without keys that no run has, and with all that vary."""
    known, varied = _keys(runs)
    across = table.across if table.across in known else None
    rows = [key for key in table.rows if key in known] or ["label"]
    named = {*rows, across, *(["label"] if "method" in rows else [])}
    return replace(table, rows=(*rows, *(key for key in varied if key not in named)), across=across)


def fit_plot(plot: PlotSpec, runs: Sequence[RunRecord]) -> PlotSpec:
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
