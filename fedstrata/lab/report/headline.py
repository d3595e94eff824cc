"""The first sentence of a report without findings: who is ahead, as far as the seeds show it."""

from __future__ import annotations

import math
from collections import Counter

from fedstrata.lab.report.statistics import name
from fedstrata.lab.report.tables import Table, cell_text
from fedstrata.lab.report.typesetting import capital, readable


def headline(table: Table) -> str:
    """A sentence about a table: about its first column with a better direction, or else its first column."""
    j = next((j for j, head in enumerate(table.heads) if head.column.better), 0)
    column, heading = table.heads[j].column, readable(table.heads[j].title)
    if column.heading not in table.heads[j].title:  # only where: the values of a setting stand side by side
        heading = f"{readable(column.heading)} with {heading}"
    cells = {
        i: row.cells[j]
        for i, row in enumerate(table.rows)
        if row.cells[j].values and math.isfinite(row.cells[j].mean)
    }
    if not cells:
        return f"No run ended with a finite number for {heading}."
    order = sorted(cells, key=lambda i: cells[i].mean)
    seeds = max(len(cell.values) for cell in cells.values())

    columns = list(zip(table.keys, zip(*(row.values for row in table.rows), strict=True), strict=True))
    varied = [k for k, (_, values) in enumerate(columns) if len(set(map(repr, values))) > 1] or [0]

    def who(i: int) -> str:
        values = table.rows[i].values
        return ", ".join(name(table.keys[k], values[k]) for k in varied if values[k] is not None)

    def number(i: int) -> str:
        return cell_text(cells[i], column)

    low, high = order[0], order[-1]
    if len(cells) == 1:
        return f"{who(low)}: {heading} {number(low)}{_over(seeds)}."
    between = f"{heading} is between {number(low)} ({who(low)}) and {number(high)} ({who(high)})"
    if not column.better:
        return f"{capital(between)}{_over(seeds)}."
    if seeds < 2:
        return f"With one seed, {between}; one seed does not show whether that is more than chance."
    groups = [rows for rows in table.rivals() if len(set(rows) & cells.keys()) > 1]
    best_rows = table.best(j)
    ahead = [row for rows in groups for row in rows if row in best_rows]
    downwards = column.better == "low" or column.reduce == "reach"
    if len(groups) == 1:
        best, extreme = (low, "lowest") if downwards else (high, "highest")
        test = f"a paired t-test over {seeds} seeds"
        if ahead:
            return f"{who(best)} has the {extreme} {heading}, {number(best)}: ahead of every other in {test}."
        return (
            f"No significant difference in {heading}: the {extreme} mean is {number(best)} ({who(best)}), "
            f"and {test} does not separate it from all others."
        )
    keys = [k for k, key in enumerate(table.keys) if key in ("label", "method")] or range(len(table.keys))
    counts = Counter(", ".join(str(table.rows[i].values[k]) for k in keys) for i in ahead)
    wins = ", ".join(f"{label} in {n}" for label, n in counts.most_common())
    rest = f", none in {len(groups) - len(ahead)}" if wins and len(ahead) < len(groups) else ""
    said = f"significantly ahead are {wins}{rest}" if wins else "none is significantly ahead"
    return f"Of {len(groups)} settings, by {heading}: {said} (paired t-tests over {seeds} seeds)."


def certified(table: Table) -> str:
    """How many runs are known to be solved; nothing where no run has a certificate."""
    verdicts = Counter(verdict for row in table.rows for verdict in row.verdicts if verdict)
    total, known, solved = sum(len(row.verdicts) for row in table.rows), verdicts.total(), verdicts["solved"]
    if not known:
        return ""
    rest = f"; {total - known} not certified" if known < total else ""
    if solved == known:
        return f"By the certificates {'all' if known == total else 'the'} {known} runs are solved{rest}."
    others = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common() if verdict != "solved")
    if not solved:
        return f"By the certificates no run is solved ({others}){rest}."
    return f"By the certificates {solved} of {known} runs are solved ({others}){rest}."


def _over(seeds: int) -> str:
    return f", mean over {seeds} seeds" if seeds > 1 else ", one seed"
