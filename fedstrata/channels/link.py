"""Channels around the clients' phase and the server's mean, for all engines.

    client   Δ = upload − around;  clip;  noise;  compress Δ plus earlier errors;  remember the error
    server   the mean, or a robust one;  noise;  + around

The place of an exchange in the text identifies it: the program, and the number of exchanges before it; the
body of a loop has the same places in every turn. A client stores a channel's state beside its method's
memory (`Kept`), and the server beside the method's state (`Joined`), so that engines, checkpoints and
results do not depend on channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.channels.channel import Channel, Dropouts
from fedstrata.channels.clipping import Adaptive, bounded, clipped, deviation_of, noised
from fedstrata.channels.compression import Compressor, read
from fedstrata.channels.examples import Release, private, releases
from fedstrata.core import counting, tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Exchange, Fed, Remember
from fedstrata.core.types import Array, Integer, Key, Phase, PyTree, Real

NOTHING = Channel()
LATE = "late"  # the key of a client's last message in its memory, in buffered rounds
LEAST_SUM = 3  # clients in a sum that hides its terms


class Kept(NamedTuple):
    """A client's memory: its method's, and that of the channels, by place."""

    own: PyTree
    rest: dict[str, PyTree]


class Joined(NamedTuple):
    """A state: the method's, and that of the channels at the server, by place.

    Attributes:
        own: the method's.
        bounds: of adaptive clipping.
        heard: if uploads travel encoded, the server's copy of each client's reference.
        steps: of the server's optimisers.
        secret: two random words, which the noise depends on besides the seed; or None.
    """

    own: PyTree
    bounds: dict[str, Array]
    heard: dict[str, list[Array]] = {}  # noqa: RUF012 (never written to)
    steps: dict[str, PyTree] = {}  # noqa: RUF012
    secret: Array | None = None


class Turning(NamedTuple):
    """The carry of loops: the number of exchanges in this round so far; the rest as in `Joined`."""

    turn: Array | None
    bounds: dict[str, Array]
    heard: dict[str, list[Array]]
    steps: dict[str, PyTree]


class Sides(NamedTuple):
    """The values that clients get besides the message; remote clients get them as a message.

    Attributes:
        words: the data of a random key of this exchange, for the channel's random numbers.
        bound: an adaptive bound on the norm; otherwise a client takes the channel's constant.
        part: the client's part of the mean's noise, if clients share it.
        here: which of all clients answer.
        asked: which of all clients are asked.
        own: the data of a key for noise, which a site hides from the server; None takes ``words``.
    """

    words: Array
    bound: Any = None
    part: Any = None
    here: Array | None = None
    asked: Array | None = None
    own: Array | None = None


def with_own_words(message: tuple[PyTree, ...], own: Array) -> tuple[PyTree, ...]:
    """A message whose client draws its noise from its own key."""
    if message and isinstance(message[-1], Sides):
        return (*message[:-1], message[-1]._replace(own=own))
    return message


class Floats:
    """The float arrays of an upload, which a channel transforms; it leaves the others unchanged."""

    def __init__(self, upload: PyTree) -> None:
        self.leaves, self.form = jax.tree.flatten(upload)
        self.where = [j for j, u in enumerate(self.leaves) if jnp.issubdtype(u.dtype, jnp.inexact) and u.size]
        self.list = [self.leaves[j] for j in self.where]

    def put(self, new: list[Any]) -> PyTree:
        """The upload with new float arrays."""
        leaves = list(self.leaves)
        for j, u in zip(self.where, new, strict=True):
            leaves[j] = u
        return jax.tree.unflatten(self.form, leaves)


class Reference(NamedTuple):
    """The reference point of an upload: for each array, its index in the message or a constant."""

    parts: list[int | np.ndarray]

    @classmethod
    def of(cls, exchange: Exchange) -> Reference | None:
        """The reference of an exchange, or None."""
        if exchange.around is None:
            return None
        sent = {id(leaf): j for j, leaf in enumerate(jax.tree.leaves(exchange.message))}
        parts: list[int | np.ndarray] = []
        for leaf in jax.tree.leaves(exchange.around):
            if not (isinstance(leaf, np.ndarray) or id(leaf) in sent):
                raise TypeError(
                    f"{exchange.name!r}: around= is a point that is not in the message, so clients do not "
                    "know it. Send it, or let the phase return the difference to it."
                )
            place = sent.get(id(leaf))
            parts.append(leaf if place is None else place)
        return cls(parts)

    def arrays(self, message: PyTree, where: list[int]) -> list[Any]:
        """The reference of some of the upload's arrays."""
        leaves = jax.tree.leaves(message)
        return [leaves[p] if isinstance(p, int) else p for p in (self.parts[j] for j in where)]


