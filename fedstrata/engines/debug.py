"""One client at a time, eagerly: an exception or a NaN names the round, the phase and the client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.fed import Advanced, Carry, ClientError, Engine, Exchange, Fed, Lane, Setup, visit
from fedstrata.core.method import Method
from fedstrata.core.storage import Placed
from fedstrata.core.types import Array, PyTree
from fedstrata.engines.rounds import before_rounds, finite, measure, one_round


@dataclass(frozen=True)
class Debug(Engine):
    """Slow and talkative: nothing is compiled, every reply is looked at."""

    def begin(
        self, setup: Setup, method: Method, carry: Carry, seed: int, data: Placed
    ) -> tuple[Carry, list[Counter[str]]]:
        """See `Engine.begin`."""
        with jax.disable_jit(), counting.collect() as tally:
            carry = before_rounds(DebugFed, setup, method, carry, jax.random.key(seed), data)
        return carry, [tally.total()]

    def advance(
        self,
        setup: Setup,
        method: Method,
        carry: Carry,
        seed: int,
        data: Placed,
        first: int,
        rounds: np.ndarray,
        active: np.ndarray | None = None,
    ) -> Advanced:
        """See `Engine.advance`: a plain loop, left at the first round whose state is not finite."""
        r, key, bad = first, jax.random.key(seed), -1
        history: list[dict[str, Array]] = []
        counts: list[Counter[str]] = []
        with jax.disable_jit():
            for number in rounds:
                with counting.collect() as tally:
                    for _ in range(int(number)):
                        carry = one_round(DebugFed, setup, method, carry, key, data, jnp.int32(r))
                        if not bool(finite(carry.state)):
                            bad = r
                            break
                        r += 1
                history.append(measure(DebugFed, setup, method, carry, data))
                counts.append(tally.total())
                if bad >= 0:
                    break
        stacked = {name: np.array([float(values[name]) for values in history]) for name in history[0]}
        return Advanced(carry, [Lane(stacked, counts, bad)])


class DebugFed(Fed):
    """The verbs as Python loops."""

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """One client after the other, its upload looked at before the next one's turn."""
        indices = range(self.clients) if exchange.of is None else np.asarray(exchange.of).tolist()
        uploads = [self._reply(exchange, i) for i in indices]
        stack = jax.tree.map(lambda *u: jnp.stack(u), *uploads)
        if exchange.stacked:
            return stack, uploads[0]
        weights = exchange.weights
        if weights is None:
            return jax.tree.map(lambda u: u.mean(0), stack), uploads[0]
        return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1), stack), uploads[0]

    def _reply(self, exchange: Exchange, i: int) -> PyTree:
        phase = getattr(exchange.phase, "__name__", exchange.phase)
        where = f"round {int(self.round_number)}, phase {phase!r}, client {i}"
        mine = jax.tree.map(lambda leaf: leaf[i], self.memory)
        try:
            reply, tally = visit(self.setup, exchange, self.data.client(i, mine))
        except Exception as error:
            raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
        if bad := tree.nonfinite_leaves(reply.upload):
            raise ClientError(
                f"{where}: the upload is not finite in {', '.join(bad)}. "
                "Look at this client's data, or lower the step size."
            )
        counting.book(tally)
        if reply.memory is not None:
            self.memory = jax.tree.map(lambda old, new: old.at[i].set(new), self.memory, reply.memory)
        return reply.upload
