"""All clients in one compiled program on one device: the default engine.

A verb runs its phase over the clients in blocks. One block with everyone is a `vmap`, blocks of one client
are a `lax.scan`. On a CPU the best is in between: as many clients side by side as keep the cores busy, and no
more than keep their arrays in cache through the local steps. Elsewhere blocks only bound the memory: on a GPU
(H200, ResNet20, 8 clients with batches of 16) a round is 2.7 times as fast side by side as one by one. Rounds
and evaluations are loops of traced length in the same program, so neither their number nor the chunks between
two looks at the host recompile anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import Method, finite
from fedstrata.core.types import Array, Integer, Phase, PyTree
from fedstrata.engines.base import (
    Advanced,
    Carry,
    FedBase,
    Setup,
    before_rounds,
    client_of,
    measure,
    one_round,
    settle,
    visit,
)

EVALUATIONS = 64  # most evaluations in one call of the compiled program
CACHED = 320_000  # numbers of a block's clients on a CPU; measured where each of two cores has 1 MiB of L2
MAP_FROM = 2_000  # numbers in a message from which a CPU evaluates one client after the other
BLOCK_BYTES = 2**30  # what a block's uploads may take when the engine chooses its size


@dataclass(frozen=True)
class Simulated:
    """One device, one program.

    Args:
        chunk: clients per block: a number, ``None`` for all in one `vmap`, or ``"auto"`` to let the engine
            choose by device and message size. Results do not depend on it beyond rounding.
    """

    chunk: int | str | None = "auto"

    def __post_init__(self) -> None:
        good = self.chunk is None or self.chunk == "auto" or (isinstance(self.chunk, int) and self.chunk >= 1)
        if not good:
            raise ValueError(f"chunk must be a number ≥ 1, None or 'auto', but is {self.chunk!r}.")

    def block(self, number: int, message: PyTree, whole: Callable[[], int] | None) -> int:
        """How many clients run side by side.

        Args:
            number: of all the clients that take part.
            message: what each of them gets.
            whole: gives how many numbers of its data a client goes through at every step, none where it draws
                minibatches; None for an evaluation, which goes through the data once.
        """
        if isinstance(self.chunk, int):
            return min(self.chunk, number)
        if self.chunk is None:
            return number
        size = max(tree.dimension(message), 1)
        if jax.default_backend() != "cpu":
            most = BLOCK_BYTES // (16 * size)
        elif whole is None:
            most = number if size < MAP_FROM else 1
        else:
            most = CACHED // (size + whole())
        blocks = -(-number // max(most, 1))
        return -(-number // blocks)

    def place(self, data: FederatedData) -> FederatedData:
        """The arrays on the device."""
        return jax.tree.map(jnp.asarray, data)

    def lay(self, array: PyTree) -> PyTree:
        """How an array with a leading client axis is laid out; here, as it is."""
        return array

    def multiple(self) -> int:
        """Blocks of clients are padded to a multiple of this."""
        return 1

    def pin(self, carry: Carry) -> Carry:
        """The layout in which a program takes and returns its carry; here, as it is."""
        return carry

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
        args = (method, carry, np.uint32(seed), data)
        run = compiled(trace_begin, self, setup, args)
        carry, factors = run.call(*args)
        return carry, settle(run.tally, 1, np.asarray(factors).reshape(-1, 2))

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
        """See `Engine.advance`; at most `EVALUATIONS` of them."""
        slots = np.zeros(EVALUATIONS, np.int32)
        slots[: len(rounds)] = rounds
        args = (method, carry, np.uint32(seed), data, np.int32(first), np.int32(len(rounds)), slots)
        run = compiled(trace_advance, self, setup, args)
        carry, history, factors, bad = run.call(*args)
        factors = np.asarray(factors)
        counts = [settle(run.tally, int(rounds[j]), factors[j]) for j in range(len(rounds))]
        history = {name: np.asarray(values)[: len(rounds)] for name, values in history.items()}
        return Advanced(carry, history, counts, int(bad))


class SimulatedFed(FedBase):
    """The verbs inside one traced program."""

    def __init__(self, engine: Simulated, *args: Any) -> None:
        super().__init__(*args)
        self.engine = engine
        self._evaluating = False

    def mean(self, *args: Any, **options: Any) -> PyTree:
        """See `FedBase.mean`."""
        self._evaluating = True
        try:
            return super().mean(*args, **options)
        finally:
            self._evaluating = False

    def _run(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        message: tuple[PyTree, ...],
        chosen: jax.Array | None,
        weights: jax.Array | None,
        stacked: bool,
    ) -> tuple[PyTree, PyTree]:
        number = self.clients if chosen is None else chosen.shape[0]
        whole = None if self._evaluating else partial(self._whole, phase, key, message)
        block = self.engine.block(number, message, whole)
        if chosen is None and block >= number:
            return self._side_by_side(phase, key, message, weights, stacked)
        return self._in_blocks(phase, key, message, chosen, weights, stacked, block)

    def _whole(self, phase: Callable[..., Any], key: jax.Array, message: tuple[PyTree, ...]) -> int:
        """How many numbers of its data a client takes at once, found in an abstract pass."""
        if tree.dimension((self.data.train, self.data.valid)) <= CACHED:
            return 0
        rows = self.data.sizes.shape[0]
        taken: dict[str, int] = {}

        def watched(name: str, samples: Samples) -> Samples:
            numbers = tree.dimension(samples.leaves) // rows
            return _Watched(samples.leaves, samples.size, samples.row, lambda: taken.update({name: numbers}))

        def one(index: Integer, memory: PyTree) -> Any:
            mine = jax.tree.map(lambda leaf: leaf[index], memory)
            client = client_of(self.setup, self.data, index, mine)
            train = watched("train", client.train)
            valid = train if client.valid is client.train else watched("valid", client.valid)
            return visit(self.setup, phase, key, message, replace(client, train=train, valid=valid))[0].upload

        jax.eval_shape(one, jnp.zeros((), jnp.int32), self.memory)
        return sum(taken.values())

    def _side_by_side(
        self, phase: Phase, key: jax.Array, message: PyTree, weights: Any, stacked: bool
    ) -> tuple[PyTree, PyTree]:
        """Everyone in one `vmap`, over the data's own client axis. Rows past ``clients`` are padding."""
        data, rows = self.data, self.data.sizes.shape[0]
        total = data.sizes[: self.clients].sum()
        seen: list[counting.Tally] = []

        def one(
            index: Integer, size: Integer, train: Any, valid: Any, valid_size: Any, memory: PyTree
        ) -> Any:
            train_samples = Samples(train, data.equal or size)
            valid_samples = train_samples
            if valid is not None:
                valid_samples = Samples(valid, data.valid_equal or valid_size)
            client = Client(index, train_samples, valid_samples, memory, size / total)
            reply, counted = visit(self.setup, phase, key, message, client)
            seen[:] = [counted]
            return reply.upload, reply.memory, counted.factors

        uploads, memory, factors = jax.vmap(one)(
            self.engine.lay(jnp.arange(rows)),
            data.sizes,
            data.train,
            data.valid,
            data.valid_sizes,
            self.memory,
        )
        if memory is not None:
            self.memory = self.engine.lay(memory)
        counting.merge(seen[0], self.clients, [f[: self.clients].sum() for f in factors])
        shape = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), uploads)
        if stacked:
            return jax.tree.map(lambda u: u[: self.clients], uploads), shape
        if weights is None:
            if rows == self.clients:
                return jax.tree.map(lambda u: u.mean(0), uploads), shape
            weights = jnp.full((self.clients,), 1 / self.clients)
        weights = jnp.pad(weights, (0, rows - self.clients))
        return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1), uploads), shape

    def _in_blocks(
        self,
        phase: Phase,
        key: jax.Array,
        message: PyTree,
        chosen: Any,
        weights: Any,
        stacked: bool,
        block: int,
    ) -> tuple[PyTree, PyTree]:
        """Blocks of clients one after the other, uploads added up on the way; a last block may be padded."""
        chosen = self.everyone if chosen is None else chosen
        number = chosen.shape[0]
        block = -(-block // self.engine.multiple()) * self.engine.multiple()
        blocks = -(-number // block)
        padding = blocks * block - number
        rows = self.data.sizes.shape[0]
        indices = jnp.pad(chosen, (0, padding), constant_values=rows).reshape(blocks, block)
        weights = jnp.full((number,), 1 / number) if weights is None else weights
        weights = jnp.pad(weights, (0, padding)).reshape(blocks, block)
        seen: list[counting.Tally] = []
        remembers: list[bool] = []

        def one(index: Integer, memory: PyTree) -> Any:
            place = jnp.minimum(index, rows - 1)
            mine = jax.tree.map(lambda leaf: leaf[place], memory)
            reply, counted = visit(
                self.setup, phase, key, message, client_of(self.setup, self.data, place, mine)
            )
            seen[:], remembers[:] = [counted], [reply.memory is not None]
            real = index < rows
            return reply.upload, reply.memory, [jnp.where(real, f, 0) for f in counted.factors]

        shape, _, factor_shapes = jax.eval_shape(one, indices[0, 0], self.memory)
        keeps = remembers[0]

        def step(carry: Any, block_of: Any) -> Any:
            total, memory, factors = carry
            index, weight = block_of
            if block == 1:
                uploads, news, counts = one(index[0], memory)
                uploads, news = jax.tree.map(lambda leaf: leaf[None], (uploads, news))
            else:
                index = self.engine.lay(index)
                uploads, news, counts = jax.vmap(one, in_axes=(0, None))(index, memory)
                counts = [c.sum(dtype=c.dtype) for c in counts]
            if keeps:
                memory = jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), memory, news)
            factors = [a + b for a, b in zip(factors, counts, strict=True)]
            if stacked:
                return (total, memory, factors), uploads
            total = jax.tree.map(partial(_add_weighted, weight), total, uploads)
            return (total, memory, factors), None

        zero = None if stacked else jax.tree.map(lambda s: jnp.zeros(s.shape, _mean_dtype(s.dtype)), shape)
        start = (zero, self.memory, [jnp.zeros((), jnp.int32) for _ in factor_shapes])
        if blocks == 1:
            (total, self.memory, factors), replies = step(start, (indices[0], weights[0]))
        else:
            (total, self.memory, factors), replies = jax.lax.scan(step, start, (indices, weights))
            replies = jax.tree.map(lambda u: u.reshape(-1, *u.shape[2:]), replies)
        counting.merge(seen[0], number, factors)
        return (jax.tree.map(lambda u: u[:number], replies) if stacked else total), shape


