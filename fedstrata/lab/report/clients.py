"""Results by client: the metrics of `fs.per_client`, as a table and plots.

Such a metric ``loss`` has the series ``loss`` (the mean), ``loss/worst``, ``loss/best``, ``loss/median``,
``loss/q25``, …, ``loss/spread``, and where each client was kept ``loss/Zurich``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.lab.report.records import RunRecord, union
from fedstrata.lab.report.specs import Column, PlotSpec, TableSpec
from fedstrata.lab.report.tables import Table, build_table
from fedstrata.lab.report.typesetting import capital, readable

_STATISTIC = re.compile(r"worst|best|median|spread|q\d+(\.\d+)?")
BARS = 30  # of clients that are drawn one by one


@dataclass(frozen=True)
class Clients:
    """A metric that was taken of every client."""

    metric: str
    table: Table
    plots: list[PlotSpec]


def by_client(runs: Sequence[RunRecord], rows: Sequence[str]) -> list[Clients]:
    """The metrics that were taken client by client.

    Args:
        runs: the runs.
        rows: what tells methods and settings apart.
    """
    names = union(run.history for run in runs)
    bases = [name for name in names if {f"{name}/worst", f"{name}/best"} <= set(names)]
    return [_of(base, names, [run for run in runs if f"{base}/worst" in run.history], rows) for base in bases]


def _of(base: str, names: Sequence[str], runs: Sequence[RunRecord], rows: Sequence[str]) -> Clients:
    kept = [name.removeprefix(f"{base}/") for name in names if name.startswith(f"{base}/")]
    statistics = sorted(filter(_STATISTIC.fullmatch, kept), key=_order)
    each = [name for name in kept if name not in statistics]
    if all(map(str.isdecimal, each)):  # clients without names
        each.sort(key=int)
    columns = [Column(base, title="mean"), *(Column(f"{base}/{s}", title=_words(s)) for s in statistics)]
    table = build_table(runs, TableSpec(tuple(columns), tuple(rows), paper=False))
    slug = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")
    metric = capital(readable(base))
    look: dict[str, Any] = {"y": f"{base} of clients", "y_label": readable(base), "lines": tuple(rows)}
    panels = [s for s in ("worst", "median", "best") if s in statistics]
    plots = [
        PlotSpec(
            **look,
            series=tuple(f"{base}/{s}" for s in panels),
            panels="series",
            title=f"{metric} of the {', the '.join(panels[:-1])} and the {panels[-1]} client",
            name=f"clients-{slug}",
        )
    ]
    if 0 < len(each) <= BARS:
        bars = PlotSpec(
            **look, kind="bar", x="series", series=tuple(f"{base}/{who}" for who in each),
            title=f"{metric} of each client at the end", x_label="client", name=f"each-{slug}",
        )  # fmt: skip
        plots.insert(0, bars)
    return Clients(base, table, plots)


def _order(statistic: str) -> float:
    """The worst, the best, the quantiles as they grow, the spread."""
    known = {"worst": -2.0, "best": -1.0, "median": 50.0, "spread": 101.0}
    return known[statistic] if statistic in known else float(statistic[1:])


def _words(statistic: str) -> str:
    return f"{statistic[1:]} % quantile" if statistic.startswith("q") else statistic
