"""Shared by the zeroth-order methods: steps along two-point estimates, replayed by the server; warnings."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, Moment, ProblemT, StateT
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.estimators.sphere import combine, directions

LOOKS = 200  # rounds at which schedules are evaluated


class TwoPoint(Method[ProblemT, StateT]):
    """Base of the FedRZO methods, whose clients step along ``Σ_j s_j v_j`` and towards their sets."""

    gamma: Real
    eta: Real
    H: Any
    messages: Literal["vectors", "scalars"]
    directions: int
    orthogonal: bool

    drifts = "H"
    exact = "divides small differences of values"

    @classmethod
    def differentiates(cls, problem: Any) -> tuple[str, ...]:
        return ()

    def cautions(self, moment: Moment) -> list[str]:
        return super().cautions(moment) + overshooting(self, moment) + lost_in_rounding(self, "eta", moment)

    def check(self, problem: Any, clients: int) -> None:
        super().check(problem, clients)
        if self.messages == "scalars" and not problem.set_of_x.trivial:
            raise ValueError(
                f"{type(self).__name__}: with a set of x, or local sets, the server cannot replay the steps. "
                "Use messages='vectors'."
            )

    def draw(self, key: Key, x: PyTree) -> PyTree:
        """The directions of a step, stacked."""
        return directions(key, x, self.eta, self.directions, self.orthogonal)

    def descend(self, problem: Any, client: Client, x: PyTree, s: Array, v: PyTree) -> PyTree:
        """``x − γ (Σ_j s_j v_j + (x − P_{X_i}(x))/η)``."""
        pull = tree.scale(1 / self.eta, tree.sub(x, problem.set_of_x(x, client)))
        return tree.axpy(-self.gamma, tree.add(combine(s, v), pull), x)


class Replayed(TwoPoint[ProblemT, StateT]):
    """Base of those whose server can replay every local step from its scalars and its key."""

    def check(self, problem: Any, clients: int) -> None:
        super().check(problem, clients)
        if self.messages == "scalars" and not isinstance(self.H, int):
            raise ValueError(
                f"{type(self).__name__}: messages='scalars' needs the same number H of steps for all clients "
                "and rounds."
            )

    def key_of(self, key: Key, k: Integer, *words: Array) -> Key:
        """The key of the directions of local step k, from the key of that step."""
        return jax.random.split(key)[1]

    def replay(self, key: Key, scalars: Array, x: PyTree, *words: Array) -> PyTree:
        """``Σ_k Σ_j s_kj v_kj`` of one client, from the key that it drew with."""

        def add(total: PyTree, key: Key, k: Integer) -> PyTree:
            return tree.add(combine(scalars[k], self.draw(self.key_of(key, k, *words), x)), total)

        return loop(self.H, add, key, tree.zeros_like(x), indexed=True)

    def replay_all(self, fed: Fed, key: Key, scalars: Array, x: PyTree) -> PyTree:
        """``x − γ`` times the mean of `replay` over the cohort."""

        def add(x_new: PyTree, one: tuple[Any, Any, Any]) -> tuple[PyTree, None]:
            index, weight, own = one
            moved = self.replay(jax.random.fold_in(key, index), own, x)
            return tree.axpy(-self.gamma * weight, moved, x_new), None

        return jax.lax.scan(add, x, (fed.cohort, fed.cohort_weights, scalars))[0]


def overshooting(method: Any, moment: Moment) -> list[str]:
    """A warning if γ > 2η and x has a set, before the run; schedules are evaluated throughout it.

    A step multiplies the distance from the set by |1 − γ/η|, which then exceeds 1.
    """
    if moment.state is not None or moment.problem.set_of_x.trivial:
        return []
    scheduled = callable(method.gamma) or callable(method.eta)
    looks = np.unique(np.linspace(0, max(moment.rounds - 1, 0), LOOKS if scheduled else 1).astype(int))
    steps = [(at.gamma, at.eta, int(r)) for r in looks for at in [method.at(int(r))]]
    gamma, eta, r = max(((float(g), float(e), r) for g, e, r in steps), key=lambda step: step[0] / step[1])
    if gamma <= 2 * eta:
        return []
    when = f" in round {r}" if scheduled else ""
    return [
        f"{type(method).__name__}: gamma={gamma:g} is more than 2·eta={2 * eta:g}{when}, and x has a set. "
        f"Outside the set, every step with the pull (x − P(x))/eta multiplies the distance from it by "
        f"{gamma / eta - 1:.3g}, and the run diverges. Take gamma ≤ eta, or leave out a set that is never "
        "active."
    ]


def lost_in_rounding(method: Any, width: str, moment: Moment, of_entries: bool = False) -> list[str]:
    """A warning, before the run, if the entries of a direction are rounded away when added to x0.

    Args:
        method: with the width η of its differences, a number or a schedule (evaluated in round 0); entries
            of a direction are about η/√n.
        width: the name of that field.
        moment: the run's moment; the warning is given only before the run.
        of_entries: whether η is the size of an entry, as of normal directions.
    """
    if moment.state is not None:
        return []
    eta, n = float(vars(method.at(0))[width]), tree.dimension(moment.x0)
    floats = [leaf for leaf in map(np.asarray, jax.tree.leaves(moment.x0)) if leaf.dtype.kind == "f"]
    gaps = [(float(np.spacing(np.abs(leaf).max(initial=0))), leaf.dtype) for leaf in floats]
    gap, dtype = max(gaps, key=lambda pair: pair[0], default=(0.0, None))
    entry = eta if of_entries else eta / np.sqrt(n)
    if entry >= gap:
        return []
    return [
        f"{type(method).__name__}: {width}={eta:g} is lost in rounding: the entries of its directions, about "
        f"{entry:.1g}, are below {gap:.1g}, the spacing of {dtype} numbers near x0. Take a larger "
        f"{width}, scale or centre the data, or use float64: jax.config.update('jax_enable_x64', True)."
    ]