class Link:
    """The channels of one round; see `fedstrata.core.fed.Channel`.

    Args:
        program: ``"start"`` or ``"round"``.
        key: the random key of the channels in this round.
        channels: the channels that are not trivial, by place.
        levels: the level of every exchange, by place.
        state: the state of the method and the channels.
        drops: the dropouts, or None.
        late: whether rounds are buffered.
        remembers: whether the clients' memory is `Kept`.
    """

    def __init__(
        self, program: str, key: Key, channels: Mapping[str, Channel], levels: Mapping[str, str],
        state: Joined, drops: Dropouts | None, remembers: bool, late: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.key, self.channels, self.levels = program, key, channels, levels
        self.drops, self.remembers, self.late = drops, remembers, late
        turn = jnp.zeros((), jnp.int32) if channels else None
        self.turning, self.secret = Turning(turn, state.bounds, state.heard, state.steps), state.secret
        self.position = 0
        self.released: dict[str, tuple[Release, ...] | None] = {}  # the clients' means over samples, by place

    def repeat(
        self, loop: Callable[..., PyTree], times: Integer, body: counting.Body, carry: PyTree, until: Any
    ) -> PyTree:
        first = self.position

        def turn(t: Integer, both: tuple[PyTree, Turning]) -> tuple[PyTree, Turning]:
            carry, self.turning = both
            self.position = first  # a body may be traced more than once
            return body(t, carry), self.turning

        stop = None if until is None else lambda both: until(both[0])
        carry, self.turning = loop(times, turn, (carry, self.turning), stop)
        return carry

    def joined(self, own: PyTree) -> Joined:
        """The method's state with the channels' state at the server."""
        return Joined(own, *self.turning[1:], self.secret)

    def exchanged(self, fed: Fed, exchange: Exchange) -> PyTree:
        place = f"{self.program} {self.position}"
        self.position += 1
        channel = self.channels.get(place, NOTHING)
        turn = self._turn()
        number = fed.clients if exchange.of is None else exchange.of.shape[0]
        if fed.setup.secure and number < LEAST_SUM:
            raise ValueError(
                f"{exchange.name!r} asks {number} of the clients, but secure=True needs at least "
                f"{LEAST_SUM}: with two, each learns the other's upload from the sum."
            )
        exchange = exchange._replace(place=place)
        reference = Reference.of(exchange)
        weight, spread = _extent(fed, exchange, number)
        adaptive = isinstance(channel.clip, Adaptive) and not exchange.stacked
        bound: Any = channel.clip.start if isinstance(channel.clip, Adaptive) else channel.clip
        bound = self.turning.bounds[place] if adaptive else bound
        sides = self._sides(fed, exchange, turn, channel, bound, weight / spread)
        noisy = channel.noise is not None and (exchange.stacked or channel.noise_at != "server")
        encoded = fed.encodes and channel.compress is not None
        seen: list[Floats] | None = [] if encoded else None
        whole = exchange.phase, channel, place, reference, adaptive, noisy, fed.clients, seen
        phase = partial(self._phase, *whole)
        going = _going(fed, exchange, phase, sides)
        if (channel.mean is not None or encoded) and not exchange.stacked:
            going = going._replace(stacked=True, weights=None)
        arrived, form = fed.exchange(going)
        stacked = exchange.stacked or channel.mean is not None
        sent = going._replace(message=exchange.message, stacked=stacked)
        if channel.compress is not None and not encoded:
            form = payload(channel, form)
        self._book(fed, sent, place, form, number)
        if seen:
            arrived = self._decoded(fed, exchange, channel, turn, seen[0], arrived)
            if not stacked:
                arrived = _weighted(fed, exchange, arrived)
        if adaptive:
            arrived, below = arrived
            assert isinstance(channel.clip, Adaptive)
            deviation = 0.0 if noisy else channel.clip.noise * weight
            below = noised(jax.random.fold_in(self._hidden(turn), 1), below, deviation)
            new = channel.clip.follow(bound, below)
            self.turning = self.turning._replace(bounds={**self.turning.bounds, place: new})
        if channel.mean is not None and not exchange.stacked:
            arrived = _robust(channel.mean, jax.random.fold_in(turn, 2), fed, exchange, arrived)
        numbers = Floats(arrived)
        found = numbers.list
        if channel.noise is not None and channel.noise_at == "server" and not exchange.stacked:
            key = jax.random.fold_in(self._hidden(turn), 3)
            found = noised(key, found, deviation_of(channel.noise, bound) * weight)
        if reference is not None and self._differs(channel, fed):
            around = reference.arrays(exchange.message, numbers.where)
            around = [jnp.asarray(a, u.dtype) for u, a in zip(found, around, strict=True)]
            if channel.server is not None:
                found = self._stepped(channel.server, place, found, around)
            found = tree.add(found, around)
        return numbers.put(found)

    def _stepped(
        self, optimiser: optax.GradientTransformation, place: str, found: list[Array], around: list[Array]
    ) -> list[Array]:
        """The server's step for a mean difference; the optimiser's state keeps its dtypes, for loops."""
        kept = self.turning.steps[place]
        updates, after = optimiser.update(tree.scale(-1.0, found), kept, around)
        after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), after, kept)
        self.turning = self.turning._replace(steps={**self.turning.steps, place: after})
        return jax.tree.map(lambda u, a: jnp.asarray(u, a.dtype), updates, found)

    def _decoded(
        self, fed: Fed, exchange: Exchange, channel: Channel, turn: Key, form: Floats, arrived: Any
    ) -> PyTree:
        """The stacked uploads, decoded from stacked payloads."""
        adaptive = isinstance(channel.clip, Adaptive)
        (payloads, others), below = arrived if adaptive else (arrived, None)
        compress, clients, place = channel.compress, exchange.of, exchange.place
        assert compress is not None
        keys = jax.random.split(turn, max(len(form.list), 1))  # as in `_compressed`, where they are shared
        found = []
        for key, one, like in zip(keys, payloads, form.list, strict=False):
            decode = partial(compress.decode, key, d=like.size)
            flat = jax.vmap(lambda sent, decode=decode: decode(sent))(one)
            found.append(flat.astype(like.dtype).reshape(-1, *like.shape))
        if channel.feedback == "ef21":
            old = [u if clients is None else u[clients] for u in self.turning.heard[place]]
            found, new = _followed(compress, old, found, [u.size for u in form.list])
            if (here := fed.answering(clients)) is not None:
                new = [_where(here, a, b) for a, b in zip(new, old, strict=True)]
            every = self.turning.heard[place]
            if clients is not None:
                new = [u.at[clients].set(v) for u, v in zip(every, new, strict=True)]
            self.turning = self.turning._replace(heard={**self.turning.heard, place: new})
        if channel.clip is not None and channel.noise is not None and channel.noise_at == "server":
            found, _ = jax.vmap(lambda *u: bounded(list(u), self._bound(channel, place)))(*found)
        parts = iter(found), iter(others)
        leaves = [next(parts[j not in form.where]) for j in range(len(form.leaves))]
        uploads = jax.tree.unflatten(form.form, leaves)
        return (uploads, below) if adaptive else uploads

    def _bound(self, channel: Channel, place: str) -> Any:
        return self.turning.bounds[place] if isinstance(channel.clip, Adaptive) else channel.clip

    def _turn(self) -> Key:
        """A random key of this exchange; the key of the exchange itself may repeat in a loop."""
        if self.turning.turn is None:
            return self.key
        turn = jax.random.fold_in(self.key, self.turning.turn)
        self.turning = self.turning._replace(turn=self.turning.turn + 1)
        return turn

    def _hidden(self, turn: Key) -> Key:
        """The key of an exchange's noise; clients know the exchange's own key."""
        for word in () if self.secret is None else self.secret:
            turn = jax.random.fold_in(turn, word)
        return turn

    def _differs(self, channel: Channel, fed: Fed) -> bool:
        """Whether differences travel; this is also needed if the weights do not sum to one."""
        return not channel.trivial or fed.present is not None or fed.drawn is not None or self.late

    def _sides(
        self, fed: Fed, exchange: Exchange, turn: Key, channel: Channel, bound: Any, part: Real
    ) -> Sides:
        """The values for clients; ``part`` is each one's part of the mean's noise, if they share it."""
        here = asked = None
        if fed.answering(exchange.of) is not None:
            here = fed.present
            if exchange.of is not None and fed.drawn is not None:
                asked = fed.drawn
                here = asked if here is None else here & asked
        together = channel.noise is not None and channel.noise_at == "clients" and not exchange.stacked
        real = partial(jnp.asarray, dtype=jnp.result_type(float))
        return Sides(
            jax.random.key_data(turn),
            real(bound) if isinstance(channel.clip, Adaptive) else None,
            real(part) if together else None,
            here,
            asked,
            # not the hidden key itself: a site that receives this would know the server's noise
            None if channel.seeded else jax.random.key_data(jax.random.fold_in(self._hidden(turn), 5)),
        )

    def _phase(
        self, phase: Phase, channel: Channel, place: str, reference: Reference | None, adaptive: bool,
        noisy: bool, clients: int, seen: list[Floats] | None, sides: Sides, problem: Any, client: Client,
        key: Key, *message: PyTree,
    ) -> Any:  # fmt: skip
        """The phase that a client runs instead of the method's phase."""
        kept = client.memory if self.remembers else None
        inner = client if kept is None else replace(client, memory=kept.own)
        turn = jax.random.wrap_key_data(sides.words)
        secret = turn if sides.own is None else jax.random.wrap_key_data(sides.own)
        secret = jax.random.fold_in(secret, client.index)
        if channel.examples is not None:
            phase = private(phase, channel.examples, jax.random.fold_in(secret, 3))
        late = None
        if kept is not None and LATE in kept.rest and self.program == "round":
            message, late = _last_sent(kept.rest[LATE], message)
        reply, tally = counting.counted(phase)(problem, inner, key, *message)
        self.released[place], tally = releases(tally)
        reply = reply if isinstance(reply, Remember) else Remember(reply, None)
        here = None if sides.here is None else sides.here[client.index]
        counting.book(tally if here is None else _if_there(tally, self._works(sides, client, here)))
        numbers = Floats(jax.tree.map(jnp.asarray, reply.upload))
        delta = numbers.list
        if reference is not None and (not channel.trivial or here is not None or self.late):
            around = reference.arrays(message, numbers.where)
            delta = [u - jnp.asarray(a, u.dtype) for u, a in zip(delta, around, strict=True)]
        below = None
        bound: Any = sides.bound if isinstance(channel.clip, Adaptive) else channel.clip
        limit = clipped if channel.noise is None else bounded
        if bound is not None:
            delta, size = limit(delta, bound)
            below = (size <= bound).astype(jnp.result_type(float))
        mine = jax.random.fold_in(turn, client.index)
        if noisy:
            # a server may not ask for less than an equal part
            part = 1.0 if sides.part is None else jnp.maximum(sides.part, clients**-0.5)
            delta = noised(jax.random.fold_in(secret, 1), delta, deviation_of(channel.noise, bound) * part)
            if isinstance(channel.clip, Adaptive):
                below = noised(jax.random.fold_in(secret, 4), below, channel.clip.noise * part)
        rest = None if kept is None else kept.rest.get(place)
        travels = None
        if channel.compress is not None:
            travels, delta, rest = _compressed(channel, turn, jax.random.fold_in(mine, 2), delta, rest)
            if bound is not None and channel.noise is not None and channel.noise_at == "server":
                delta, _ = bounded(delta, bound)  # rounding may have lengthened the vector
        upload = numbers.put(delta)
        if seen is not None:
            seen.append(Floats(jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), upload)))
            upload = travels, [u for j, u in enumerate(numbers.leaves) if j not in numbers.where]
        upload = (upload, below) if adaptive else upload
        new = self._kept_where(here, reply.memory, inner.memory)
        if kept is None:
            return upload if new is None else Remember(upload, new)
        if rest is None and new is None and late is None:
            return upload
        if rest is not None and here is not None:  # the error of a lost upload is not stored
            rest = jax.tree.map(partial(jnp.where, here), rest, kept.rest[place])
        others = kept.rest if rest is None else {**kept.rest, place: rest}
        if late is not None:
            others = {**others, LATE: self._kept_where(here, late, kept.rest[LATE])}
        return Remember(upload, Kept(kept.own if new is None else new, others))

    def _kept_where(self, here: Array | None, new: PyTree, old: PyTree) -> PyTree:
        """The memory of the method's client, unchanged if it drops out before it computes."""
        after = self.drops is not None and self.drops.when == "after"
        if here is None or after or new is None or not tree.same_structure(new, old):  # refused by `visit`
            return new
        return jax.tree.map(partial(jnp.where, here), new, old)

    def _works(self, sides: Sides, client: Client, here: Array) -> Array:
        """Whether a client computes, even if its upload is lost."""
        if self.drops is None or self.drops.when == "before":
            return here
        return jnp.asarray(True) if sides.asked is None else sides.asked[client.index]

    def _book(self, fed: Fed, exchange: Exchange, place: str, form: PyTree, number: int) -> None:
        """Count the message to the clients that are asked, and the payload of those that answer."""
        answers = fed.answering(exchange.of)
        if answers is None:
            single = exchange.stacked or (number == 1 < fed.clients)
            counts = counting.traffic(self.levels[place], exchange.message, form, number, single)
            counting.book(counting.Tally(counts))
            return
        counts = counting.traffic(self.levels[place], exchange.message, form, 1, exchange.stacked)
        asked = jnp.int32(number)
        if exchange.of is not None and fed.drawn is not None:
            asked = fed.drawn[exchange.of].sum(dtype=jnp.int32)
        for way, times in (("_up", answers.sum(dtype=jnp.int32)), ("_down", asked)):
            counting.book(
                counting.Tally(Counter({n: c for n, c in counts.items() if n.endswith(way)})), times
            )
        rest = {n: c for n, c in counts.items() if not n.endswith(("_up", "_down"))}
        counting.book(counting.Tally(Counter(rest)))


