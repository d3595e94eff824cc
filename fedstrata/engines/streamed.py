"""The simulated program on clients that are read as they are needed: for data that does not fit into memory.

A round's cohort follows from the seed. While the device computes, a thread draws the cohorts of the next
rounds and reads and places their samples: a *window*, of fixed shapes. The compiled rounds are the simulated
engine's; only the rows of clients are found by their numbers. What clients remember lives on the host, goes
to the device with a window and back after it.

A round that asks clients outside of its cohort (everyone, where there is no participation; lower levels that
all clients solve) cannot be done in a window. Its exchanges then leave the program by an ordered callback,
which goes through the clients in blocks: correct, at the price of reading whoever is asked at every exchange.
Exchanges before the first round and exact metrics are done in the same way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.method import Method
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.engines.engine import Advanced, Carry, Engine, Job
from fedstrata.engines.memories import Memories, MemoriesAt
from fedstrata.engines.rounds import in_a_loop
from fedstrata.engines.simulated import Simulated, strided
from fedstrata.engines.streamed_run import MANY, StreamedRun

SAMPLED = 1_000  # clients that metrics are means over where there are many


@dataclass(frozen=True)
class Streamed(Engine):
    """One device, one program, samples from a source.

    Args:
        chunk: as of `fedstrata.engines.Simulated`.
        metrics: what the metrics are means over: ``"exact"``, all clients, read again at every evaluation; a
            number of clients, drawn once from the seed; ``"auto"``, all up to 10,000 clients, above that
            1,000 of them. The result says which.
        ahead: rounds whose clients are read together; None lets the engine choose, by 64 MiB.
        memory_limit: bytes of what clients remember, above which it is on the disk.
    """

    chunk: int | str | None = "auto"
    metrics: str | int = "auto"
    ahead: int | None = None
    memory_limit: int = 2**30

    def __post_init__(self) -> None:
        Simulated(self.chunk)
        whole = isinstance(self.metrics, int) and not isinstance(self.metrics, bool) and self.metrics >= 1
        if self.metrics not in ("auto", "exact") and not whole:
            raise ValueError(
                f"metrics must be 'auto', 'exact' or a number of clients ≥ 1, but is {self.metrics!r}."
            )
        if self.ahead is not None and not (isinstance(self.ahead, int) and self.ahead >= 1):
            raise ValueError(f"ahead must be a number of rounds ≥ 1, but is {self.ahead!r}.")

    def place(self, data: FederatedData) -> StreamedRun:
        """See `Engine.place`: what reads it, as samples are placed when they are needed."""
        return StreamedRun(self, data)

    def place_carry(self, carry: Carry) -> Carry:
        """See `Engine.place_carry`: the memory stays on the host."""
        held = None
        if jax.tree.leaves(carry.memory):
            held = MemoriesAt(Memories(carry.memory, self.memory_limit), 0)
        return Carry(jax.tree.map(jnp.asarray, carry.state), held)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """See `Engine.fetch`."""
        held = carry.memory
        whole = None if held is None else held.memories.at(held.version).whole()
        return Carry(jax.tree.map(np.asarray, carry.state), whole)

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`; what clients remember stays on the host."""
        return method.output(carry.state, host.memory)

    def sampled(self, clients: int) -> int | None:
        """How many clients the metrics are means over; None is all."""
        if self.metrics == "exact" or (self.metrics == "auto" and clients <= MANY):
            return None
        count = SAMPLED if self.metrics == "auto" else int(self.metrics)
        return None if count >= clients else count

    def measured_on(self, data: FederatedData) -> str:
        """See `Engine.measured_on`."""
        count = self.sampled(data.clients)
        return "all clients" if count is None else f"{count} of {data.clients} clients, the same throughout"

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        """See `Engine.begin`: all clients, block after block."""
        setup, method, seed, data = job
        data.begin(setup, carry.memory, seed)
        state, counts, _ = data.everyone("start", setup, method, carry.state, 0)
        return data.carry(state), [counts]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        """See `Engine.advance`."""
        setup, method, seed, data = job
        data.begin(setup, carry.memory, seed, strided(setup, rounds).stride)

        def measured(state: PyTree, r: int) -> dict[str, Any]:
            return data.measured(setup, method, state)

        some = partial(data.rounds, setup, method)
        state, lane = in_a_loop(carry.state, first, rounds, some, measured)
        return Advanced(data.carry(state), [lane])
