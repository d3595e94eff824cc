"""The simulated program on clients that are read as they are needed: for data that does not fit into memory.

A round's cohort follows from the seed. While the device computes, a thread draws the cohorts of the next
rounds and reads and places their samples: a *window*, of fixed shapes. The compiled rounds are the simulated
engine's; only the rows of clients are found by their numbers. What clients remember lives on the host, goes
to the device with a window and back after it.

A round that asks clients outside of its cohort (everyone, under full participation; lower levels that
all clients solve) cannot be done in a window. Its exchanges then leave the program by an ordered callback,
which goes through the clients in blocks: correct, at the price of reading whoever is asked at every exchange.
Exchanges before the first round and exact metrics are done in the same way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.hyperparameters import Count, check_fields
from fedstrata.core.method import Method
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.engines.engine import Advanced, Carry, Chunk, Engine, Job
from fedstrata.engines.memories import Memories, MemoriesAt
from fedstrata.engines.rounds import in_a_loop
from fedstrata.engines.simulated import strided
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

    chunk: Chunk = "auto"
    metrics: Count | Literal["auto", "exact"] = "auto"
    ahead: Count | None = None
    memory_limit: int = 2**30

    def __post_init__(self) -> None:
        check_fields(self)

    def place(self, data: FederatedData) -> StreamedRun:
        """See `Engine.place`; samples are read and placed when they are needed."""
        return StreamedRun(self, data)

    def place_carry(self, carry: Carry) -> Carry:
        """See `Engine.place_carry`: the memory stays on the host."""
        held = None
        if jax.tree.leaves(carry.memory):
            held = MemoriesAt(Memories(carry.memory, self.memory_limit), 0)
        return Carry(jax.tree.map(jnp.asarray, carry.state), held)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        held = carry.memory
        whole = None if held is None else held.memories.at(held.version).whole()
        return Carry(jax.tree.map(np.asarray, carry.state), whole)

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`; what clients remember stays on the host."""
        # Personal models of a million clients would not fit on the device that ran them.
        return method.output(carry.state, host.memory)

    def sampled(self, clients: int) -> int | None:
        """The number of clients over which metrics are averaged; None is all."""
        if self.metrics == "exact" or (self.metrics == "auto" and clients <= MANY):
            return None
        # Drawn once: the same clients at every evaluation, so that a curve does not jump with the draw.
        count = SAMPLED if self.metrics == "auto" else int(self.metrics)
        return None if count >= clients else count

    def measured_on(self, data: FederatedData) -> str:
        count = self.sampled(data.clients)
        return "all clients" if count is None else f"{count} of {data.clients} clients, the same throughout"

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        """See `Engine.begin`: all clients, block after block."""
        run: StreamedRun = job.data
        run.begin(job, carry)
        state, counts, _ = run.everyone("start", carry.state, 0)
        return run.carry(state), [counts]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        run: StreamedRun = job.data
        run.begin(job, carry, strided(job.setup, rounds).stride)
        state, lane = in_a_loop(carry.state, first, rounds, run.rounds, run.measured)
        return Advanced(run.carry(state), [lane])