@dataclass(frozen=True)
class _Watched(Samples):
    """Samples that tell when all of them are taken at once."""

    tell: Callable[[], None] = lambda: None

    @property
    def data(self) -> PyTree:
        """See `Samples.data`."""
        self.tell()
        return super().data


def _mean_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _add_weighted(weight: jax.Array, total: jax.Array, uploads: jax.Array) -> jax.Array:
    """``total + Σ weight · uploads``; padding contributes nothing, whatever it computed."""
    real = (weight > 0).reshape(-1, *[1] * (uploads.ndim - 1))
    uploads = jnp.where(real, uploads, 0) if uploads.shape[0] > 1 else uploads
    return total + jnp.tensordot(weight.astype(total.dtype), uploads.astype(total.dtype), axes=1)


def _add_words(words: jax.Array, factor: Array) -> jax.Array:
    """Add to a 64-bit count held as two 32-bit words, so that totals stay exact without 64-bit mode."""
    low = words[1] + factor.astype(jnp.uint32)
    return jnp.stack([words[0] + (low < words[1]), low])


def trace_begin(
    engine: Simulated, setup: Setup, method: Any, carry: Carry, seed: Any, data: FederatedData
) -> Any:
    """The method's exchanges before the first round, with their counts."""
    with counting.collect() as counted:
        carry = before_rounds(partial(SimulatedFed, engine), setup, method, carry, jax.random.key(seed), data)
    words = [_add_words(jnp.zeros(2, jnp.uint32), f) for f in counted.factors]
    return (engine.pin(carry), jnp.array(words, jnp.uint32)), counted


