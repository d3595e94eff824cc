"""A site: its clients' samples, their memory, and the phases of its own copy of the text.

For exchange k of a program, a site replays its text on made-up values up to there, and runs the phase that it
finds on its own samples. Its own text determines the phase, the shapes of the message, and whether replies
are averaged. So a server cannot request anything that is not in the site's text.
"""

from __future__ import annotations

import hmac
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.link import with_own_words
from fedstrata.core import counting, tree
from fedstrata.core.fed import Exchange, Setup, visit
from fedstrata.core.types import Array, Integer, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Outline, Placed
from fedstrata.engines.engine import Carry
from fedstrata.engines.network import wire
from fedstrata.engines.network.allowance import Allowance, costs_of
from fedstrata.engines.network.masks import Fixed, Masker, SumRequest
from fedstrata.engines.network.rules import Rules
from fedstrata.engines.network.states import SiteRefused, States, first_of
from fedstrata.engines.network.text import PROGRAMS, START_ROUND, Text, made_up, reads
from fedstrata.engines.network.wire import Arrays, Header
from fedstrata.engines.programs import lowered_by
from fedstrata.engines.remote import Positioned
from fedstrata.engines.rounds import run_text
from fedstrata.engines.simulated import mean_dtype
from fedstrata.support.frozen import lending
from fedstrata.support.tracing import is_traced

STACKED = "stacked"  # a reply's entry if it has a row for each client
EVERYTHING = Rules()


class Reached(Exception):
    """The replay has reached the requested exchange."""

    def __init__(self, exchange: Exchange, memory: PyTree, channel: Any) -> None:
        super().__init__()
        self.exchange, self.memory, self.channel = exchange, memory, channel


