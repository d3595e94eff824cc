"""One client at a time, eagerly: an exception or a NaN names the round, the phase and the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import Method, finite
from fedstrata.core.types import PyTree
from fedstrata.engines.base import (
    Advanced,
    Carry,
    ClientError,
    FedBase,
    Setup,
    before_rounds,
    client_of,
    measure,
    one_round,
    visit,
)


@dataclass(frozen=True)
class Debug:
    """Slow and talkative: nothing is compiled, every reply is looked at."""

    def place(self, data: FederatedData) -> FederatedData:
        """The arrays on the device."""
        return jax.tree.map(jnp.asarray, data)

    def place_carry(self, carry: Carry, clients: int) -> Carry:
        """See `Engine.place_carry`."""
        return jax.tree.map(jnp.asarray, carry)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """See `Engine.fetch`."""
        return jax.tree.map(np.asarray, carry)

    def agree(self, value: Any) -> Any:
        """See `Engine.agree`."""
        return value

    def begin(
        self, setup: Setup, method: Method, carry: Carry, seed: int, data: FederatedData
    ) -> tuple[Carry, Any]:
        """See `Engine.begin`."""
        with jax.disable_jit(), counting.collect() as counted:
            carry = before_rounds(DebugFed, setup, method, carry, jax.random.key(seed), data)
        return carry, total(counted)

    def advance(
        self,
        setup: Setup,
        method: Method,
        carry: Carry,
        seed: int,
        data: FederatedData,
        first: int,
        rounds: np.ndarray,
    ) -> Advanced:
        """See `Engine.advance`: a plain loop."""
        r, key = first, jax.random.key(seed)
        history: list[dict[str, Any]] = []
        counts: list[Counter[str]] = []
        with jax.disable_jit():
            for number in rounds:
                with counting.collect() as counted:
                    for _ in range(number):
                        carry = one_round(DebugFed, setup, method, carry, key, data, jnp.int32(r))
                        if not bool(finite(carry.state)):
                            history.append(measure(DebugFed, setup, method, carry, data))
                            return Advanced(carry, stack(history), [*counts, total(counted)], r)
                        r += 1
                history.append(measure(DebugFed, setup, method, carry, data))
                counts.append(total(counted))
        return Advanced(carry, stack(history), counts, -1)


class DebugFed(FedBase):
    """The verbs as Python loops."""

    def _run(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        message: tuple[PyTree, ...],
        chosen: jax.Array | None,
        weights: jax.Array | None,
        stacked: bool,
    ) -> tuple[PyTree, PyTree]:
        indices = range(self.clients) if chosen is None else np.asarray(chosen).tolist()
        uploads, memory = [], self.memory
        for i in indices:
            where = f"round {int(self.round_number)}, phase {getattr(phase, '__name__', phase)!r}, client {i}"
            mine = jax.tree.map(lambda leaf, i=i: leaf[i], memory)
            try:
                reply, counted = visit(
                    self.setup, phase, key, message, client_of(self.setup, self.data, i, mine)
                )
            except Exception as error:
                raise ClientError(f"{where}: {type(error).__name__}: {error}") from error
            if bad := tree.nonfinite_leaves(reply.upload):
                raise ClientError(
                    f"{where}: the upload is not finite in {', '.join(bad)}. "
                    "Look at this client's data, or lower the step size."
                )
            counting.merge(counted, 1, counted.factors)
            uploads.append(reply.upload)
            if reply.memory is not None:
                memory = jax.tree.map(lambda old, new, i=i: old.at[i].set(new), memory, reply.memory)
        self.memory = memory
        stack = jax.tree.map(lambda *u: jnp.stack(u), *uploads)
        if stacked:
            return stack, uploads[0]
        if weights is None:
            return jax.tree.map(lambda u: u.mean(0), stack), uploads[0]
        return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1), stack), uploads[0]


def total(counted: counting.Tally) -> Counter[str]:
    """A tally whose factors are numbers, as plain counts."""
    counts = Counter(counted.fixed)
    for names, factor in counted.scaled:
        for name, amount in names.items():
            counts[name] += amount * int(factor)
    return counts


def stack(history: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """A list of metrics as arrays."""
    return {name: np.array([float(h[name]) for h in history]) for name in history[0]}