def trace_advance(
    engine: Simulated,
    setup: Setup,
    method: Any,
    carry: Carry,
    seed: Any,
    data: FederatedData,
    first: Any,
    evaluations: Any,
    rounds: Any,
) -> Any:
    """Rounds and evaluations as two nested loops of traced length."""
    fed, key = partial(SimulatedFed, engine), jax.random.key(seed)
    seen: list[counting.Tally] = []

    def round_once(carry: Carry, r: Integer) -> tuple[Carry, list[Any]]:
        with counting.collect() as counted:
            carry = one_round(fed, setup, method, carry, key, data, r)
        seen[:] = [counted]
        return carry, counted.factors

    _, factor_shapes = jax.eval_shape(round_once, carry, first)
    metric_shapes = jax.eval_shape(lambda c: measure(fed, setup, method, c, data), carry)
    history = {name: jnp.zeros((EVALUATIONS,), s.dtype) for name, s in metric_shapes.items()}
    no_words = jnp.zeros((len(factor_shapes), 2), jnp.uint32)

    def round_step(_: Any, inner: Any) -> Any:
        carry, r, words, bad = inner
        carry, factors = round_once(carry, r)
        if factors:
            words = jnp.stack([_add_words(w, f) for w, f in zip(words, factors, strict=True)])
        bad = jnp.where((bad < 0) & ~finite(carry.state), r, bad)
        return engine.pin(carry), r + 1, words, bad

    def evaluate(j: Any, outer: Any) -> Any:
        carry, r, bad, history, words = outer
        carry, r, these, bad = jax.lax.fori_loop(0, rounds[j], round_step, (carry, r, no_words, bad))
        values = measure(fed, setup, method, carry, data)
        history = {name: history[name].at[j].set(value) for name, value in values.items()}
        return carry, r, bad, history, words.at[j].set(these)

    words = jnp.zeros((EVALUATIONS, *no_words.shape), jnp.uint32)
    start = (carry, first, jnp.int32(-1), history, words)
    carry, _, bad, history, words = jax.lax.fori_loop(0, evaluations, evaluate, start)
    return (engine.pin(carry), history, words, bad), seen[0]


