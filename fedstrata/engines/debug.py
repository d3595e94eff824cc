"""One client at a time, eagerly: an exception or a NaN names the round, the phase and the client.

In the first round and at the first evaluation every phase is also run with checks of its indices: for an
index out of bounds, JAX silently takes another entry (a label 2 of two classes gives a plausible loss).
Negative indices count from the end, as in NumPy, and are not detected.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fedstrata.core import counting, tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Exchange, Fed, visit
from fedstrata.core.term import one_by_one
from fedstrata.core.types import Array, PyTree
from fedstrata.data.storage import Placed
from fedstrata.engines.engine import Advanced, Carry, ClientError, Engine, Job
from fedstrata.engines.rounds import before_rounds, finite, in_a_loop, measure, one_round
from fedstrata.engines.simulated import mean_dtype
from fedstrata.support.points import nonfinite_leaves


@dataclass(frozen=True)
class Debug(Engine):
    """Runs clients one by one, uncompiled, and checks every reply."""

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        setup, method, seed, data = job
        make_fed = partial(DebugFed, look=True)
        with jax.disable_jit(), counting.collect() as tally:
            carry = before_rounds(make_fed, setup, method, carry, jax.random.key(seed), data)
        return carry, [tally.total()]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        setup, method, seed, data = job
        # Checks are slow, and later evaluations look up the same indices: the first one is checked.
        key, looks = jax.random.key(seed), itertools.chain([True], itertools.repeat(False))

        def one(carry: Carry, r: int, stop: int) -> tuple[Carry, int, Counter[str], int]:
            make_fed = partial(DebugFed, look=r == first)
            with counting.collect() as tally:
                carry = one_round(make_fed, setup, method, carry, key, data, jnp.int32(r))
            good = bool(finite(carry.state))
            return carry, r + good, tally.total(), -1 if good else r

        def measured(carry: Carry, r: int) -> dict[str, Array]:
            return measure(partial(DebugFed, look=next(looks)), setup, method, carry, data)

        with jax.disable_jit():
            carry, lane = in_a_loop(carry, first, rounds, one, measured)
        return Advanced(carry, [lane])


class DebugFed(Fed):
    """The verbs as Python loops; ``look`` asks for checks of indices."""

    data: Placed

    def __init__(self, *args: Any, look: bool = False) -> None:
        super().__init__(*args)
        self._look = look
        self._looked: set[tuple[str, int]] = set()

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """One client after the other; each upload is checked before the next client's turn."""
        indices = range(self.clients) if exchange.of is None else np.asarray(exchange.of).tolist()
        uploads = [self._reply(exchange, i) for i in indices]
        stack = jax.tree.map(lambda *u: jnp.stack(u), *uploads)
        if exchange.stacked:
            return stack, uploads[0]
        weights = self.weights_of(exchange.of, exchange.weights)

        def mean(uploads: Array) -> Array:
            dtype = mean_dtype(uploads.dtype)
            return jnp.tensordot(weights.astype(dtype), uploads.astype(dtype), 1)

        return jax.tree.map(mean, stack), uploads[0]

    def _reply(self, exchange: Exchange, i: int) -> PyTree:
        where = f"round {int(self.round_number)}, phase {exchange.name!r}, client {i}"
        mine = tree.row(self.memory, i)
        client = self.data.client(i, mine)
        if outside := self._outside(exchange, client, i):
            raise ClientError(
                f"{where}: {outside} JAX would silently take another entry there. Labels of K classes are "
                "0 … K−1: see fs.data.check_labels."
            )
        try:
            reply, tally = visit(self.setup, exchange, client)
        except Exception as error:
            raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
        if bad := nonfinite_leaves(reply.upload):
            raise ClientError(
                f"{where}: the upload is not finite in {', '.join(bad)}. "
                "Look at this client's data, or lower the step size."
            )
        counting.book(tally)
        # At once, as no phase reads another client's memory: there is one copy of all of them.
        if reply.memory is not None:
            self.memory = jax.tree.map(lambda old, new: old.at[i].set(new), self.memory, reply.memory)
        return reply.upload

    def _outside(self, exchange: Exchange, client: Client, i: int) -> str | None:
        """The first index outside of its array, in words; each phase of a client is looked at once."""
        if not self._look or ((exchange.name, i) in self._looked and not exchange.evaluation):
            return None
        self._looked.add((exchange.name, i))

        def upload() -> PyTree:
            return visit(self.setup, exchange, client)[0].upload

        before = one_by_one.set(True)  # checkify cannot see into a vmap: samples are gone through in a loop
        try:
            error, _ = checkify.checkify(upload, errors=checkify.index_checks)()
        except Exception:  # the phase itself will raise it
            return None
        finally:
            one_by_one.reset(before)
        words = error.get()
        return None if words is None else words.strip()
