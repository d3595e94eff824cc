"""All clients in one compiled program on one device: the default engine.

A verb runs its phase over the clients in blocks. One block with everyone is a `vmap`, blocks of one client
are a `lax.scan`. On a CPU the best is in between: as many clients side by side as keep the cores busy, and no
more than keep their arrays in cache through the local steps. Elsewhere blocks only bound the memory: on a GPU
(H200, ResNet20, 8 clients with batches of 16) a round is 2.7 times as fast side by side as one by one. Rounds
and evaluations are loops of traced length in the same program, so neither their number nor the chunks between
two looks at the host recompile anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.fed import Advanced, Carry, Engine, Exchange, Fed, Lane, Setup, visit
from fedstrata.core.federated import FederatedData, client_of, each_client
from fedstrata.core.method import Method
from fedstrata.core.types import Array, Integer, PyTree
from fedstrata.engines.programs import program
from fedstrata.engines.rounds import before_rounds, finite, measure, one_round

CACHED = 320_000  # numbers of a block's clients on a CPU; measured where each of two cores has 1 MiB of L2
MAP_FROM = 2_000  # numbers in a message from which a CPU evaluates one client after the other
BLOCK_BYTES = 2**30  # what a block's uploads may take when the engine chooses its size


@dataclass(frozen=True)
class Simulated(Engine):
    """One device, one program.

    Args:
        chunk: clients per block: a number, ``None`` for all in one `vmap`, or ``"auto"`` to let the engine
            choose by device and message size. Results do not depend on it beyond rounding.
    """

    chunk: int | str | None = "auto"

    def __post_init__(self) -> None:
        number = isinstance(self.chunk, int) and not isinstance(self.chunk, bool) and self.chunk >= 1
        if not (self.chunk is None or self.chunk == "auto" or number):
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

    def over_clients(self, array: PyTree) -> PyTree:
        """How an array with a leading client axis is laid out inside the program; here, as it is."""
        return array

    def fixed_layout(self, carry: Carry) -> Carry:
        """The layout in which a program takes and returns its carry; here, as it is."""
        return carry

    def multiple(self) -> int:
        """Blocks of clients are padded to a multiple of this."""
        return 1

    def begin(
        self, setup: Setup, method: Method, carry: Carry, seed: int, data: FederatedData
    ) -> tuple[Carry, list[Counter[str]]]:
        """See `Engine.begin`."""
        args = (method, carry, np.uint32(seed), data)
        carry, words = program(trace_begin, self, setup, args)(*args)
        return carry, [counting.settle(words, 1)]

    def advance(
        self,
        setup: Setup,
        method: Method,
        carry: Carry,
        seed: int,
        data: FederatedData,
        first: int,
        rounds: np.ndarray,
        active: np.ndarray | None = None,
    ) -> Advanced:
        """See `Engine.advance`."""
        args = (method, carry, np.uint32(seed), data, *self.slots(first, rounds))
        carry, *happened = program(trace_advance, self, setup, args)(*args)
        return Advanced(carry, [lane_of(rounds, *jax.tree.map(np.asarray, happened))])

    def slots(self, first: int, rounds: np.ndarray) -> tuple[np.int32, np.int32, np.ndarray]:
        """The arguments that say which rounds; of one shape, so that no number of them recompiles."""
        slots = np.zeros(self.evaluations_at_once, np.int32)
        slots[: len(rounds)] = rounds
        return np.int32(first), np.int32(len(rounds)), slots


def lane_of(
    rounds: np.ndarray, history: dict[str, np.ndarray], words: counting.Tally, bad: np.ndarray
) -> Lane:
    """What a program says of one run, on the host."""
    counts = [
        counting.settle(jax.tree.map(lambda w, j=j: w[j], words), int(number))
        for j, number in enumerate(rounds)
    ]
    return Lane({name: values[: len(rounds)] for name, values in history.items()}, counts, int(bad))


def trace_begin(
    engine: Simulated, setup: Setup, method: Method, carry: Carry, seed: Integer, data: FederatedData
) -> tuple[Carry, counting.Tally]:
    """The method's exchanges before the first round, with their counts."""
    make_fed, key = partial(SimulatedFed, engine), jax.random.key(seed)
    carry, tally = counting.counted(before_rounds)(make_fed, setup, method, carry, key, data)
    return engine.fixed_layout(carry), counting.add_words(counting.no_words(tally), tally)