def payload(channel: Channel, upload: PyTree) -> PyTree:
    """The shapes of the payload that travels instead of an upload."""
    assert channel.compress is not None
    numbers, compress = Floats(upload), channel.compress
    sent = [
        jax.eval_shape(
            lambda v: compress.encode(jax.random.key(0), v), jax.ShapeDtypeStruct((u.size,), u.dtype)
        )
        for u in numbers.list
    ]
    return sent, [u for j, u in enumerate(numbers.leaves) if j not in numbers.where]


def _compressed(
    channel: Channel, shared: Key, mine: Key, delta: list[Array], rest: list[Array] | None
) -> tuple[list[PyTree], list[Array], list[Array] | None]:
    """The payload of a difference, the server's reconstruction of it, and the client's new state."""
    assert channel.compress is not None
    compress, now = channel.compress, delta
    keys = jax.random.split(shared if compress.shared else mine, max(len(delta), 1))
    if rest is not None:
        now = tree.add(delta, rest) if channel.feedback == "ef" else tree.sub(delta, rest)
    sent = [compress.encode(k, u.reshape(-1)) for k, u in zip(keys, now, strict=False)]
    found = [read(compress, k, u.reshape(-1)).reshape(u.shape) for k, u in zip(keys, now, strict=False)]
    if rest is None:
        return sent, found, None
    if channel.feedback == "ef":
        return sent, found, tree.sub(now, found)
    return sent, *_followed(compress, rest, found, [u.size for u in delta])