class SiteFed(Positioned):
    """The verbs of a replay: made-up replies up to the requested exchange.

    ``memory`` has a leading axis of the site's own clients.
    """

    encodes = True

    def __init__(self, wanted: int, fake: Array, data: Placed, *args: Any) -> None:
        super().__init__(*args)
        self.wanted, self.fake, self.own = wanted, fake, data

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Made-up replies, or the end of the replay."""
        if self.next_position() == self.wanted:
            raise Reached(exchange, self.memory, self.channel)

        def one(memory: PyTree) -> PyTree:
            client = self.own.client(0, tree.row(memory, 0))
            return visit(self.setup, exchange, client)[0].upload

        shape = jax.eval_shape(one, self.memory)
        number = self.clients if exchange.of is None else exchange.of.shape[0]

        def reply(upload: Any) -> Array:
            if exchange.stacked:
                return made_up(jax.ShapeDtypeStruct((number, *upload.shape), upload.dtype), self.fake)
            return made_up(jax.ShapeDtypeStruct(upload.shape, mean_dtype(upload.dtype)), self.fake)

        return jax.tree.map(reply, shape), shape

    def turns(
        self, times: Integer, body: counting.Body, carry: PyTree, until: counting.Until | None
    ) -> PyTree:
        """One turn: every turn has the same exchanges."""
        if not is_traced(times) and int(times) <= 0:
            return carry  # known to have no turn, at the server too
        return body(self.fake.astype(jnp.int32), carry)


class Wanted(NamedTuple):
    """An exchange of the text: its program, its position, its phase's name, and the round's clients."""

    program: str
    k: int
    phase: str
    participants: int


class _Compiled(NamedTuple):
    run: Any
    stacked: bool
    evaluation: bool
    everyone: bool
    place: str
    floating: bool
    releases: Any


@dataclass
class Place:
    """A site's place in a run.

    Attributes:
        clients: the numbers of its clients in the federation.
        total: the number of samples of all clients together.
    """

    clients: np.ndarray
    total: int


class Site:
    """One organisation in one run.

    A request's header has ``what`` it is about (program, position, phase, participants), its ``round`` and
    ``states`` (the one that it builds on, and those that the server may return to); its arrays are clients,
    weights, key and message.

    Args:
        text: its own copy of the text.
        data: its clients' samples.
        place: the numbers of its clients, and the samples of all.
        folder: the folder of the states; None keeps them in this process only.
        programs: compiled phases, shared by sites of one process that hold the same text.
        secret: a secret of this run, from which noise is drawn besides the message: the server cannot draw it
            too, and the same message has the same noise; None draws the simulated engine's noise.
        masker: its part in secure sums, if the text uses them.
        allowance: the privacy budget of its samples; None: unlimited.
        rules: further limits.
    """

    def __init__(
        self,
        text: Text,
        data: FederatedData,
        place: Place,
        folder: Path | None = None,
        programs: dict[Any, Any] | None = None,
        secret: bytes | None = None,
        masker: Masker | None = None,
        allowance: Allowance | None = None,
        rules: Rules = EVERYTHING,
    ) -> None:
        self.secret, self.masker, self.allowance, self.rules = secret, masker, allowance, rules
        self.sizes = {
            "train": data.sizes,
            **({} if data.valid_sizes is None else {"valid": data.valid_sizes}),
        }
        self.text, self.place = text, place
        self.setup = replace(text.setup, metrics=_exchanged(text))
        self.data = data.placed()
        self.locate = {int(index): j for j, index in enumerate(place.clients)}
        self.states = States(
            first_of(text.memory, len(place.clients)), folder, "" if folder is None else data.fingerprint
        )
        self.fingerprint = "" if secret is None else data.fingerprint
        self.last: tuple[int, tuple[Header, Arrays]] | None = None
        self.showed = ""  # the content of the last answer, for the account
        self._programs: dict[Any, _Compiled] = {} if programs is None else programs
        words = jax.random.key_data(jax.random.key(0))
        self._key = words.shape, words.dtype
        leaves, structure = jax.tree.flatten(self.data)
        self._form = structure, tuple(jax.typeof(leaf) for leaf in leaves)

    def call(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Answer one request.

        Raises:
            SiteRefused: if it does not fit this site's text.
            wire.WireError: if it is not a request.
        """
        number = wire.value(header, "seq", int)
        if self.last is not None and number <= self.last[0]:
            if number == self.last[0]:
                return self.last[1]  # the same message: the same answer, and nothing changes twice
            raise SiteRefused("An old message.")
        wanted = Wanted(*wire.values(header, "what", (str, int, str, int)))
        if wanted.program not in PROGRAMS:
            raise SiteRefused(f"Unknown program {wanted.program!r}.")
        if not 1 <= wanted.participants <= self.setup.clients:
            raise SiteRefused("The round has no clients, or more than the federation.")
        if self.setup.secure and wanted.participants != self.setup.participants:
            raise SiteRefused("The round has another number of clients than the text: its sum may show more.")
        r, states = wire.value(header, "round", int), wire.numbers(header, "states")
        if not START_ROUND <= r < (2**31 if self.text.rounds is None else self.text.rounds + 1):
            raise SiteRefused(f"This site's text has {self.text.rounds} rounds, and no round {r}.")
        if len(arrays) < 3:
            raise SiteRefused("The request lacks clients, weights or the key.")
        clients, weights, key, *leaves = arrays
        asked = self._asked(header, number, [*wanted, r], key, leaves)
        leaves = leaves if asked is None else leaves[1:]
        places = self._places(clients, weights)
        before = self.states.at(states[0])  # no state is deleted yet: the phase may still fail
        own = self._own_words([*wanted, r], arrays, before)
        r = max(r, 0)
        compiled, arguments = self._prepare(wanted, r, clients, places, weights, key, leaves, before, own)
        if asked is not None:
            self._admit(asked, compiled, weights)
        self._spend(compiled)
        uploads, memory, tally = compiled.run(*arguments)
        uploads = [np.asarray(u) for u in uploads]
        if compiled.stacked:
            uploads = [u[: len(clients)] for u in uploads]
        self.states.go_to(states)
        if memory is not None:
            self.states.leave(number, jax.tree.map(np.asarray, memory), r)
        counts = Counter({name: amount * len(clients) for name, amount in tally.fixed.items()})
        counts.update(counting.Tally(scaled=tally.scaled).total())
        counts = Counter() if compiled.evaluation else counts
        self.showed = "each client's own" if compiled.stacked else "the site's mean"
        reply = {"seq": number, "counts": dict(counts), "state": self.states.number}
        reply |= {STACKED: True} if compiled.stacked else {}  # for relays, which hold no text
        if asked is not None:
            uploads, reply["counts"] = self._masked(asked, compiled.place, uploads, counts), {}
            self.showed = "masked"
        self.last = number, (reply, uploads)
        return self.last[1]

    def _asked(
        self, header: Header, number: int, about: list[Any], key: np.ndarray, leaves: Arrays
    ) -> SumRequest | None:
        """The secure sum that a message describes; None if the text uses none."""
        if not self.setup.secure:
            return None
        if self.masker is None:
            raise SiteRefused("The text asks for secure sums, and the sites have not agreed on masks.")
        if not leaves:
            raise SiteRefused("The request lacks the sites' shares of the sum.")
        return SumRequest.of(json.dumps([*about, wire.value(header, "turn", int)]), number, [*leaves, key])

    def _admit(self, asked: SumRequest, compiled: _Compiled, weights: np.ndarray) -> None:
        assert self.masker is not None
        if compiled.stacked:
            raise SiteRefused("The server asks for single replies, but may only learn sums.")
        self.masker.admit(asked, compiled.everyone, float(weights.sum(dtype=np.float64)))

    def _masked(self, asked: SumRequest, place: str, uploads: Arrays, counts: Counter[str]) -> Arrays:
        """The masked numbers, sent instead of uploads and counts."""
        assert self.masker is not None
        method: Any = self.text.method
        clip, noise = method.bound(place)
        fixed = Fixed(clip, noise, asked.shares)
        vector = fixed.encode(uploads, asked.shares[self.masker.index])
        return self.masker.mask(vector, np.array([counts[name] for name in counting.ORACLES]), asked)

    def _spend(self, compiled: _Compiled) -> None:
        if self.allowance is None:
            return
        method: Any = self.text.method
        channel = None if compiled.evaluation else getattr(method, "channels", {}).get(compiled.place)
        self.allowance.spend(costs_of(channel, compiled.releases, self.sizes, compiled.floating))

    def _own_words(self, about: list[Any], arrays: Arrays, memory: PyTree) -> np.ndarray | None:
        """The words of a key for noise, unknown to the server and the same for the same question.

        A question is a message, the clients' memory and their samples: if another question had the same
        noise, the difference of the two answers would have none.
        """
        if self.secret is None:
            return None
        code = hmac.new(self.secret, json.dumps([*about, self.fingerprint]).encode(), "sha256")
        for array in (*arrays, *jax.tree.leaves(memory)):
            code.update(np.ascontiguousarray(array).tobytes())
        shape, dtype = self._key
        return np.frombuffer(code.digest(), dtype)[: math.prod(shape)].reshape(shape)

    def _places(self, clients: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The positions of the clients among this site's own."""
        if clients.ndim != 1 or clients.dtype.kind != "i" or weights.shape != clients.shape:
            raise SiteRefused("The request does not name its clients.")
        asked = clients.tolist()
        if not asked or sorted(set(asked)) != asked or any(i not in self.locate for i in asked):
            raise SiteRefused("The request names clients that do not belong to this site.")
        if weights.dtype.kind != "f" or not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise SiteRefused("The weights of the request are not valid.")
        return np.array([self.locate[i] for i in asked], np.int32)

    def _prepare(
        self, wanted: Wanted, r: int, clients: np.ndarray, places: np.ndarray, weights: np.ndarray,
        key: np.ndarray, leaves: Arrays, memory: PyTree, own_words: np.ndarray | None,
    ) -> tuple[_Compiled, tuple[Any, ...]]:  # fmt: skip
        """The compiled phase and its arguments; padding clients to a power of two limits the compilations."""
        own, number = len(self.locate), len(clients)
        padded = min(own, 1 << (number - 1).bit_length())  # cohorts of any number: few programs
        clients = np.pad(clients.astype(np.int32), (0, padded - number))
        places = np.pad(places, (0, padded - number), constant_values=own)  # dropped when memory is written
        weights = np.pad(weights.astype(jnp.result_type(float)), (0, padded - number))
        if (key.shape, key.dtype) != self._key:
            raise SiteRefused("The key of the request is not a random key.")
        # All made-up values are computed from the last one, `fake`: `reads` finds those that leak.
        arguments = (
            [one.arrays for one in self.setup.problem.held], self.text.method, key, np.int32(r),
            np.asarray(self.place.total, jnp.result_type(int)), clients, places, weights, leaves, memory,
            self.data, own_words, np.float32(0),
        )  # fmt: skip
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
        name = (wanted, padded, own_words is None, self._form, shapes)
        if name not in self._programs:
            self._programs[name] = self._compile(wanted, arguments)
        return self._programs[name], arguments

    def _compile(self, wanted: Wanted, arguments: tuple[Any, ...]) -> _Compiled:
        found: list[tuple[Exchange, Any]] = []

        def answer(frozen: list[PyTree], *arguments: Any) -> Any:
            with lending(self.setup.problem.held, frozen):
                return self._answer(wanted, found, *arguments)

        traced = jax.jit(answer).trace(*arguments)
        if reads(traced, arguments, len(arguments) - 1):
            raise SiteRefused(
                f"The phase {wanted.phase!r} reads a value that only the server has. Send it in the message: "
                "a phase may close over the round's number and what is fixed, and over nothing else."
            )
        lowered, _ = lowered_by(traced, arguments, True)
        one, channel = found[-1]
        floating = all(jnp.issubdtype(u.dtype, jnp.inexact) for u in traced.out_info[0])
        released = () if channel is None else channel.released.get(one.place, ())
        compiled = lowered.compile()
        if (needs := compiled.memory_analysis()) is not None:  # not every backend has it
            size = needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes
            self.rules.check_memory(wanted.phase, size)
        return _Compiled(compiled, one.stacked, one.evaluation, one.of is None, one.place, floating, released)

    def _answer(
        self, wanted: Wanted, found: list[tuple[Exchange, Any]], method: Any, key: Array, r: Array,
        total: Array, clients: Array, places: Array, weights: Array, leaves: list[Array], memory: PyTree,
        data: Placed, own_words: Array | None, fake: Array,
    ) -> tuple[list[Array], PyTree, counting.Tally]:  # fmt: skip
        """The site's computation for an exchange, as one traced function."""
        setup = replace(self.setup, participants=wanted.participants)
        exchange, memory_there, channel = self._replay(setup, wanted, method, r, memory, data, fake)
        found.append((exchange, channel))  # its static part, for the function that traces this
        message = _fitted(exchange, wanted.phase, leaves)
        message = message if own_words is None else with_own_words(message, own_words)
        exchange = exchange._replace(key=jax.random.wrap_key_data(key), message=message)
        own = len(self.locate)

        def one(index: Array, place: Array) -> tuple[PyTree, PyTree, counting.Tally]:
            at = jnp.minimum(place, own - 1)
            client = data.client(at, tree.row(memory_there, at))
            index = index.astype(jnp.result_type(int))  # sent in 32 bits, see `Placed.client`
            client = replace(client, index=index, fraction=data.sizes[at] / total)
            reply, tally = visit(setup, exchange, client)
            return reply.upload, reply.memory, jax.tree.map(lambda f: jnp.where(place < own, f, 0), tally)

        if clients.shape[0] == 1:  # without `vmap`, matrices stay matrices
            uploads, news, tally = one(clients[0], places[0])
            uploads, news = jax.tree.map(lambda leaf: leaf[None], (uploads, news))
        else:
            uploads, news, tally = jax.vmap(one)(clients, places)
            tally = counting.summed(tally)
        if news is not None:
            news = jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), memory, news)
        stack = jax.tree.leaves(uploads)
        if exchange.stacked:
            return stack, news, tally
        real = places < own

        def weighted(u: Array) -> Array:
            u = jnp.where(real.reshape(-1, *[1] * (u.ndim - 1)), u, 0).astype(mean_dtype(u.dtype))
            return jnp.tensordot(weights.astype(u.dtype), u, axes=1)

        return [weighted(u) for u in stack], news, tally

    def _replay(
        self, setup: Setup, wanted: Wanted, method: Any, r: Array, memory: PyTree, data: Placed,
        fake: Array,
    ) -> tuple[Exchange, PyTree, Any]:  # fmt: skip
        sizes = made_up(jax.ShapeDtypeStruct((self.setup.clients,), jnp.int32), fake)
        outline = Outline(sizes, made_up(self.text.server, fake))
        carry = Carry(made_up(self.text.state, fake), memory)
        make_fed: Any = partial(SiteFed, wanted.k, fake, data)
        try:
            with counting.collect():
                key = jax.random.key(fake.astype(jnp.uint32))
                run_text(wanted.program, make_fed, setup, method, carry, key, outline, r)
        except Reached as reached:
            mine = reached.exchange.name
            if mine != wanted.phase:
                raise SiteRefused(
                    f"Exchange {wanted.k} of {wanted.program!r} is {mine!r} in this site's text, not "
                    f"{wanted.phase!r}: the server runs another text."
                ) from None
            return reached.exchange, reached.memory, reached.channel
        raise SiteRefused(f"{wanted.program!r} has no exchange {wanted.k} in this site's text.")


def _exchanged(text: Text) -> tuple[tuple[str, Any], ...]:
    """The metrics that ask clients: of each client, if the server gets single replies anyway."""
    if text.method.reveals_on(text.setup.problem) != "replies":
        return ()
    return tuple((name, metric) for name, metric in text.setup.metrics if metric.each_client)


def _fitted(exchange: Exchange, phase: str, leaves: list[Array]) -> Any:
    """The message, in the structure of this site's text."""
    like, structure = jax.tree.flatten(exchange.message)
    wanted = [(leaf.shape, leaf.dtype) for leaf in like]
    found = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if wanted != found:
        raise SiteRefused(f"The message of {phase!r} is {found}, where this site's text has {wanted}.")
    return jax.tree.unflatten(structure, leaves)
