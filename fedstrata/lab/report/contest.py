"""The page of a comparison: its table, curves, pairs and performance profiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.lab.report.folder import write_report
from fedstrata.lab.report.records import RunRecord
from fedstrata.lab.report.specs import Column, PlotSpec, TableSpec

if TYPE_CHECKING:
    from fedstrata.advice.compare import Comparison, Entry

TAUS = (1.0, 2.0, 5.0, 10.0)


def write_contest(found: Comparison, folder: str | os.PathLike[str], title: str, command: str) -> Path:
    """Write the folder; returns the page's path."""
    kinds = {"rounds": "round", "bytes": "bytes", "oracle_calls": "calls", "seconds": "time"}
    columns = tuple(
        Column("excess", "reach", f"{kind} to {found.target:g}", better="low", target=found.target, at=at)
        for kind, at in kinds.items()
    )
    table = TableSpec(
        (*columns, Column("excess", title="excess at the end", better="low")), ("label",), "case"
    )
    plots = [PlotSpec("excess", x=kinds[found.kind], log_y=True, panels="case", x_label=found.kind)]
    used = [
        f"- {name}{f', {case}' if len(own) > 1 else ''}: `{method!r}`"
        for name, own in found.methods.items()
        for case, method in own.items()
    ]
    findings = (
        f"Every run spent {found.budget:g} {found.kind}. Excess is that of the certificate's F, relative to "
        f"the start's; log₁₀ of it differs at the end by\n\n{markdown_table(found._pair_rows())}\n"
    )
    shares = [("method", *(f"τ = {tau:g}" for tau in TAUS))]
    for name, (tau, share) in found.profile().items():
        at = [share[np.searchsorted(tau, limit * (1 + 1e-9), side="right") - 1] for limit in TAUS]
        shares.append((name, *(f"{part:.0%}" for part in at)))
    notes = (
        f"## Performance profiles\n\nThe share of runs that reach {found.target:g} within τ times the least "
        f"{found.kind} of any method (Dolan and Moré 2002).\n\n{markdown_table(shares)}\n\n## Methods\n\n"
        + "\n".join(used)
    )
    config = {"budget": {found.kind: found.budget}, "target": found.target, "methods": list(found.methods)}
    runs = [_record(entry, kinds) for entry in found.entries]
    page = write_report(
        folder, title, runs, config=config, table=table, plots=plots, findings=findings, notes=notes,
        command=command,
    )  # fmt: skip
    found.plot(path=Path(folder) / "profiles.svg")
    return page


def _record(entry: Entry, kinds: dict[str, str]) -> RunRecord:
    its = RunRecord.of(entry.result, entry.method, seed=entry.seed, setting={"case": entry.case})
    finite = np.isfinite(entry.excess)
    history = {at: entry.rounds[finite] * entry.round_takes[kind] for kind, at in kinds.items()}
    history["round"] = entry.rounds[finite]
    history["excess"] = entry.excess[finite]
    return replace(its, history=history)


def markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells, the first of which is the heading, as a table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
