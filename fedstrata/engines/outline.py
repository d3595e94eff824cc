"""Which exchanges a method's text has: an abstract pass, in which nothing is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.examples import Examples, private, releases
from fedstrata.channels.sent import PASSED_BY, Sent
from fedstrata.core import counting, tree
from fedstrata.core.fed import Exchange, Setup, visit
from fedstrata.core.method import Method
from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed, SizeGroup, common_size
from fedstrata.engines.engine import Carry
from fedstrata.engines.identity import shapes_of
from fedstrata.engines.programs import objects
from fedstrata.engines.remote import Positioned
from fedstrata.engines.rounds import run_text
from fedstrata.engines.simulated import mean_dtype
from fedstrata.support.tracing import compiling

MOST = "most "  # before a level's name: how many exchanges of it there are at most


class OutlineFed(Positioned):
    """Verbs that record the exchanges."""

    data: Placed

    def __init__(self, program: str, found: list[Sent], examples: Mapping[str, Examples], *args: Any) -> None:
        super().__init__(*args)
        self.program, self.found, self.examples = program, found, examples
        self.most: int | None = None

    @contextmanager
    def level(self, name: str, most: int | None = None) -> Iterator[None]:
        if most is not None:
            counting.count(MOST + name, most)
        outer, self.most = self.most, most
        with super().level(name):
            yield
        self.most = outer

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Made-up replies of the right form."""
        k, name = (PASSED_BY, "fed.mean") if exchange.evaluation else (self.next_position(), exchange.name)
        if (own := self.examples.get(f"{self.program} {k}")) is not None:
            exchange = exchange._replace(phase=private(exchange.phase, own, jax.random.key(0)))

        def one(samples: int, memory: PyTree) -> PyTree:
            group = SizeGroup(1, samples, samples)
            client = self.data.client(0, tree.row(memory, 0), group)
            reply, tally = visit(self.setup, exchange, client)
            return reply.upload, tally

        # An upload whose shape follows the number of samples differs between one sample and two.
        (upload, tally), (other, _) = (jax.eval_shape(partial(one, n), self.memory) for n in (1, 2))
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        asked = "everyone" if exchange.of is None else "some"
        if exchange.of is not None and exchange.of is self._chosen:
            asked = "cohort"
        sent = Sent(
            self.program, k, self._level, name,
            tuple((u.shape, u.dtype) for u in jax.tree.leaves(upload)), exchange.stacked,
            exchange.around is not None, asked, None, str(upload) != str(other),
            tuple((jnp.shape(u), jnp.result_type(u)) for u in jax.tree.leaves(exchange.message)),
            releases(tally)[0], self.most,
        )  # fmt: skip
        # A loop's body is traced more than once: its exchanges are counted there, and written down once.
        if all(one.place != sent.place for one in self.found):
            self.found.append(sent)
        counting.count(sent.place, 1)

        def reply(u: Any) -> Array:
            if exchange.stacked:
                return jnp.zeros((number, *u.shape), u.dtype)
            return jnp.zeros(u.shape, mean_dtype(u.dtype))

        return jax.tree.map(reply, upload), upload

    def book(self, exchange: Exchange, upload: PyTree) -> None:
        """Nothing travels."""


_known: OrderedDict[Any, list[Sent]] = OrderedDict()
MOST_KNOWN = 64


def outline(
    setup: Setup,
    method: Method,
    data: FederatedData,
    carry: Carry,
    examples: Mapping[str, Examples] | None = None,
) -> list[Sent]:
    """The exchanges before the first round and of a round; where samples are private, the means of them.

    They are kept, as a trace is most of a small call.

    Raises:
        TypeError: where a phase takes something else of samples that are private.
    """
    # Of the data only forms count: a call with other samples of these shapes traces nothing again.
    samples = [data.sample_of(part) for part in ("train", "valid", "server")]
    leaves, structure = jax.tree.flatten((method, carry, samples, data.server))
    forms = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    its = tuple(sorted((examples or {}).items()))
    name = objects(replace(setup, metrics=())), structure, forms, data.clients, common_size(data.sizes), its
    if name not in _known:
        _known[name] = _traced(setup, method, data, carry, examples)
        while len(_known) > MOST_KNOWN:
            _known.popitem(last=False)
    return _known[name]


def _traced(
    setup: Setup, method: Method, data: FederatedData, carry: Carry, examples: Mapping[str, Examples] | None
) -> list[Sent]:
    args = (method, carry, jax.random.key(0), shapes_of(data), jnp.int32(0))
    programs = ("start", "round") if method.starts() else ("round",)
    return [one for program in programs for one in _of_program(program, examples or {}, setup, args)]


def _of_program(
    program: str, examples: Mapping[str, Examples], setup: Setup, args: tuple[Any, ...]
) -> list[Sent]:
    exchanges: list[Sent] = []
    tallies: list[counting.Tally] = []

    def text(*args: Any) -> Any:
        make = partial(OutlineFed, program, exchanges, examples)
        out, tally = counting.counted(partial(run_text, program, make, setup))(*args)
        tallies.append(tally)
        return out

    with compiling():
        jax.eval_shape(text, *args)
    tally = tallies[-1]
    # What a traced number multiplies (a client's own number of steps) is not known before the run.
    unknown = {name for counts, _ in tally.scaled for name in counts}
    unknown |= {one.place for one in exchanges if one.number == PASSED_BY}
    together = {one.level: tally.fixed[MOST + one.level] for one in exchanges}
    return [
        one._replace(
            times=None if one.place in unknown else tally.fixed[one.place],
            most=None if one.most is None or MOST + one.level in unknown else together[one.level],
        )
        for one in exchanges
    ]
