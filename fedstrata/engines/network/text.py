"""The text of a run, which both sides hold and replay by position; and a check that nothing leaks past it.

A text is a program ("start", "round", "measure") of a posed run. Its exchanges are numbered in order, and the
body of a loop has the same numbers at every turn. So "exchange 2 of the round" means the same to everyone who
holds the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.channelled import with_heard
from fedstrata.core.fed import Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, PyTree
from fedstrata.engines.engine import Carry
from fedstrata.support.private_jax import dce_jaxpr

PROGRAMS = ("start", "round", "measure")
START_ROUND = -1  # the number of "start" as a round, for the clients' memory


@dataclass(frozen=True)
class Text:
    """A posed run, as both sides hold it.

    Attributes:
        setup: the fixed parts of the run.
        method: the method with its horizon.
        state: a state, for its shapes only.
        memory: one client's memory before the first round.
        server: shapes of the server's own samples, or None.
        rounds: the number of rounds; None if it is not known.
    """

    setup: Setup
    method: Method
    state: PyTree
    memory: PyTree
    server: PyTree = None
    rounds: int | None = None

    @classmethod
    def of(
        cls, setup: Setup, method: Method, carry: Carry, server: PyTree = None, rounds: int | None = None
    ) -> Text:
        """From state and memory before the first round."""
        carry = Carry(*with_heard(method, carry))
        first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), carry.memory)
        return cls(setup, method, shapes(carry.state), first, shapes(server), rounds)


def shapes(tree: PyTree) -> PyTree:
    """Only shapes and dtypes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf)), tree)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def made_up(like: PyTree, fake: Array) -> PyTree:
    """Meaningless values of the right shapes; `reads` finds everything that is computed from them."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, fake).astype(leaf.dtype), like)


def reads(traced: Any, arguments: tuple[Any, ...], which: int) -> bool:
    """Whether a traced program's results or messages depend on one of its arguments."""
    # Apart from dead code, a used input reaches a result or a callback; an unused one cannot leak.
    jaxpr = traced.jaxpr.jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    before = len(jax.tree.leaves(arguments[:which]))
    return any(used[before : before + len(jax.tree.leaves(arguments[which]))])
