"""Baselines of a federated model: each client alone, all data pooled, and fine-tuned models.

    together    the method on all clients
    alone       the method on each client's samples, without the others
    fine-tuned  the same, from the common model, for fewer rounds
    pooled      the method on all samples in one place, which a federation avoids

Each is evaluated at every client by the same metric on the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term, positional
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.problems.classes import MPEC
from fedstrata.solving.loop import solve
from fedstrata.solving.progress import Progress
from fedstrata.solving.result import Result
from fedstrata.support import html
from fedstrata.support.frozen import jit
from fedstrata.support.shown import aligned

PartName = Literal["train", "valid", "test"]
SHOWN = 20  # clients in a printed table


@dataclass(frozen=True)
class Baselines:
    """The result of `baselines`; prints as a table.

    Attributes:
        values: by way of learning (``"alone"``, ``"together"``, ``"fine-tuned"``, ``"pooled"``), the metric
            at every client.
        names: the clients' names.
        metric: the metric's name.
        part: the samples on which it was measured.
        mode: ``"min"`` if small values are good, ``"max"`` if large ones are.
        shares: the clients' weights in the mean.
        results: the runs; for ``"alone"`` and ``"fine-tuned"`` a list, one for each client.
    """

    values: dict[str, np.ndarray]
    names: tuple[str, ...]
    metric: str
    part: PartName
    mode: Literal["min", "max"]
    shares: np.ndarray = field(repr=False)
    results: dict[str, Any] = field(repr=False, compare=False)

    @property
    def gains(self) -> np.ndarray:
        """Each client's gain in the metric from the common model over its own; negative if it is worse."""
        sign = 1.0 if self.mode == "max" else -1.0
        return sign * (self.values["together"] - self.values["alone"])

    @property
    def summary(self) -> dict[str, dict[str, float]]:
        """For each way of learning, the mean over clients and the worst client."""
        worst = np.max if self.mode == "min" else np.min
        return {
            name: {"mean": float(self.shares @ values), "worst": float(worst(values))}
            for name, values in self.values.items()
        }

    def rows(self, most: int | None = None) -> list[tuple[str, ...]]:
        """The cells of the table: head, clients, mean and worst."""
        head = ("client", *self.values, "gain")
        lines = [
            (name, *(html.number(float(v[i])) for v in self.values.values()), f"{self.gains[i]:+.3g}")
            for i, name in enumerate(self.names)
        ]
        if most is not None and len(lines) > most:
            rest = (f"… {len(lines) - most} more", *[""] * (len(head) - 1))
            lines = [*lines[:most], rest]
        ends = {"mean": f"{self.shares @ self.gains:+.3g}", "worst": f"{self.gains.min():+.3g}"}
        for what, gain in ends.items():
            lines.append((what, *(html.number(s[what]) for s in self.summary.values()), gain))
        return [head, *lines]

    @property
    def title(self) -> str:
        """The table's title."""
        samples = {"train": "training", "valid": "validation", "test": "test"}[self.part]
        good = "small" if self.mode == "min" else "large"
        return f"{self.metric} on {samples} samples ({good} is good); gain: together over alone"

    def __repr__(self) -> str:
        return "\n".join([self.title, *aligned(self.rows(SHOWN), left=1)])

    def _repr_html_(self) -> str:
        return html.titled(self.title, html.table(self.rows(SHOWN)))


