"""An experiment or a report as the command line shows it: as text, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedstrata.lab.experiments.base import Experiment
from fedstrata.lab.experiments.data import present
from fedstrata.lab.report import Report, RunRecord


def facts(experiment: Experiment) -> dict[str, Any]:
    """An experiment's definition, as JSON can hold it."""
    e = experiment
    claims = e.claims
    return {
        "name": e.name,
        "title": e.title,
        "paper": e.paper,
        "description": e.description,
        "problem": e.problem,
        "parameters": dict(e.parameters),
        "grid": {key: e.values_of(key) for key in e.grid_keys},
        "seeds": e.seeds,
        "runs": len(e.settings),
        "quick": dict(e.quick),
        "data": [{"name": name, "present": present(name)} for name in e.needs],
        "fallback": e.fallback,
        "quick_seconds": e.quick_seconds,
        "full_time": e.full_time,
        "columns": [column.heading for column in e.table.columns],
        "claims": [
            {"where": c.where, "column": c.column, "value": c.value, "error": c.error}
            for c in (() if claims is None else claims.claims)
        ],
        "statements": [] if claims is None else [s.text for s in claims.statements],
    }


def show(experiment: Experiment) -> None:
    """Print the facts of an experiment."""
    e, told, console = experiment, facts(experiment), Console()
    console.print(f"[bold]{escape(e.title)}[/bold]  ({e.name})")
    if e.paper:
        console.print(f"[dim]{escape(e.paper)}[/dim]")
    console.print(escape(e.description))
    table = Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    for head in ("key", "values", "quick"):
        table.add_column(head, no_wrap=head == "key")
    for key, values in [*told["grid"].items(), *((k, [v]) for k, v in e.parameters.items())]:
        table.add_row(key, escape(_words(values)), escape(_words(_listed(e.quick.get(key, [])))))
    table.add_row("seeds", str(e.seeds), _words(_listed(e.quick.get("seeds", []))))
    console.print(table)
    console.print(f"[bold]Change[/bold]  --set KEY=VALUE, --seeds N; {told['runs']} runs by default.")
    where = [f"{d['name']} ({'here' if d['present'] else 'not on this machine'})" for d in told["data"]]
    data = ", ".join(where) or "no download needed"
    if e.needs and e.fallback is not None:
        data += f"; else {e.fallback.get('data', 'other data')}"
    console.print(f"[bold]Data[/bold]    {data}")
    quick = "not measured" if e.quick_seconds is None else f"{e.quick_seconds:.0f} s"
    console.print(f"[bold]Time[/bold]    --quick {quick}; in full {escape(e.full_time) or 'not measured'}")
    console.print(f"[bold]Table[/bold]   {escape(', '.join(told['columns']))}")
    _show_claims(told, console)


def _show_claims(told: dict[str, Any], console: Console) -> None:
    if not told["claims"] and not told["statements"]:
        console.print("[bold]Claims[/bold]  none")
        return
    console.print("[bold]Claims[/bold]  what the paper says; the report compares it with the results:")
    if told["claims"]:
        table = Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
        for head in ("where", "what", "printed"):
            table.add_column(head, justify="right" if head == "printed" else "left")
        for claim in told["claims"]:
            where = ", ".join(str(v) if k == "label" else f"{k}={v}" for k, v in claim["where"].items())
            error = "" if claim["error"] is None else f" ± {claim['error']:g}"
            table.add_row(escape(where), escape(claim["column"]), f"{claim['value']:g}{error}")
        console.print(table)
    for text in told["statements"]:
        console.print(f"  – {escape(text)}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _words(values: Sequence[Any]) -> str:
    return ", ".join("none" if value is None else str(value) for value in values)


def report_facts(report: Report) -> dict[str, Any]:
    """A report's table and findings, and the last values of every run."""
    table, definition = report.table, report.definition
    rows = [
        {
            **dict(zip(table.keys, row.values, strict=True)),
            "seeds": row.seeds,
            **({"certificate": row.certificate} if table.certified else {}),
            "cells": {
                head.title: {
                    "mean": cell.mean if cell.values else None,
                    "error": cell.error if cell.values else None,
                    **({"paper": cell.claim.value} if cell.claim is not None else {}),
                }
                for head, cell in zip(table.heads, row.cells, strict=True)
            },
        }
        for row in table.rows
    ]
    return {
        "title": definition.title,
        "command": definition.command,
        "findings": definition.findings,
        "table": rows,
        "runs": [_run(run) for run in report.runs],
    }


def _run(run: RunRecord) -> dict[str, Any]:
    last = {name: float(values[-1]) for name, values in run.history.items() if len(values)}
    return {
        "label": run.label,
        "method": run.method,
        "setting": dict(run.setting),
        "seed": run.seed,
        "seconds": run.seconds,
        "last": last,
        "ledger": dict(run.ledger),
        "certificate": dict(run.certificate) or None,
    }