@dataclass
class Compiled:
    """An executable with what was counted while it was traced."""

    call: Callable[..., Any]
    tally: counting.Tally


_programs: OrderedDict[Any, Compiled] = OrderedDict()
PROGRAMS = 128  # executables kept for the next solve of the same shapes


def compiled(function: Callable[..., Any], engine: Any, setup: Setup, args: tuple[Any, ...]) -> Compiled:
    """The executable of ``function(engine, setup, *args)``, from the cache or made now."""
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    key = (function, engine, _hashable(setup), _hashable(structure), shapes, jnp.result_type(float))
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key]
    seen: list[counting.Tally] = []

    def traced(*args: Any) -> Any:
        outputs, counted = function(engine, setup, *args)
        seen[:] = [counted]
        return outputs

    program = Compiled(jax.jit(traced).lower(*args).compile(), counting.Tally())
    # factors are tracers of a finished trace: only their number matters from here on
    program.tally = counting.Tally(seen[0].fixed, [(counts, None) for counts, _ in seen[0].scaled])
    _programs[key] = program
    while len(_programs) > PROGRAMS:
        _programs.popitem(last=False)
    return program


@dataclass(frozen=True, eq=False)
class _Identity:
    """Stands for an object that cannot be hashed (a set with arrays), and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Any:
    if isinstance(value, Setup):
        return _hashable(value.problem), replace(value, problem=None)  # type: ignore[arg-type]
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value