def _followed(
    compress: Compressor, old: list[Array], found: list[Array], sizes: list[int]
) -> tuple[list[Array], list[Array]]:
    """The server's reconstruction of an upload from its copy and a difference, and its next copy."""
    whole = tree.add(old, found)
    if not compress.unbiased:
        return whole, whole
    parts = [1 / (1 + compress.omega(d)) for d in sizes]  # DIANA: a full step would not contract
    return whole, [a + jnp.asarray(p, a.dtype) * u for a, p, u in zip(old, parts, found, strict=True)]


def _last_sent(kept: list[Array], message: tuple[PyTree, ...]) -> tuple[tuple[PyTree, ...], list[Array]]:
    """A client's previous message (at first, the current one), and its new memory."""
    before, *old = kept
    new, form = jax.tree.flatten(message)
    sent = [jnp.where(before, a, b) for a, b in zip(old, new, strict=True)]
    return jax.tree.unflatten(form, sent), [jnp.ones_like(before), *new]


def _where(here: Array, new: Array, old: Array) -> Array:
    return jnp.where(here.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _weighted(fed: Fed, exchange: Exchange, stack: PyTree) -> PyTree:
    """The mean of a stack by the exchange's weights."""
    shares = fed.weights_of(exchange.of, exchange.weights)
    return jax.tree.map(lambda u: jnp.tensordot(shares.astype(u.dtype), u, 1), stack)


def _going(fed: Fed, exchange: Exchange, phase: Callable[..., Any], sides: Sides) -> Exchange:
    """The exchange with a channel's phase, which closes over `Sides`, or gets it as a message."""
    if fed.remote:

        def sent(problem: Any, client: Client, key: Key, *message: PyTree) -> Any:
            return phase(message[-1], problem, client, key, *message[:-1])

        going, message = sent, (*exchange.message, sides)
    else:

        def closed(problem: Any, client: Client, key: Key, *message: PyTree) -> Any:
            return phase(sides, problem, client, key, *message)

        going, message = closed, exchange.message
    going.__name__ = exchange.name
    going.__qualname__ = str(getattr(exchange.phase, "__qualname__", going.__name__))
    return exchange._replace(phase=going, message=message)


def _extent(fed: Fed, exchange: Exchange, number: int) -> tuple[Any, Any]:
    """The largest weight of an upload, and the root of the sum of the squared weights."""
    if fed.expected is not None and exchange.of is not None:  # for any cohort, or some of it
        weight = fed.participants / (number * fed.expected)
        return weight, weight**0.5
    if exchange.weights is None:
        return 1 / number, number**-0.5
    return jnp.abs(exchange.weights).max(), jnp.sqrt((exchange.weights**2).sum())


def _if_there(tally: counting.Tally, here: Array) -> counting.Tally:
    """The counts of a client, or zero if it is absent."""
    factor = here.astype(jnp.int32)
    scaled = [(counts, f * factor) for counts, f in tally.scaled]
    return counting.Tally(scaled=[*scaled, (tally.fixed, factor)] if tally.fixed else scaled)


def _robust(mean: Any, key: Key, fed: Fed, exchange: Exchange, stack: PyTree) -> PyTree:
    """A robust mean of the uploads that arrived; the plain mean of arrays that are not floats."""
    numbers = Floats(stack)
    number = jax.tree.leaves(stack)[0].shape[0]
    here = fed.answering(exchange.of)
    here = jnp.ones(number, bool) if here is None else here
    if exchange.weights is not None:  # zero for clients without local steps
        here = here & (exchange.weights > 0)
    index = jnp.arange(number) if exchange.of is None else exchange.of
    flat = jnp.concatenate([u.reshape(number, -1) for u in numbers.list], axis=1)
    found = mean(key, flat, here, index)
    ends = np.cumsum([0, *(u[0].size for u in numbers.list)]).tolist()
    parts = [found[a:b].reshape(u.shape[1:]) for a, b, u in zip(ends, ends[1:], numbers.list, strict=False)]
    shares = fed.weights_of(exchange.of, exchange.weights)
    means = [jnp.tensordot(shares, u.astype(shares.dtype), 1) for u in numbers.leaves]
    for j, part in zip(numbers.where, parts, strict=True):
        means[j] = part
    return jax.tree.unflatten(numbers.form, means)
