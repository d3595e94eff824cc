"""The samples of a streamed run: windows of cohorts, blocks of all clients, and the clients of metrics."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.fed import Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Outline, Placed, common_size, groups_of
from fedstrata.engines.engine import Carry, Job, need_two_threads
from fedstrata.engines.memories import Memories, MemoriesAt
from fedstrata.engines.programs import program, settle
from fedstrata.engines.remote import Call, handle_of
from fedstrata.engines.rounds import measure, secret_of
from fedstrata.engines.simulated import Simulated, in_strides, trace_advance
from fedstrata.engines.streamed_programs import (
    AsksOthers,
    Blocks,
    Cohorts,
    Window,
    drawn_cohorts,
    trace_everyone,
)

if TYPE_CHECKING:
    from fedstrata.engines.streamed import Streamed

MANY = 10_000  # clients, above which metrics are means over some of them
WINDOW_BYTES = 2**26  # of samples and memories that are read ahead at once
WINDOW_ROUNDS = 64  # at most; twice as many on a GPU, which is done with them sooner
BLOCK_BYTES = 2**24  # of those through which an exchange with everyone goes
BLOCK_CLIENTS = 4_096  # at most


def trace_sampled(
    engine: Simulated, setup: Setup, method: Method, carry: Carry, data: Placed
) -> dict[str, Array]:
    """The metrics, as means over the placed clients."""
    return measure(engine.make_fed(), setup, method, carry, data)


class StreamedRun:
    """A run's data on its way to the device, and its clients' memory.

    Attributes:
        failure: the error of a callback.
    """

    def __init__(self, engine: Streamed, data: FederatedData) -> None:
        self.engine, self.data = engine, data
        self.test, self.server = data.pooled(jnp.asarray)
        self.groups = groups_of(data.sizes, data.valid_sizes)[1]
        self.memories: Memories | None = None
        self.failure: BaseException | None = None
        self.handle = handle_of(self)
        self._x64 = bool(jax.config.read("jax_enable_x64"))
        self._reader = ThreadPoolExecutor(1, "fedstrata-reader")
        self._window: Window | None = None
        # to another device the next window is copied while one computes, and the one after it is read
        on_host = jax.default_backend() == "cpu"
        self._windows, self._longest = (1, WINDOW_ROUNDS) if on_host else (2, 2 * WINDOW_ROUNDS)
        self._coming: deque[Future[Window]] = deque()
        self._drawn: tuple[int, Array] | None = None
        self._in_windows: bool | None = None
        self._checked = False

    def begin(self, job: Job, carry: Carry, stride: int = 1) -> None:
        """Begin a chunk of rounds that divides into strides, see `fedstrata.engines.simulated.strided`."""
        self.setup, self.method, self.seed, self.stride = job.setup, job.method, job.seed, stride
        self.secret = secret_of(carry.state)
        setup, held = self.setup, carry.memory
        if held is not None:
            self.memories = held.memories
            self.memories.begin(held.version)
        if self._window is not None:
            self._window.memory = (
                None  # the run may have gone back: the device holds the memory of later rounds
            )
        if self._checked:
            return
        self._checked = True
        sampled = self.engine.sampled(setup.clients)
        for name, metric in setup.metrics:
            if metric.each_client:
                # in a sample of the clients, a position does not identify the client
                if metric.part == "test" or (metric.each and sampled is not None):
                    what = "of test samples" if metric.part == "test" else "kept for each client"
                    raise ValueError(
                        f"The metric {name!r} is {what}, which streamed metrics cannot be: leave it out, or "
                        "give engine='simulated'; fs.per_client(fs.on_host(…)) reads clients one by one."
                    )
            elif sampled is None and metric.needs_data:
                raise ValueError(
                    f"The metric {name!r} takes (x, y, data), but the data is read in blocks. Give a "
                    "function of (x, y) or of the state, or evaluate on some clients: "
                    "engine=fs.engines.Streamed(metrics=1000)."
                )

    def carry(self, state: PyTree) -> Carry:
        """State and memory for the next chunk."""
        self._put_back()
        held = None if self.memories is None else MemoriesAt(self.memories, self.memories.version)
        return Carry(state, held)

    def rounds(self, state: PyTree, r: int, stop: int) -> tuple[PyTree, int, Counter[str], int]:
        """Run rounds from ``r``, not past ``stop``: the state, the next round, counts, the bad round."""
        setup = self.setup
        # Whether rounds ask their cohorts alone is found by tracing one: `AsksOthers` says that they do not.
        if self._in_windows is None:
            self._in_windows = setup.participants < setup.clients
        if self._in_windows:
            try:
                return self._in_window(state, r, stop)
            except AsksOthers as error:
                self._in_windows = False
                self._warn(f"the phase {str(error)!r} asks")
        elif self._in_windows is False and r == 0 and setup.participants == setup.clients:
            self._warn("all take part: every exchange asks")
        self._put_back()
        state, counts, good = self.everyone("round", state, r)
        return state, r + 1, counts, -1 if good else r

    def _warn(self, why: str) -> None:
        if self.data.clients > MANY:
            offer = " Give participation= to ask a part of them." if why.startswith("all") else ""
            warnings.warn(
                f"In a round of {type(self.method).__name__}, {why} all {self.data.clients} clients, so that "
                f"their samples are read again each time.{offer}",
                stacklevel=10,
            )

    # -- windows

    def _in_window(self, state: PyTree, r: int, stop: int) -> tuple[PyTree, int, Counter[str], int]:
        window = self._window_at(r)
        number = min(stop, window.stop) - r
        if self.memories is not None and window.memory is None:
            rows = self.memories.take(window.clients, window.placed.training.rows)
            window.memory = jax.tree.map(jnp.asarray, rows)
        engine = Cohorts(self.engine.chunk)
        slots = engine.slots(r, np.array([number]))
        args = (self.method, Carry(state, window.memory), np.uint32(self.seed), window.placed, *slots)
        lengths = np.array([number, self.stride])  # another stride would be another program
        carry, (_, words, bad) = in_strides(trace_advance, engine, self._unmeasured, lengths, args)
        window.memory = carry.memory
        counts = settle(tree.row(words, 0), number)
        return carry.state, r + number, counts, int(bad)

    def _put_back(self) -> None:
        """Copy the memory of the window's clients back to the host."""
        if self._window is not None and self._window.memory is not None:
            assert self.memories is not None
            self.memories.put(self._window.clients, self._window.memory)
            self._window.memory = None

    def _window_at(self, r: int) -> Window:
        if self._window is not None and self._window.start <= r < self._window.stop:
            return self._window
        self._put_back()
        self._window = None  # its arrays go before the next ones are placed
        window = self._coming.popleft().result() if self._coming else None
        if window is None or not window.start <= r < window.stop:  # the run went back, or jumped
            self._coming.clear()
            window = self._reader.submit(self._read, r).result()
        self._window = window
        while len(self._coming) < self._windows:
            last = self._coming[-1] if self._coming else None
            self._coming.append(self._reader.submit(self._read_after, last, window.stop))
        return window

    def _read_after(self, last: Future[Window] | None, r: int) -> Window:
        """The window after the last one, which this thread has read; the one from ``r`` if there is none."""
        return self._read(r if last is None else last.result().stop)

    @cached_property
    def _capacity(self) -> dict[str, int]:
        """The room of a window in rounds, clients and samples; it suffices for nearly all windows."""
        data, part = self.data, self.setup.participants
        row = 0 if self.memories is None else self.memories.row_bytes
        rounds = self.engine.ahead or min(
            self._longest, max(1, int(WINDOW_BYTES / (part * (self._client_bytes + row))))
        )
        stride = self.stride  # of which a window holds whole ones, or an even part
        rounds = max(n for n in range(1, rounds + 1) if n % stride == 0 or stride % n == 0)
        clients = min(rounds * part, data.clients)
        found = {"rounds": rounds, "clients": clients}
        by = self._drawn_by  # larger clients then come more often
        for name, sizes in data.part_sizes.items():
            mean = np.average(sizes, weights=by)
            # four standard deviations more than the mean: a window that needs more holds fewer rounds
            likely = clients * mean + 4 * np.sqrt(clients * np.average((sizes - mean) ** 2, weights=by))
            found[name] = _room(likely, sizes)
        return found

    @cached_property
    def _client_bytes(self) -> float:
        """The average bytes of a client's samples."""
        leaves = jax.tree.leaves((self.data.train, self.data.valid))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / self.data.clients

    def _read(self, r: int) -> Window:
        """The clients of as many rounds from ``r`` on as fit into a window."""
        with jax.enable_x64(self._x64):  # a setting of each thread's own
            room, number = self._capacity, self._capacity["rounds"]
            if self._drawn is None or self._drawn[0] != r:
                self._drawn = (r, self._draw(r))
            cohorts = np.asarray(self._drawn[1])
            while True:
                clients = np.unique(cohorts[:number])
                parts = self.data.part_sizes.items()
                needed = {name: int(sizes[clients].sum(dtype=np.int64)) for name, sizes in parts}
                if all(needed[name] <= room[name] for name in needed):
                    break
                if number == 1:  # an unlikely cohort: from now on there is room for it
                    room.update({name: max(room[name], needed[name]) for name in needed})
                    break
                number = number // 2
            # now: the device copies it after the rounds that are queued
            self._drawn = (r + number, self._draw(r + number))
            placed = self.data.some(clients, room["clients"], room, self.groups)
            return Window(r, r + number, clients, replace(self._placed(placed), every=self._drawn_by))

    def _draw(self, r: int) -> Array:
        """The cohorts of a window's rounds from ``r`` on."""
        setup = self.setup
        draw = drawn_cohorts(setup.clients, setup.participants, setup.weights, setup.rate)
        rounds = r + np.arange(self._capacity["rounds"], dtype=np.int32)
        return draw(np.uint32(self.seed), rounds, self._outline, self.secret)

    def _placed(self, host: Placed) -> Placed:
        return replace(jax.device_put(host), server=self.server, test=self.test)

    @cached_property
    def _drawn_by(self) -> Array | None:
        """All clients' sizes, if cohorts are drawn by them; else None."""
        by_size = self.setup.weights == "size" and self._outline.equal is None
        return self._outline.sizes if by_size else None

    # -- everyone

    @cached_property
    def _outline(self) -> Outline:
        return Outline(jnp.asarray(self.data.sizes), self.server, self.test, common_size(self.data.sizes))

    @cached_property
    def _block(self) -> dict[str, int]:
        """The room of a block of clients, as `_capacity`."""
        data = self.data
        row = 0 if self.memories is None else self.memories.row_bytes
        clients = max(1, min(BLOCK_CLIENTS, data.clients, int(BLOCK_BYTES / (self._client_bytes + row))))
        rooms = {name: _room(1.2 * clients * sizes.mean(), sizes) for name, sizes in data.part_sizes.items()}
        return {"clients": clients, **rooms}

    @cached_property
    def _blocks(self) -> Blocks:
        room = self._block
        host = self.data.some(np.zeros(1, np.int64), room["clients"], room, self.groups)
        host = replace(host, server=self.server, test=self.test)
        memory = None if self.memories is None else self.memories.form(room["clients"])
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), host)
        leaves, structure = jax.tree.flatten((shapes, memory))
        return Blocks(self.engine.chunk, tuple(leaves), structure)

    def everyone(self, what: str, state: PyTree, r: int) -> tuple[PyTree, Counter[str], bool]:
        """Run the start or a round by callbacks: the state, the counts, whether the state is finite."""
        (state, good), tally = self._called(what, self._unmeasured, Carry(state, None), r)
        return state, tally.total(), bool(good)

    @property
    def _unmeasured(self) -> Setup:
        """The setup without metrics, which have programs of their own."""
        return replace(self.setup, metrics=(), measure_problem=False)

    def _called(self, what: str, setup: Setup, carry: Carry, r: int) -> Any:
        """Run a program with callbacks."""
        need_two_threads("Exchanges with clients outside of a round's cohort, and exact metrics,")
        self.failure = None
        args = (self.method, carry, np.uint32(self.seed), self._outline, self.handle, np.int32(r))
        compiled = program(trace_everyone, replace(self._blocks, program=what), setup, args)
        result = jax.block_until_ready(compiled(*args))
        if self.failure is not None:
            raise self.failure
        return result

    def answer(
        self, call: Call, of: Any, weights: Any, key: np.ndarray, message: list[np.ndarray],
        constants: list[np.ndarray], own: list[np.ndarray],
    ) -> tuple[list[np.ndarray], np.ndarray]:  # fmt: skip
        """An exchange, block after block; the next one is read while the device computes."""
        assert call.run is not None
        with jax.enable_x64(self._x64):
            clients = np.arange(self.data.clients) if of is None else of
            room, dtype = self._block["clients"], jnp.result_type(float)
            # Sums over many blocks are in float64: on the host that costs nothing.
            totals = [np.zeros(u.shape, u.dtype if call.stacked else np.float64) for u in call.uploads]
            factors, at = np.zeros(call.factors, np.int64), 0
            for clients_now, placed in self._through(clients):
                stop = at + len(clients_now)
                share = np.zeros(room, dtype)
                share[: len(clients_now)] = 1 / len(clients) if weights is None else weights[at:stop]
                memory: list[Any] = []
                if own:  # an evaluation gives each client something of its own, such as its model
                    memory = [_filled(leaf[clients_now], room) for leaf in own]
                elif self.memories is not None and not call.evaluation:
                    memory = jax.tree.leaves(self.memories.take(clients_now, room))
                returned = call.run(constants, key, message, share, placed, memory)
                uploads, rest = returned[: len(totals)], returned[len(totals) :]
                for total, upload in zip(totals, uploads, strict=True):
                    if call.stacked:
                        total[at:stop] = np.asarray(upload)[: len(clients_now)]
                    else:
                        total += np.asarray(upload)
                if memory and not call.evaluation:
                    assert self.memories is not None
                    self.memories.put(clients_now, rest[: len(memory)])
                factors += np.array([int(f) for f in rest[len(rest) - call.factors :]], np.int64)
                at = stop
            cast = [t.astype(u.dtype) for t, u in zip(totals, call.uploads, strict=True)]
            return cast, factors.astype(np.int32)

    def _through(self, clients: np.ndarray) -> Iterator[tuple[np.ndarray, Placed]]:
        """These clients in blocks that fit; each is read while the previous one is computed."""
        room, parts, start = self._block, [], 0
        sizes_of = self.data.part_sizes.items()
        sums = {name: np.cumsum(sizes[clients], dtype=np.int64) for name, sizes in sizes_of}
        while start < len(clients):
            ends = [start + room["clients"], len(clients)]
            for name, total in sums.items():
                before = total[start - 1] if start else 0
                ends.append(int(np.searchsorted(total, before + room[name], side="right")))
            parts.append(clients[start : min(ends)])
            start = min(ends)

        def read(some: np.ndarray) -> Placed:
            with jax.enable_x64(self._x64):
                return self._placed(self.data.some(some, room["clients"], room, self.groups))

        coming = self._reader.submit(read, parts[0])  # one ahead: two blocks are in memory at any time
        for j, some in enumerate(parts):
            placed = coming.result()
            if j + 1 < len(parts):
                coming = self._reader.submit(read, parts[j + 1])
            yield some, placed

    # -- metrics

    def measured(self, state: PyTree, r: int) -> dict[str, Any]:
        """All metrics, of everyone or of the sample."""
        setup = self.setup
        self._put_back()
        if self.engine.sampled(setup.clients) is None:
            whole = None
            if self.memories is not None:
                whole = jax.tree.map(jnp.asarray, self.memories.whole())
            return self._called("measure", setup, Carry(state, whole), 0)[0][0]
        clients, placed = self._sample
        memory = None if self.memories is None else self.memories.take(clients)
        number = len(clients)
        args = (self.method, Carry(state, jax.tree.map(jnp.asarray, memory)), placed)
        small = replace(setup, clients=number, participants=number)
        return program(trace_sampled, Simulated(self.engine.chunk), small, args)(*args)

    @cached_property
    def _sample(self) -> tuple[np.ndarray, Placed]:
        """The clients over which metrics are averaged, drawn once."""
        data, count = self.data, self.engine.sampled(self.data.clients)
        assert count is not None
        clients = np.sort(np.random.default_rng(self.seed).choice(data.clients, count, replace=False))
        # In memory, and kept: every evaluation goes through the same clients.
        placed = data.load(clients).placed()
        total = jnp.asarray(data.sizes.sum(dtype=np.int64), jnp.result_type(float))
        return clients, replace(placed, ids=jnp.asarray(clients, jnp.int32), total=total)


def _room(likely: float, sizes: np.ndarray) -> int:
    """Samples that arrays should hold: at least the largest client's, at most everyone's."""
    return int(min(max(likely, sizes.max()), sizes.sum(dtype=np.int64)))


def _filled(rows: np.ndarray, number: int) -> np.ndarray:
    """The rows, padded to ``number`` with copies of the first."""
    return np.concatenate([rows, np.repeat(rows[:1], number - len(rows), axis=0)])
