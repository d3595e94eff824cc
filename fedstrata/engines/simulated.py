"""All clients in one compiled program on one device: the default engine.

A verb runs its phase over the clients in blocks. One block with everyone is a `vmap`, blocks of one client
are a `lax.scan`. On a CPU the best is in between: as many clients side by side as keep the cores busy, and no
more than keep their arrays in cache through the local steps. Elsewhere blocks only bound the memory: on a GPU
(H200, ResNet20, 8 clients with batches of 16) a round is 2.7 times as fast side by side as one by one. Rounds
and evaluations are loops of traced length in the same program, so neither their number nor the chunks between
two looks at the host recompile anything.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.fed import Exchange, Fed, Setup, visit
from fedstrata.core.hyperparameters import check_fields
from fedstrata.core.method import Method
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, Integer, PyTree
from fedstrata.data.storage import Placed, SizeGroup, free_bytes
from fedstrata.engines.engine import Advanced, Carry, Chunk, Engine, Job, Lane
from fedstrata.engines.metrics import is_asked
from fedstrata.engines.programs import (
    Rows,
    TooLarge,
    WideCounts,
    add_counts,
    counts_of,
    no_counts,
    program,
    settle,
    values_of,
)
from fedstrata.engines.rounds import before_rounds, cohorts_of, finite, measure, one_round, secret_of
from fedstrata.support.tracing import traced

Found = TypeVar("Found")
EngineT = TypeVar("EngineT", bound=Any)  # which has `smaller`

CACHED = 320_000  # numbers of a block's clients on a CPU; measured where each of two cores has 1 MiB of L2
MAP_FROM = 2_000  # numbers in a message from which a CPU evaluates one client after the other
BLOCK_BYTES = 2**30  # what a block's uploads may take on a device that does not say how much memory is free
MOST_HALVINGS = 16
BLOCKS = 8  # of a cohort's clients, at least, where sizes differ: each is padded to its own largest member
STRIDE = 32  # rounds that a GPU runs, at most, without asking the host whether there are more
TILE = {"cpu": 1_024, "gpu": 16_384}  # samples that an evaluation of a large model takes at once


@dataclass(frozen=True)
class Simulated(Engine):
    """One device, one program.

    Args:
        chunk: clients per block: a number, ``None`` for all in one `vmap`, or ``"auto"`` to let the engine
            choose by device and message size. Results do not depend on it beyond rounding.
        runs: how many runs there are of each client side by side, in a sweep.
        halvings: how often blocks were halved because they did not fit into the device's memory.
        rewrite: whether convolutions are compiled in quicker forms, those with weights of each client's own
            as products of matrices, see `fedstrata.engines.convolutions`.
        deterministic: whether a GPU gives the same bits in every run: no atomic sums, and no kernels that are
            chosen by timing. CPUs do so anyway.
    """

    chunk: Chunk = "auto"
    runs: int = field(default=1, kw_only=True)
    halvings: int = field(default=0, kw_only=True)
    rewrite: bool = field(default=True, kw_only=True)
    deterministic: bool = field(default=False, kw_only=True)
    flat_passes: ClassVar[bool] = True  # whether an evaluation goes over the flat arrays, or client by client

    def __post_init__(self) -> None:
        check_fields(self)

    def block(self, number: int, message: PyTree, whole: Callable[[], int] | None) -> int:
        """How many clients run side by side.

        Args:
            number: of all the clients that take part.
            message: what each of them gets.
            whole: gives how many numbers of its data a client goes through at every step, none where it draws
                minibatches, on an accelerator those that are fetched for it; None for an evaluation, which
                goes through the data once.
        """
        if isinstance(self.chunk, int):
            return min(self.chunk, number)
        if self.chunk is None:
            return number
        size = max(tree.dimension(message), 1)
        if jax.default_backend() != "cpu":
            # Four bytes a number; an upload counts four times, for the steps of a phase keep a few copies.
            most = room() // (16 * size * self.runs + 4 * (0 if whole is None else whole()))
            most = max(most, 1) if self.halvings == 0 else max(min(most, number) >> self.halvings, 1)
        elif whole is None:
            most = number if size < MAP_FROM else 1
        else:
            most = CACHED // (size * self.runs + whole())
        blocks = -(-number // max(most, 1))
        return -(-number // blocks)  # equal blocks: a short last one would be padded and computed anyway

    @property
    def fetches(self) -> bool:
        """Whether a client's samples are copied for a phase that goes through all of them.

        Inside the phase's loop they would be looked up at every step: on a GPU (H200, 20,000 clients, Zipf
        sizes, 20 steps) that takes 1.6 times as long, 3 times where half of equal clients take part. A CPU
        has a few clients' samples in its cache anyway.
        """
        return jax.default_backend() != "cpu"

    def tile(self, message: PyTree, samples: PyTree) -> int | None:
        """How many samples an evaluation takes at once; None, where model and data are small, is all."""
        if tree.dimension(message) < MAP_FROM and tree.dimension(samples) <= 100 * CACHED:
            return None
        return TILE.get(jax.default_backend(), TILE["gpu"])

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`: nothing is copied back to the device, where it is already."""
        return method.output(*carry)

    def over_clients(self, array: PyTree) -> PyTree:
        """How an array with a leading client axis is laid out inside the program; here, as it is."""
        return array

    def fixed_layout(self, carry: Carry) -> Carry:
        """The layout in which a program takes and returns its carry; here, as it is."""
        return carry

    def make_fed(self) -> Callable[..., Fed]:
        """The factory of a round's verbs."""
        return partial(SimulatedFed, self)

    def multiple(self) -> int:
        """Blocks of clients are padded to a multiple of this."""
        return 1

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        args = (job.method, carry, np.uint32(job.seed), job.data)
        carry, words = fitting(self, lambda engine: program(trace_begin, engine, job.setup, args)(*args))
        return carry, [settle(words, 1)]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        args = (job.method, carry, np.uint32(job.seed), job.data, *self.slots(first, rounds))
        carry, happened = fitting(
            self, lambda engine: in_strides(trace_advance, engine, job.setup, rounds, args)
        )
        history, words, bad = happened
        return Advanced(carry, [Lane(values_of(rounds, history), counts_of(rounds, words), int(bad))])

    def smaller(self) -> Simulated | None:
        """The engine with half as large blocks, for a device whose memory was too small."""
        if self.chunk != "auto" or self.halvings >= MOST_HALVINGS:
            return None
        return replace(self, halvings=self.halvings + 1)

    def slots(self, first: int, rounds: np.ndarray) -> tuple[np.int32, np.int32, np.ndarray]:
        """The arguments that say which rounds; of one shape, so that no number of them recompiles."""
        slots = np.zeros(self.evaluations_at_once, np.int32)  # slots after the last evaluation are not read
        slots[: len(rounds)] = rounds
        return np.int32(first), np.int32(len(rounds)), slots


