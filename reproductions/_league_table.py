"""What the league found: who wins where, profiles, paired intervals, failures; the file that advice reads.

    python -m reproductions.league RUNS COMMAND …     writes advice/league.json and the tables of league.md

profile (Dolan & Moré 2002): ρ_A(τ) = the share of runs in which A reaches the target at a cost of at most τ
times the least one. Pairs are those of `fs.compare`, of log₁₀ exchanges to the target: intervals that hold
for all pairs of a class together, Wilcoxon's test with Holm's correction.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata.advice.compare import Played, pairs_of
from fedstrata.core.method import METHODS
from fedstrata.core.problem import Problem
from fedstrata.lab.report import RunRecord
from fedstrata.lab.report.contest import markdown_table as markdown
from reproductions._league_problems import LIKE

TARGET = 1e-4  # of the start's excess: what a certificate calls solved
COSTS = {
    "round": "rounds",
    "exchanges": "exchanges",
    "bytes": "bytes",
    "oracle_calls": "oracle calls",
    "time": "seconds",
}
TAUS = (1.0, 1.5, 2.0, 5.0)
BEST = 4  # methods of a class whose pairs are shown
FEWEST = 3  # instances of an interval
FILE = Path(__file__).parents[1] / "fedstrata" / "advice" / "league.json"
PAGE = Path(__file__).with_name("league.md")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Rows = list[tuple[str, ...]]


class Group(NamedTuple):
    """Runs that can be compared: one objective, steps from one source."""

    objective: str
    steps: str


def groups(runs: Iterable[RunRecord]) -> dict[Group, list[RunRecord]]:
    """The runs by objective and steps."""
    found: dict[Group, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(Group(str(run.value("objective")), str(run.value("steps"))), []).append(run)
    return found


def cost(run: RunRecord, at: str) -> float:
    """What it took to the target; infinite where it was not reached."""
    reached = np.flatnonzero(run.history["excess"] <= TARGET)
    return float(run.history[at][reached[0]]) if reached.size else math.inf


def played(run: RunRecord) -> tuple[str, int]:
    """The problem and the instance."""
    return str(run.value("problem")), run.seed


def ratios(runs: Sequence[RunRecord], at: str) -> dict[str, dict[tuple[str, int], float]]:
    """A method's costs over the least of its rivals on the same instance; infinite where it failed."""
    least: dict[tuple[str, int], float] = {}
    for run in runs:
        least[played(run)] = min(cost(run, at), least.get(played(run), math.inf))
    found: dict[str, dict[tuple[str, int], float]] = {}
    for run in runs:
        spent, best = cost(run, at), least[played(run)]
        ratio = math.inf if math.isinf(spent) else spent / best if best > 0 else 1.0
        found.setdefault(run.label, {})[played(run)] = ratio
    return found


def share(of: dict[tuple[str, int], float], tau: float) -> float:
    """ρ(τ)."""
    return float(np.mean([ratio <= tau * (1 + 1e-9) for ratio in of.values()]))


def order(runs: Sequence[RunRecord]) -> list[str]:
    """The methods, best first: by the profile of exchanges, at 2 and then at the end."""
    found = ratios(runs, "exchanges")
    return sorted(found, key=lambda name: (-share(found[name], 2.0), -share(found[name], 1e9), name))


def winners(runs: Sequence[RunRecord]) -> Rows:
    """Who wins where: on each problem the method with the least median of each cost."""
    rows: Rows = [("problem", *COSTS.values(), "reached by")]
    for problem in dict.fromkeys(str(run.value("problem")) for run in runs):
        here = [run for run in runs if run.value("problem") == problem]
        names = list(dict.fromkeys(run.label for run in here))
        cells = []
        for at in COSTS:
            medians = {n: float(np.median([cost(r, at) for r in here if r.label == n])) for n in names}
            best = min(medians, key=medians.__getitem__)
            worth = f"{best} ({medians[best]:.3g})"
            cells.append(worth if math.isfinite(medians[best]) else "–")
        solved = [n for n in names if all(math.isfinite(cost(r, "round")) for r in here if r.label == n)]
        rows.append((problem, *cells, f"{len(solved)} of {len(names)}"))
    return rows


def profiles(runs: Sequence[RunRecord]) -> Rows:
    """The profiles, by exchanges, and the share within twice the least of the other costs."""
    others = [at for at in COSTS if at != "exchanges"]
    head = [f"exchanges ≤ {tau:g}×" for tau in TAUS]
    rows: Rows = [("method", "runs", "reached", *head, *(f"{COSTS[at]} ≤ 2×" for at in others))]
    by_cost = {at: ratios(runs, at) for at in COSTS}
    for name in order(runs):
        ratios_of_method = by_cost["exchanges"][name]
        parts = [share(ratios_of_method, 1e9), *(share(ratios_of_method, tau) for tau in TAUS)]
        parts += [share(by_cost[at][name], 2.0) for at in others]
        rows.append((name, str(len(ratios_of_method)), *(f"{part:.0%}" for part in parts)))
    return rows