def trace_advance(
    engine: Simulated,
    setup: Setup,
    method: Method,
    carry: Carry,
    seed: Integer,
    data: FederatedData,
    first: Integer,
    evaluations: Integer,
    rounds: Array,
) -> tuple[Carry, dict[str, Array], counting.Tally, Array]:
    """Rounds and evaluations as two nested loops of traced length."""
    make_fed, key, most = partial(SimulatedFed, engine), jax.random.key(seed), engine.evaluations_at_once

    @counting.counted
    def round_once(carry: Carry, r: Integer) -> Carry:
        return one_round(make_fed, setup, method, carry, key, data, r)

    # Loops must know their carry beforehand: abstract passes find which counts and which metrics there are.
    _, tally = jax.eval_shape(round_once, carry, first)
    metrics = jax.eval_shape(lambda c: measure(make_fed, setup, method, c, data), carry)
    history = {name: jnp.zeros((most,), shape.dtype) for name, shape in metrics.items()}
    none = counting.no_words(tally)

    def round_step(_: Integer, inner: Any) -> Any:
        carry, r, words, bad = inner
        carry, tally = round_once(carry, r)
        bad = jnp.where((bad < 0) & ~finite(carry.state), r, bad)
        return engine.fixed_layout(carry), r + 1, counting.add_words(words, tally), bad

    def evaluate(j: Integer, outer: Any) -> Any:
        carry, r, bad, history, words = outer
        carry, r, these, bad = jax.lax.fori_loop(0, rounds[j], round_step, (carry, r, none, bad))
        values = measure(make_fed, setup, method, carry, data)
        history = {name: history[name].at[j].set(value) for name, value in values.items()}
        return carry, r, bad, history, jax.tree.map(lambda w, new: w.at[j].set(new), words, these)

    words = jax.tree.map(lambda w: jnp.zeros((most, *w.shape), w.dtype), none)
    start = (carry, first, jnp.int32(-1), history, words)
    carry, _, bad, history, words = jax.lax.fori_loop(0, evaluations, evaluate, start)
    return engine.fixed_layout(carry), history, words, bad


