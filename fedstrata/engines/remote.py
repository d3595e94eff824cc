"""Clients that are elsewhere: an exchange leaves the compiled program by an ordered callback, and comes back.

The text is compiled as in the other engines, and runs where the server is. `RemoteFed` is its federation: it
asks the host for the mean of the uploads, or their stack, and the host asks whoever has the samples. In the
streamed engine that is a source, read block after block (`fedstrata.engines.streamed_programs`); in the
network engine these are sites (`fedstrata.engines.network`).

Exchanges of a text are numbered as they are met, and the body of a loop has the same numbers at every turn.
So "exchange 2 of the round" means the same to everyone who holds the text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fedstrata.core import counting
from fedstrata.core.fed import Exchange, Fed, Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, Integer, PyTree
from fedstrata.engines.engine import Carry
from fedstrata.engines.rounds import finite, run_text
from fedstrata.engines.simulated import mean_dtype


class Call(NamedTuple):
    """The part of an exchange that is known when its program is traced.

    Attributes:
        program, k, phase: the exchange in the text: its program, number, and the phase's name.
        stacked, evaluation: as of `Exchange`.
        uploads: the shapes that the program gets.
        factors: how many numbers are counted.
        run: the host's program for a block of clients, if it has their samples.
        place: as of `Exchange`.
    """

    program: str
    k: int
    phase: str
    stacked: bool
    evaluation: bool
    uploads: tuple[jax.ShapeDtypeStruct, ...]
    factors: int = 0
    run: Callable[..., list[Any]] | None = None
    place: str = ""


class Prepared(NamedTuple):
    """The values that leave the program with an exchange.

    Attributes:
        upload: the shape of one upload.
        values: values besides the message.
        run: as of `Call`.
        tally: a client's counts, with factors that the host returns; empty if the host counts itself.
    """

    upload: PyTree
    values: tuple[PyTree, ...] = ()
    run: Callable[..., list[Any]] | None = None
    tally: counting.Tally = counting.Tally()


class Prepares(Protocol):
    """Traces an exchange without samples, from their shapes."""

    @property
    def encodes(self) -> bool:
        """See `Fed`."""

    def prepare(self, fed: RemoteFed, exchange: Exchange) -> Prepared:
        """The values that leave the program with the exchange."""


class Answers(Protocol):
    """Carries out the exchanges of a run on the host.

    Attributes:
        failure: the error of a callback, raised when the program has ended.
    """

    failure: BaseException | None

    def answer(
        self, call: Call, of: Any, weights: Any, key: np.ndarray, message: list[np.ndarray], *values: Any
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The mean of the uploads, or their stack, and the counts; ``of=None`` is everyone."""


# Python cannot see the callback that a program holds: a reference to its object would never be freed.
_answering: WeakValueDictionary[int, Answers] = WeakValueDictionary()
_handles = itertools.count()


def handle_of(answers: Answers) -> np.int32:
    """A number by which a program finds the object that answers; another run has another number."""
    handle = next(_handles)
    _answering[handle] = answers
    return np.int32(handle)


def _called(call: Call, handle: Any, *arguments: Any) -> tuple[list[np.ndarray], np.ndarray]:
    answers = _answering[int(handle)]
    # An exception would abort the program inside XLA: it is stored, zeros are returned, and the program ends.
    if answers.failure is None:
        try:
            return answers.answer(call, *jax.tree.map(np.asarray, arguments))
        except BaseException as error:
            answers.failure = error
    return [np.zeros(u.shape, u.dtype) for u in call.uploads], np.zeros(call.factors, np.int32)


class Positioned(Fed):
    """Verbs that number the exchanges of a text."""

    position = 0
    remote = True

    def next_position(self) -> int:
        """This exchange's number."""
        self.position += 1
        return self.position - 1

    def turns(
        self, times: Integer, body: counting.Body, carry: PyTree, until: counting.Until | None
    ) -> PyTree:
        """See `Fed.repeat`; the clients' memory stays where they are."""
        first = self.position

        def positioned(t: Any, carry: PyTree) -> PyTree:
            self.position = first  # a body may be traced more than once, and keeps its numbers
            return body(t, carry)

        return counting.repeat(times, positioned, carry, until)


class RemoteFed(Positioned):
    """The verbs where clients are elsewhere: every exchange leaves the program."""

    def __init__(self, clients: Prepares, program: str, handle: Any, *args: Any) -> None:
        super().__init__(*args)
        self.prepares, self.program, self.handle = clients, program, handle
        self.encodes = clients.encodes

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """See `Fed.exchange`: out of the program, to the host, and back."""
        k, number = self.next_position(), self.clients if exchange.of is None else exchange.of.shape[0]
        upload, values, run, tally = self.prepares.prepare(self, exchange)
        # A callback's results have fixed shapes: a stack has a row for each client, a mean has none.
        lead = (number,) if exchange.stacked else ()
        leaves, structure = jax.tree.flatten(upload)
        uploads = [
            jax.ShapeDtypeStruct((*lead, *u.shape), u.dtype if exchange.stacked else mean_dtype(u.dtype))
            for u in leaves
        ]
        call = Call(
            self.program, k, exchange.name, exchange.stacked, exchange.evaluation, tuple(uploads),
            len(tally.scaled), run, exchange.place,
        )  # fmt: skip
        # Ordered: exchanges of a round happen one after the other, at the server as at the sites.
        replies, factors = io_callback(
            partial(_called, call), (uploads, jax.ShapeDtypeStruct((call.factors,), jnp.int32)), self.handle,
            exchange.of, exchange.weights, jax.random.key_data(exchange.key),
            jax.tree.leaves(exchange.message), *values, ordered=True,
        )  # fmt: skip
        # How often a client's counts apply (its size, its steps) is known where the samples are.
        scaled = [(counts, factors[j]) for j, (counts, _) in enumerate(tally.scaled)]
        counting.book(counting.Tally(Counter(tally.fixed), scaled), number)
        return jax.tree.unflatten(structure, replies), upload


def remote_text(
    clients: Prepares,
    program: str,
    setup: Setup,
    method: Method,
    carry: Carry,
    seed: Integer,
    data: Any,
    handle: Any,
    r: Integer,
    cohort: Array | None = None,
) -> Any:
    """A program of the text, whose exchanges are carried out elsewhere.

    Returns:
        ``((state or metrics, whether they are finite), what was counted)``.
    """

    @counting.counted
    def text() -> tuple[PyTree, Array]:
        make_fed: Any = partial(RemoteFed, clients, program, handle)
        after = run_text(program, make_fed, setup, method, carry, jax.random.key(seed), data, r, cohort)
        # Memories are where the clients are, so that only the state comes back.
        after = after if program == "measure" else after.state
        return after, finite(after)

    return text()