def intervals(runs: Sequence[RunRecord]) -> Rows:
    """Paired ratios of the best methods' exchanges to the target, of the instances that both solved."""
    best = order(runs)[:BEST]
    entries = [
        Played(run.label, *played(run), cost(run, "exchanges"))
        for run in runs
        if run.label in best and math.isfinite(cost(run, "exchanges"))
    ]
    rows: Rows = [("pair", "exchanges, ratio", "95 % for all pairs", "p (Holm)", "instances")]
    for pair in pairs_of(entries, best):
        low, high = pair.interval
        between = "–" if pair.runs < FEWEST else f"{10**low:.2f} to {10**high:.2f}"
        p = "–" if math.isnan(pair.p) else f"{pair.p:.2g}"
        ratio = "–" if math.isnan(pair.decades) else f"{10**pair.decades:.2f}"
        rows.append((f"{pair.first} / {pair.second}", ratio, between, p, str(pair.runs)))
    return rows


def cells(runs: Sequence[RunRecord]) -> Rows:
    """Every cell: what the server sees, the settings of the first instance, and medians at the target."""
    rows: Rows = [("problem", "method", "steps", "server sees", "settings", "reached", *COSTS.values())]
    found: dict[tuple[str, str, str], list[RunRecord]] = {}
    for run in runs:
        if run.arguments:
            found.setdefault((str(run.value("problem")), run.label, str(run.value("steps"))), []).append(run)
    places = list(LIKE)
    for problem, name, steps in sorted(found, key=lambda key: (places.index(key[0]), *key[1:])):
        members = found[problem, name, steps]
        sees = revealed(members[0], LIKE[problem])
        given = ", ".join(f"{k}={number(v)}" for k, v in members[0].arguments.items() if v is not None)
        reached = sum(math.isfinite(cost(run, "round")) for run in members)
        medians = [float(np.median([cost(run, at) for run in members])) for at in COSTS]
        shown = [f"{m:.3g}" if math.isfinite(m) else "–" for m in medians]
        rows.append((problem, name, steps, sees, given, f"{reached} of {len(members)}", *shown))
    return rows


def revealed(run: RunRecord, problem: Problem) -> str:
    """What the server saw in a run; with steps that are functions, what the class says."""
    its: Any = METHODS[run.method]
    with contextlib.suppress(TypeError, ValueError):
        its = its(**run.arguments)
    return str(its.reveals_on(problem))


def number(value: Any) -> str:
    """A setting, numbers to three digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(number, value))}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")[:60]


def failures(runs: Sequence[RunRecord]) -> Rows:
    """Where a method did not reach the target in every run, and what its certificate said."""
    rows: Rows = [("method", "problem", "steps", "reached", "verdicts")]
    cells: dict[tuple[str, str, str], list[RunRecord]] = {}
    for run in runs:
        cells.setdefault((run.label, str(run.value("problem")), str(run.value("steps"))), []).append(run)
    for cell, members in sorted(cells.items()):
        reached = sum(math.isfinite(cost(run, "round")) for run in members)
        if reached < len(members):
            said = Counter(words(run) for run in members if math.isinf(cost(run, "round")))
            told = "; ".join(f"{verdict} {n}×" if n > 1 else verdict for verdict, n in said.items())
            rows.append((*cell, f"{reached} of {len(members)}", told))
    return rows


def words(run: RunRecord) -> str:
    """The verdict; of a run that was not begun the reason."""
    if run.verdict != "no rule":
        return run.verdict
    return str(run.certificate["advice"]).replace("|", "\\|")[:160]


def findings(runs: Sequence[RunRecord]) -> str:
    """The page's text: of each group the winners, profiles and pairs, and all failures."""
    problems = {run.value("problem") for run in runs}
    methods = {run.label for run in runs}
    parts = [
        f"{len(methods)} methods on {len(problems)} problems, {len(runs)} runs; the target is an excess of "
        f"{TARGET:g} of the start's."
    ]
    for group, members in groups(runs).items():
        if len({run.label for run in members}) < 2:
            continue
        parts += [
            f"### {group.objective}, {group.steps}",
            f"Who wins where, by the median of its costs to the target:\n\n{markdown(winners(members))}",
            f"Shares of runs (performance profiles):\n\n{markdown(profiles(members))}",
            f"The best in pairs, geometric means:\n\n{markdown(intervals(members))}",
        ]
    parts.append(f"### Where each fails\n\n{markdown(failures(runs))}")
    parts.append(f"### Every cell\n\n{markdown(cells(runs))}")
    return "\n\n".join(parts)


def evidence(runs: Sequence[RunRecord], command: str) -> dict[str, Any]:
    """What `fs.recommend` reads, of the planned runs: by objective, what each method reached at what cost."""
    found: dict[str, Any] = {"command": command, "target": TARGET, "objectives": {}}
    for group, members in groups(runs).items():
        if group.steps != "planned":
            continue
        by_method = ratios(members, "exchanges")
        found["objectives"][group.objective] = {
            "problems": sorted({str(run.value("problem")) for run in members}),
            "methods": {
                name: {
                    "runs": len(of),
                    "reached": sum(math.isfinite(ratio) for ratio in of.values()),
                    "within_twice": round(share(of, 2.0), 3),
                }
                for name, of in sorted(by_method.items())
            },
        }
    return found


def write(runs: Sequence[RunRecord], command: str) -> list[Path]:
    """Write the file that advice reads, and the results on the league's page."""
    FILE.write_text(json.dumps(evidence(runs, command), indent=1, ensure_ascii=False) + "\n", "utf-8")
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"```bash\n{command}\n```\n\n{findings(runs)}"
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")
    return [FILE, PAGE]