class SimulatedFed(Fed):
    """The verbs inside one traced program."""

    def __init__(self, engine: Simulated, *args: Any) -> None:
        super().__init__(*args)
        self.engine = engine

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Everyone in one `vmap` where they fit into one block, else block after block."""
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        whole = None if exchange.evaluation else partial(self._whole, exchange)
        block = self.engine.block(number, exchange.message, whole)
        if exchange.of is None and block >= number:
            return self._side_by_side(exchange)
        return self._in_blocks(exchange, block)

    def _whole(self, exchange: Exchange) -> int:
        """How many numbers of its data a client takes at once, found in an abstract pass."""
        if tree.dimension((self.data.train, self.data.valid)) <= CACHED:
            return 0
        rows = self.data.sizes.shape[0]
        taken: dict[str, int] = {}

        def watched(name: str, samples: Samples) -> Samples:
            numbers = tree.dimension(samples.leaves) // rows
            return _Watched(samples.leaves, samples.size, samples.row, lambda: taken.update({name: numbers}))

        def one(index: Integer, memory: PyTree) -> PyTree:
            client = client_of(self.data, self.clients, index, _row(memory, index))
            train = watched("train", client.train)
            valid = train if client.valid is client.train else watched("valid", client.valid)
            return visit(self.setup, exchange, replace(client, train=train, valid=valid))[0].upload

        jax.eval_shape(one, jnp.zeros((), jnp.int32), self.memory)
        return sum(taken.values())

    def _side_by_side(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Everyone in one `vmap`, over the data's own client axis. Rows past ``clients`` are padding."""
        rows = self.data.sizes.shape[0]

        def one(client: Client) -> tuple[PyTree, PyTree, counting.Tally]:
            reply, tally = visit(self.setup, exchange, client)
            return reply.upload, reply.memory, tally

        uploads, memory, tallies = each_client(
            one,
            self.data,
            self.memory,
            clients=self.clients,
            indices=self.engine.over_clients(jnp.arange(rows)),
        )
        if memory is not None:
            self.memory = self.engine.over_clients(memory)
        real = jax.tree.map(lambda factor: factor[: self.clients], tallies)
        counting.book(counting.summed(real), self.clients)
        shape = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), uploads)
        if exchange.stacked:
            return jax.tree.map(lambda u: u[: self.clients], uploads), shape
        if exchange.weights is None and rows == self.clients:
            return jax.tree.map(lambda u: u.mean(0), uploads), shape
        weights = self.weights_of(None) if exchange.weights is None else exchange.weights
        weights = jnp.pad(weights, (0, rows - self.clients))
        return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1), uploads), shape

    def _in_blocks(self, exchange: Exchange, block: int) -> tuple[PyTree, PyTree]:
        """Blocks of clients one after the other, uploads added up on the way; a last block may be padded."""
        of = self.everyone if exchange.of is None else exchange.of
        number, rows = of.shape[0], self.data.sizes.shape[0]
        block = -(-block // self.engine.multiple()) * self.engine.multiple()
        blocks = -(-number // block)
        padding = blocks * block - number
        # Padding has the index `rows`: it computes what the last client does, and its memory is dropped.
        indices = jnp.pad(of, (0, padding), constant_values=rows).reshape(blocks, block)
        weights = jnp.full((number,), 1 / number) if exchange.weights is None else exchange.weights
        weights = jnp.pad(weights, (0, padding)).reshape(blocks, block)

        def one(index: Array, memory: PyTree) -> tuple[PyTree, PyTree, counting.Tally]:
            place = jnp.minimum(index, rows - 1)
            client = client_of(self.data, self.clients, place, _row(memory, place))
            reply, tally = visit(self.setup, exchange, client)
            return reply.upload, reply.memory, jax.tree.map(lambda f: jnp.where(index < rows, f, 0), tally)

        shape, _, counts = jax.eval_shape(one, indices[0, 0], self.memory)

        def step(carry: Any, block_of: tuple[Array, Array]) -> tuple[Any, PyTree]:
            total, memory, tally = carry
            index, weight = block_of
            if block == 1:  # without `vmap`, matrices stay matrices
                uploads, news, counts = one(index[0], memory)
                uploads, news = jax.tree.map(lambda leaf: leaf[None], (uploads, news))
            else:
                index = self.engine.over_clients(index)
                uploads, news, counts = jax.vmap(one, in_axes=(0, None))(index, memory)
                counts = counting.summed(counts)
            if news is not None:
                memory = jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), memory, news)
            tally = jax.tree.map(jnp.add, tally, counts)
            if exchange.stacked:
                return (total, memory, tally), uploads
            return (jax.tree.map(partial(_add_weighted, weight), total, uploads), memory, tally), None

        zero = None
        if not exchange.stacked:
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, _mean_dtype(s.dtype)), shape)
        start = (zero, self.memory, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), counts))
        if blocks == 1:
            (total, self.memory, tally), replies = step(start, (indices[0], weights[0]))
        else:
            (total, self.memory, tally), replies = jax.lax.scan(step, start, (indices, weights))
            replies = jax.tree.map(lambda u: u.reshape(-1, *u.shape[2:]), replies)
        counting.book(tally, number)
        return (jax.tree.map(lambda u: u[:number], replies) if exchange.stacked else total), shape


@dataclass(frozen=True)
class _Watched(Samples):
    """Samples that tell when all of them are taken at once."""

    tell: Callable[[], None] = lambda: None

    @property
    def data(self) -> PyTree:
        """See `Samples.data`."""
        self.tell()
        return super().data


def _row(stacked: PyTree, index: Integer) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _mean_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _add_weighted(weight: Array, total: Array, uploads: Array) -> Array:
    """``total + Σ weight · uploads``; padding contributes nothing, whatever it computed."""
    real = (weight > 0).reshape(-1, *[1] * (uploads.ndim - 1))
    uploads = jnp.where(real, uploads, 0) if uploads.shape[0] > 1 else uploads
    return total + jnp.tensordot(weight.astype(total.dtype), uploads.astype(total.dtype), axes=1)