_smaller: dict[Any, Any] = {}  # engines that fitted in earlier runs, by the user's


def fitting(engine: EngineT, run: Callable[[EngineT], Found]) -> Found:
    """Run with fewer clients, or fewer runs, side by side if they do not fit into the device's memory.

    The user is warned once. What a program needs besides its arguments is known when it is compiled, so that
    most that are too large are not tried.
    """
    while True:
        now = _smaller.get(engine, engine)
        try:
            return run(now)
        except (jax.errors.JaxRuntimeError, TooLarge) as error:
            full = isinstance(error, TooLarge) or "RESOURCE_EXHAUSTED" in str(error)
            if not full or (less := now.smaller()) is None:
                raise
        if now is engine:
            words = "The arrays of clients, or of runs, did not fit into the device's memory side by side."
            warnings.warn(f"{words} Fewer are computed at once, until they do.", stacklevel=6)
        _smaller[engine] = less


def room() -> int:
    """Bytes for the clients of a block: half of what is free on the device."""
    return max((free_bytes() or 0) // 2, BLOCK_BYTES)


def strided(setup: Setup, rounds: np.ndarray) -> Setup:
    """Rounds in strides of fixed length, where the device must otherwise ask the host after every one.

    A GPU runs a loop of fixed length by itself; one of traced length copies its condition to the host at
    every turn. A stride divides all the numbers of rounds; another one is another program. At its end, not
    after every round, the state is looked at: where it is not finite, the rounds are done again one by one.
    """
    if jax.default_backend() == "cpu":
        return setup
    common = int(np.gcd.reduce(rounds))
    return replace(setup, stride=max(s for s in range(1, STRIDE + 1) if common % s == 0) if common else 1)


def in_strides(
    trace: Callable[..., Any], engine: Engine, setup: Setup, rounds: np.ndarray, args: tuple[Any, ...]
) -> tuple[Carry, list[Any]]:
    """The carry after some rounds and, on the host, what happened."""
    coarse = strided(setup, rounds)
    carry, *happened = program(trace, engine, coarse, args)(*args)
    send_home(carry)  # before this waits for the small results: the copies overlap
    history, words, bad = jax.device_get(happened)
    if coarse.stride > 1 and bad >= 0:  # one by one, to tell which round it was
        carry, *happened = program(trace, engine, setup, args)(*args)
        history, words, bad = jax.device_get(happened)
    return carry, [history.tree(), words.tree(), bad]


def send_home(carry: Carry) -> None:
    """Begin to copy the state to the host while the rest is waited for."""
    if jax.default_backend() != "cpu":
        for leaf in jax.tree.leaves(carry.state):
            leaf.copy_to_host_async()


def trace_begin(
    engine: Simulated, setup: Setup, method: Method, carry: Carry, seed: Integer, data: Placed
) -> tuple[Carry, WideCounts]:
    """The method's exchanges before the first round, with their counts."""
    make_fed, key = engine.make_fed(), jax.random.key(seed)
    carry, tally = counting.counted(before_rounds)(make_fed, setup, method, carry, key, data)
    return engine.fixed_layout(carry), add_counts(no_counts(tally), tally)


def stride_of(
    engine: Simulated, setup: Setup, round_once: Callable[..., Any], cohorts: Callable[..., Array | None]
) -> Callable[[Integer, Any], Any]:
    """The body of a loop over strides of rounds, whose carry is ``(carry, round, counts, bad round)``.

    Args:
        engine: for the layout of a carry.
        setup: with the length of a stride.
        round_once: ``round_once(carry, r, cohort)`` returns the carry after a round, and a tally.
        cohorts: ``cohorts(carry, r)`` draws those of a stride from round r on; None leaves it to the rounds.
    """

    def one(cohorts_now: Array | None, turn: Integer, inner: Any) -> Any:
        carry, r, words = inner
        carry, tally = round_once(carry, r, tree.row(cohorts_now, turn))
        # Over a mesh, a loop's carry must come back in the layout in which it went in.
        return engine.fixed_layout(carry), r + 1, add_counts(words, tally)

    def stride(turn: Integer, inner: Any) -> Any:
        *before, bad = inner
        if setup.stride == 1:
            carry, r, words = one(None, turn, before)
        else:
            step = partial(one, cohorts(*before[:2]))
            carry, r, words = jax.lax.fori_loop(0, setup.stride, step, tuple(before))
        # The first bad round is kept: a NaN stays in the state, so that later ones are bad, too.
        return carry, r, words, jnp.where((bad < 0) & ~finite(carry.state), r - 1, bad)

    return stride


def trace_advance(
    engine: Simulated,
    setup: Setup,
    method: Method,
    carry: Carry,
    seed: Integer,
    data: Placed,
    first: Integer,
    evaluations: Integer,
    rounds: Array,
    stay_finite: bool = False,
) -> tuple[Carry, Rows, Rows, Array]:
    """Rounds and evaluations as two nested loops of traced length.

    To ``stay_finite``, the carry is left as at the last evaluation with finite state and problem's metrics.
    """
    make_fed, most = engine.make_fed(), engine.evaluations_at_once
    key = jax.random.key(seed)  # made here: a sweep maps over seeds, and keys have no NumPy form

    @counting.counted
    def one(carry: Carry, r: Integer, cohort: Array | None) -> Carry:
        return one_round(make_fed, setup, method, carry, key, data, r, cohort)

    def cohorts(carry: Carry, r: Integer) -> Array | None:
        # once a stride: a GPU asks the host whether a draw must be repeated
        rounds = r + jnp.arange(setup.stride)
        return None if setup.stride == 1 else cohorts_of(setup, key, data, rounds, secret_of(carry.state))

    # Loops must know their carry beforehand: which counts and which metrics there are.
    (_, tally), round_once = traced(
        one, carry, first, jax.eval_shape(lambda *now: tree.row(cohorts(*now), 0), carry, first)
    )
    metrics, measured = traced(lambda c: measure(make_fed, setup, method, c, data), carry)
    none = no_counts(tally)  # two words for each count: a long run's do not fit into 32 bits

    stride = stride_of(engine, setup, round_once, cohorts)

    def evaluate(j: Integer, outer: Any) -> Any:
        before, r, bad, well, history, words = outer
        number = jax.lax.dynamic_index_in_dim(rounds, j, keepdims=False)
        strides = number if setup.stride == 1 else number // setup.stride
        carry, r, counts, bad = jax.lax.fori_loop(0, strides, stride, (before, r, none, bad))
        values = measured(carry)
        if stay_finite:  # metrics of a user's own may be NaN, and must not stop a run
            asked = tuple(name for name, _ in setup.metrics)
            well = well & (bad < 0) & finite([v for n, v in values.items() if not is_asked(n, asked)])
            carry = jax.tree.map(partial(jnp.where, well), carry, before)
        return carry, r, bad, well, history.put(j, values), words.put(j, counts)

    start = (carry, first, jnp.int32(-1), jnp.asarray(True), Rows.like(metrics, most), Rows.like(none, most))
    carry, _, bad, _, history, words = jax.lax.fori_loop(0, evaluations, evaluate, start)
    return engine.fixed_layout(carry), history, words, bad


class SimulatedFed(Fed):
    """The verbs inside one traced program."""

    data: Placed

    def __init__(self, engine: Simulated, *args: Any) -> None:
        super().__init__(*args)
        self.engine = engine

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Everyone in one `vmap` where they fit into one block, else block after block."""
        data, message = self.data, exchange.message
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        if exchange.of is not None:
            exchange = exchange._replace(of=data.slots(exchange.of))
        whole = self._whole(exchange)  # called below only if blocks or copies depend on it
        fetched = self._fetched(exchange, whole)
        numbers = None if exchange.evaluation else lambda: sum(whole().values())
        if self.engine.fetches:
            numbers = partial(sum, [whole()[part] for part in fetched])
        # Phases that draw minibatches need no capacity, so that one group serves clients of any size.
        if len(data.groups) == 1 or not whole() or self._per_sample(exchange):
            block = self.engine.block(number, message, numbers)
            if exchange.of is None and block >= number:
                return self._side_by_side(exchange, fetched)
            of = self.everyone if exchange.of is None else exchange.of
            return self._in_blocks(exchange, of, self._weights(exchange), block, (data.largest,), fetched)
        if exchange.of is None:
            return self._by_groups(exchange, whole(), fetched)
        # Who takes part is known only when the program runs: blocks of like size choose their capacity then.
        block = min(self.engine.block(number, message, numbers), -(-number // BLOCKS))
        by_size = jnp.argsort(data.training.sizes[exchange.of])
        weights = self._weights(exchange)[by_size]
        replies, shape = self._in_blocks(exchange, exchange.of[by_size], weights, block, data.groups, fetched)
        return (tree.row(replies, jnp.argsort(by_size)) if exchange.stacked else replies), shape

    def _per_sample(self, exchange: Exchange) -> bool:
        """Whether uploads have a row for every sample: stacked, they need one capacity for all groups."""
        if not exchange.stacked:
            return False

        def upload(group: SizeGroup, index: Array, memory: PyTree) -> PyTree:
            return visit(self.setup, exchange, self.data.client(index, tree.row(memory, index), group))[
                0
            ].upload

        shapes = {
            str(jax.eval_shape(partial(upload, group), jnp.zeros((), jnp.int32), self.memory))
            for group in self.data.groups
        }
        return len(shapes) > 1

    def _weights(self, exchange: Exchange) -> Array:
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        return jnp.full((number,), 1 / number) if exchange.weights is None else exchange.weights

    def _whole(self, exchange: Exchange) -> Callable[[], dict[str, int]]:
        """How many numbers of its data a client takes at once, by part, found in an abstract pass when asked.

        A phase that draws minibatches takes none: it needs no capacity, and only its messages count in the
            cache.
        """

        @cache
        def gone_through() -> dict[str, int]:
            data = self.data
            if len(data.groups) == 1 and tree.dimension((data.train, data.valid)) <= CACHED:
                return {}
            taken: dict[str, int] = {}

            def watched(name: str, samples: Samples) -> Samples:
                numbers = tree.dimension(samples.leaves) // data.training.rows
                tell = partial(taken.__setitem__, name, numbers)
                return _Watched(
                    samples.leaves, samples.size, samples.offset, samples.capacity, samples.augment, tell
                )

            def one(index: Integer, memory: PyTree) -> PyTree:
                client = data.client(index, tree.row(memory, index))
                train = watched("train", client.train)
                valid = train if client.valid is client.train else watched("valid", client.valid)
                return visit(self.setup, exchange, replace(client, train=train, valid=valid))[0].upload

            jax.eval_shape(one, jnp.zeros((), jnp.int32), self.memory)  # for its side effects on `taken`
            return taken

        return gone_through

    @property
    def _stacks(self) -> list[PyTree] | None:
        """Arrays that are a stack of clients' arrays: mapped over as they are, without a look-up."""
        parts = [part for part in (self.data.training, self.data.validation) if part is not None]
        return [part.stacked() for part in parts] if all(p.stride is not None for p in parts) else None

    def _fetched(self, exchange: Exchange, whole: Callable[[], dict[str, int]]) -> tuple[str, ...]:
        """Which parts of its samples a client takes with it into the phase."""
        if not self.engine.fetches or exchange.evaluation or (exchange.of is None and self._stacks):
            return ()
        return tuple(whole())

    def _side_by_side(self, exchange: Exchange, fetched: tuple[str, ...]) -> tuple[PyTree, PyTree]:
        """Everyone in one `vmap`. Rows past ``clients`` are padding."""
        data, rows = self.data, self.data.training.rows

        def one(
            index: Array, own: list[PyTree] | None, memory: PyTree
        ) -> tuple[PyTree, PyTree, counting.Tally]:
            client = with_fetched(data.client(index, memory), fetched)
            if own is not None:
                train = Samples(own[0], client.train.size, augment=client.train.augment)
                valid = Samples(own[1], client.valid.size) if len(own) > 1 else train
                client = replace(client, train=train, valid=valid)
            reply, tally = visit(self.setup, exchange, client)
            return reply.upload, reply.memory, tally

        # Stacked arrays are mapped over: XLA sees batched products in place of look-ups by index.
        indices = self.engine.over_clients(jnp.arange(rows))
        uploads, memory, tallies = jax.vmap(one)(indices, self._stacks, self.memory)
        if memory is not None:
            self.memory = self.engine.over_clients(memory)
        real = jax.tree.map(lambda factor: factor[: self.clients], tallies)
        counting.book(counting.summed(real), self.clients)
        shape = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), uploads)
        if exchange.stacked:
            return jax.tree.map(lambda u: u[: self.clients], uploads), shape
        if exchange.weights is None and rows == self.clients:  # no weights, no padding
            return jax.tree.map(lambda u: u.mean(0), uploads), shape
        weights = jnp.pad(self._weights(exchange), (0, rows - self.clients))
        return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1), uploads), shape

    def _by_groups(
        self, exchange: Exchange, whole: dict[str, int], fetched: tuple[str, ...]
    ) -> tuple[PyTree, PyTree]:
        """Everyone, one group of like sizes after the other, each with its own capacity."""
        data, weights, parts, start = self.data, self._weights(exchange), [], 0
        assert data.order is not None
        rows = tree.dimension(data.training.leaves) // jax.tree.leaves(data.training.leaves)[0].shape[0]
        shape: PyTree = None
        for group in data.groups:
            members = data.order[start : start + group.clients]
            start += group.clients
            numbers = rows * sum({"train": group.train, "valid": group.valid}[part] for part in whole)
            block = self.engine.block(group.clients, exchange.message, partial(int, numbers))
            replies, shape = self._in_blocks(exchange, members, weights[members], block, (group,), fetched)
            parts.append(replies)
        if exchange.stacked:
            replies = jax.tree.map(lambda *u: jnp.concatenate(u), *parts)
            return tree.row(replies, jnp.argsort(data.order)), shape
        return jax.tree.map(lambda *u: sum(u[1:], u[0]), *parts), shape

    def _in_blocks(
        self,
        exchange: Exchange,
        of: Array,
        weights: Array,
        block: int,
        groups: tuple[SizeGroup, ...],
        fetched: tuple[str, ...],
    ) -> tuple[PyTree, PyTree]:
        """Blocks of clients one after the other, uploads added up on the way; a last block may be padded.

        Of several ``groups``, in ascending order, a block takes the one that suffices for its largest member.
        Of the parts in ``fetched`` a client has arrays of its own.
        """
        number, rows = of.shape[0], self.data.training.rows
        block = -(-block // self.engine.multiple()) * self.engine.multiple()
        # Padding has the index `rows`: it computes what the last client does, and its memory is dropped.
        indices, weights = _rows_of(of, block, rows), _rows_of(weights, block, 0)
        shape, counts, together = self._block(exchange, groups, fetched, indices[0])

        def step(carry: Any, block_of: tuple[Array, Array]) -> tuple[Any, PyTree]:
            total, memory, tally = carry
            index, weight = block_of
            uploads, news, counts = together(index, memory)
            if news is not None:
                memory = jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), memory, news)
            tally = jax.tree.map(jnp.add, tally, counts)
            if exchange.stacked:
                return (total, memory, tally), uploads
            return (jax.tree.map(partial(_add_weighted, weight), total, uploads), memory, tally), None

        # Uploads are added up on the way: memory does not grow with clients unless the server gets them all.
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, mean_dtype(s.dtype)), shape)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), counts)
        start = (None if exchange.stacked else zero, self.memory, none)
        if indices.shape[0] == 1:
            (total, self.memory, tally), replies = step(start, (indices[0], weights[0]))
        else:
            (total, self.memory, tally), replies = jax.lax.scan(step, start, (indices, weights))
            replies = jax.tree.map(lambda u: u.reshape(-1, *u.shape[2:]), replies)
        counting.book(tally, number)
        return (jax.tree.map(lambda u: u[:number], replies) if exchange.stacked else total), shape

    def _block(
        self, exchange: Exchange, groups: tuple[SizeGroup, ...], fetched: tuple[str, ...], like: Array
    ) -> tuple[PyTree, PyTree, Callable[[Array, PyTree], tuple[PyTree, PyTree, counting.Tally]]]:
        """The shapes of one upload and of its counts, and the program of a block of clients like this one.

        The program takes the clients' indices and everyone's memory, and returns the uploads, the clients'
        new memory, and the counts.
        """
        rows = self.data.training.rows

        def one(group: SizeGroup, index: Array, memory: PyTree) -> tuple[PyTree, PyTree, counting.Tally]:
            place = jnp.minimum(index, rows - 1)
            client = with_fetched(self.data.client(place, tree.row(memory, place), group), fetched)
            reply, tally = visit(self.setup, exchange, client)
            return reply.upload, reply.memory, jax.tree.map(lambda f: jnp.where(index < rows, f, 0), tally)

        # A scan's carry needs the upload's shape: the phase is traced before it, and not again inside.
        (shape, _, counts), first = traced(partial(one, groups[0]), like[0], self.memory)

        def together(group: SizeGroup, index: Array, memory: PyTree) -> tuple[PyTree, PyTree, counting.Tally]:
            its = first if group is groups[0] else partial(one, group)
            if len(like) == 1:  # without `vmap`, matrices stay matrices
                uploads, news, counts = its(index[0], memory)
                return *jax.tree.map(lambda leaf: leaf[None], (uploads, news)), counts
            index = self.engine.over_clients(index)
            uploads, news, counts = jax.vmap(its, in_axes=(0, None))(index, memory)
            return uploads, news, counting.summed(counts)

        if len(groups) == 1:
            return shape, counts, partial(together, groups[0])
        numbers, choices = self.data.group_numbers(), [partial(together, group) for group in groups]

        def largest(index: Array, memory: PyTree) -> tuple[PyTree, PyTree, counting.Tally]:
            # clients come by size: the largest member of a block says which program it needs
            return jax.lax.switch(
                numbers.at[index].get(mode="fill", fill_value=0).max(), choices, index, memory
            )

        return shape, counts, largest

    def mean(self, function: Function, *args: PyTree, part: str = "train", each: PyTree = None) -> PyTree:
        """See `Fed.mean`. What sees single samples at one point is a flat pass over all of them."""
        flat = self.engine.flat_passes and part in ("train", "valid") and each is None
        if not flat or Term.of(function).reads != "sample":
            return super().mean(function, *args, part=part, each=each)
        samples = self.data.train if part == "train" or self.data.valid is None else self.data.valid
        tile = self.engine.tile(args, samples)
        with counting.collect():
            return self.data.mean(function, *args, shares=self.weights_of(None), part=part, tile=tile)