def baselines(
    problem: Problem,
    data: FederatedData,
    method: Method,
    x0: PyTree,
    *,
    rounds: int,
    y0: PyTree = None,
    metric: Callable[..., Any] | None = None,
    mode: Literal["min", "max"] = "min",
    part: PartName | None = None,
    alone: Method | None = None,
    fine_tune: int | None = None,
    result: Result | None = None,
    seed: int = 0,
    weights: Weights = "uniform",
    progress: bool = True,
) -> Baselines:
    """Compare learning together with each client alone, with fine-tuning and with all data pooled.

    Each client is trained in a separate run; clients of the same size share a compiled program.

    Args:
        problem: the problem of all runs.
        data: the clients' samples.
        method: the method of the common run and of the pooled samples.
        x0: the start of the main variable.
        rounds: the rounds of every run except fine-tuning.
        y0: the start of the second variable.
        metric: ``metric(x, sample)`` or ``metric(x, y, sample)``, of one sample; by default the problem's
            loss, or its upper level's.
        mode: ``"min"`` if small values are good, ``"max"`` if large ones are.
        part: the samples to measure on; by default ``"test"`` if test samples belong to clients, else
            ``"valid"``, else ``"train"``.
        alone: the method of a single client and of fine-tuning, if it differs.
        fine_tune: rounds of fine-tuning; by default a tenth of ``rounds``.
        result: the run of all clients together, if it exists already.
        seed: the random seed.
        weights: the clients' weights in the common run and in the mean.
        progress: whether to show a bar.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> fs.baselines(problem, data, fs.FedAvg(0.5), np.zeros(1), rounds=50, fine_tune=1, progress=False)
    loss on training samples (small is good); gain: together over alone
    client  alone  together  fine-tuned  pooled    gain
    0           0     0.125     0.03125   0.125  -0.125
    1           0     0.125     0.03125   0.125  -0.125
    mean        0     0.125     0.03125   0.125  -0.125
    worst       0     0.125     0.03125   0.125  -0.125
    """
    own, short = alone or method, max(1, rounds // 10) if fine_tune is None else fine_tune
    _check(problem, method, own, data.clients)
    name, term = _metric(problem, metric)
    part = _part(data) if part is None else part
    samples = _padded(data, part)
    options: dict[str, Any] = {"seed": seed, "progress": False, "default_metrics": False}

    def run(method: Method, data: FederatedData, x: PyTree, y: PyTree, rounds: int, **more: Any) -> Result:
        more = {"eval_every": max(rounds, 1), **options, **more}
        return solve(problem, method, data, x, y0=y, rounds=rounds, **more)

    runs: dict[str, Any] = {}
    with Progress(2 * data.clients + 2, 0, enabled=progress, label="baselines") as bar:
        if result is None:
            result = run(method, data, x0, y0, rounds, weights=weights)
        x, y = result.x, result.y if y0 is not None else None
        mine = [data.load([i]) for i in range(data.clients)]
        runs["alone"], runs["fine-tuned"] = [], []
        for i, one in enumerate(mine):
            runs["alone"].append(run(own, one, x0, y0, rounds))
            runs["fine-tuned"].append(run(own, one, x, y, short))
            bar.update(2 * i + 3, {})
        runs["pooled"] = run(method, _pooled(data), x0, y0, rounds)
        bar.update(2 * data.clients + 2, {})
    models = {
        "alone": runs["alone"],
        "together": [result] * data.clients,
        "fine-tuned": runs["fine-tuned"],
        "pooled": [runs["pooled"]] * data.clients,
    }
    values = {way: _judged(term, results, samples) for way, results in models.items()}
    names = data.names or tuple(map(str, range(data.clients)))
    shares = data.sizes / data.sizes.sum() if weights == "size" else np.full(data.clients, 1 / data.clients)
    return Baselines(values, names, name, part, mode, shares, {**runs, "together": result})


def _check(problem: Problem, method: Method, own: Method, clients: int) -> None:
    """Raise if a single client, or the pooled samples, cannot be run like all clients."""
    if problem.personal:
        raise TypeError(
            f"{type(problem).__name__} gives every client its own model: compare its metrics client by "
            "client with fs.per_client."
        )
    if sets := _own_sets(problem):
        raise TypeError(
            f"baselines: {sets[0]} differs between clients, and pooled samples have no client. Give a set "
            "that all clients share."
        )
    method.check(problem, clients)
    for each in (own, method):
        try:
            each.check(problem, clients=1)
        except ValueError as error:
            words = f"baselines: alone and with pooled samples there is one client. {error}"
            raise ValueError(words) from None


def _own_sets(problem: Problem) -> list[str]:
    """The sets that depend on the client; the third argument of an MPEC's set of y is a sample."""
    most = {"project_y": 3 if isinstance(problem, MPEC) else 2}
    return [name for name, project in problem.sets.items() if project.arity > most.get(name, 1)]


def _metric(problem: Problem, metric: Callable[..., Any] | None) -> tuple[str, Term]:
    if metric is not None:
        return getattr(metric, "__name__", "metric").replace("<lambda>", "metric"), Term.of(metric, "metric")
    for name in ("loss", "upper"):
        if isinstance(found := getattr(problem, name, None), Term):
            return name, found
    raise TypeError(f"baselines: give a metric; {type(problem).__name__} has no single loss of a sample.")


def _part(data: FederatedData) -> PartName:
    try:
        if set(data.test_clients.tolist()) == set(range(data.clients)):
            return "test"
    except DataError:
        pass
    return "train" if data.valid is None else "valid"


def _pooled(data: FederatedData) -> FederatedData:
    """All samples in one client."""
    data = data.load()
    valid_sizes = None if data.valid_sizes is None else np.array([data.valid_sizes.sum()])
    return replace(data, sizes=np.array([data.sizes.sum()]), valid_sizes=valid_sizes, names=None)


def _padded(data: FederatedData, part: PartName) -> list[tuple[PyTree, int]]:
    """Every client's samples with their number, padded to one length, so that one program serves all."""
    clients = [data.client(i, part) for i in range(data.clients)]
    sizes = [jax.tree.leaves(client)[0].shape[0] for client in clients]
    if 0 in sizes:
        raise ValueError(f"Client {sizes.index(0)} has no {part} samples to be judged on.")
    rows = [np.minimum(np.arange(max(sizes)), n - 1) for n in sizes]
    form = data.sample_of(part)
    return [
        (jax.tree.map(lambda leaf, like, r=r: np.asarray(leaf[r], like.dtype), client, form), n)
        for client, r, n in zip(clients, rows, sizes, strict=True)
    ]


def _judged(term: Term, results: Sequence[Result], samples: Sequence[tuple[PyTree, int]]) -> np.ndarray:
    takes_y = positional(term.function) == 3
    each = jit(lambda samples, *point: term.then(jnp.asarray).each(samples, *point))
    points = [(r.x, r.y) if takes_y else (r.x,) for r in results]
    found = [np.asarray(each(own, *point))[:n] for point, (own, n) in zip(points, samples, strict=True)]
    return np.array([values.mean(dtype=float) for values in found])