def with_fetched(client: Client, parts: tuple[str, ...]) -> Client:
    """The client, with arrays of its own in these parts of its samples."""
    train = client.train.fetched() if "train" in parts else client.train
    if client.valid is client.train:
        return replace(client, train=train, valid=train)
    valid = client.valid.fetched() if "valid" in parts else client.valid
    return replace(client, train=train, valid=valid)


@dataclass(frozen=True)
class _Watched(Samples):
    """Samples that tell when all of them are taken at once."""

    tell: Callable[[], None] = lambda: None

    @property
    def data(self) -> PyTree:
        self.tell()
        return super().data


def _rows_of(array: Array, length: int, padding: int) -> Array:
    """The array in rows of a length, the last one padded."""
    return jnp.pad(array, (0, -array.shape[0] % length), constant_values=padding).reshape(-1, length)


def mean_dtype(dtype: Any) -> Any:
    """The dtype of a mean."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _add_weighted(weight: Array, total: Array, uploads: Array) -> Array:
    """``total + Σ weight · uploads``; padding contributes nothing, whatever it computed."""
    # A NaN of padding times weight zero would still be a NaN.
    real = (weight > 0).reshape(-1, *[1] * (uploads.ndim - 1))
    uploads = jnp.where(real, uploads, 0) if uploads.shape[0] > 1 else uploads
    return total + jnp.tensordot(weight.astype(total.dtype), uploads.astype(total.dtype), axes=1)
