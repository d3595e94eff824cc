"""A method whose uploads pass through channels; engines run it instead of the method."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.channel import Channel, Channels, Dropouts, Feedback, chosen
from fedstrata.channels.clipping import Adaptive
from fedstrata.channels.compression import QSGD
from fedstrata.channels.link import LATE, Joined, Kept, Link
from fedstrata.channels.sent import PASSED_BY, Sent
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method
from fedstrata.core.types import Integer, Key, PyTree

MARK = 0x6368  # folded into a round's key for what channels draw


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("plain", "channels", "drops"),
    meta_fields=("levels", "expected", "remembers", "late"),
)
@dataclass(frozen=True)
class Channelled:
    """A method with a link in the verbs of every round.

    Attributes:
        plain: the method.
        channels: the channels that are not trivial, by place.
        drops: the dropouts, or None.
        levels: place and level of every exchange.
        expected: the fixed number of clients that divides a mean, or None; see `Fed.expected`.
        remembers: whether the clients' memory is `Kept`.
        late: whether rounds are buffered, see `Buffered`.
    """

    plain: Any
    channels: dict[str, Channel]
    drops: Dropouts | None
    levels: tuple[tuple[str, str], ...]
    expected: float | None
    remembers: bool
    late: bool = False

    @property
    def name(self) -> str:
        """The name of the method."""
        return type(self.plain).__name__

    @property
    def full_participation(self) -> str | None:
        found: str | None = self.plain.full_participation
        return found

    def at(self, r: Integer) -> Channelled:
        return replace(self, plain=self.plain.at(r))

    def starts(self) -> bool:
        return bool(self.plain.starts())

    def start(self, problem: Any, fed: Fed, key: Key, state: Joined) -> Joined:
        link = self._link(fed, "start", key, state)
        return link.joined(self.plain.start(problem, fed, key, state.own))

    def round(self, problem: Any, fed: Fed, key: Key, r: Integer, state: Joined) -> Joined:
        if self.drops is not None:
            drawn = jax.random.fold_in(jax.random.fold_in(key, MARK), 1)
            fed.present = self.drops.answering(drawn, r, fed.clients)
        fed.expected = self.expected
        link = self._link(fed, "round", key, state)
        return link.joined(self.plain.round(problem, fed, key, r, state.own))

    def _link(self, fed: Fed, program: str, key: Key, state: Joined) -> Link:
        key, levels = jax.random.fold_in(key, MARK), dict(self.levels)
        link = Link(program, key, self.channels, levels, state, self.drops, self.remembers, self.late)
        fed.channel = link
        return link

    def bound(self, place: str) -> tuple[float | None, float]:
        """The bound C of an upload at a place, and the standard deviation of the client's noise over C."""
        channel = self.channels.get(place)
        if channel is None or channel.clip is None or isinstance(channel.clip, Adaptive):
            return None, 0.0
        return float(channel.clip), 0.0 if channel.noise_at == "server" else float(channel.noise or 0.0)

    def described(self) -> dict[str, str]:
        """The description that checkpoints and the parties of a network compare."""
        found = {f"channel, {place}": str(channel) for place, channel in self.channels.items()}
        found |= {} if self.drops is None else {"dropouts": str(self.drops)}
        return {**found, "buffered": "yes"} if self.late else found

    def plain_state(self, state: Joined) -> Any:
        return state.own

    def output(self, state: Joined, memory: PyTree) -> tuple[PyTree, PyTree]:
        found: tuple[PyTree, PyTree] = self.plain.output(state.own, memory.own if self.remembers else memory)
        return found

    def metrics(self, state: Joined) -> dict[str, Any]:
        """See `Method.metrics`; also the adaptive bounds."""
        return {**self.plain.metrics(state.own), **{f"clip/{k}": b for k, b in state.bounds.items()}}

    def judged_as(self, problem: Any) -> Any:
        return self.plain.judged_as(problem)

    def reveals_on(self, problem: Any) -> str:
        return str(self.plain.reveals_on(problem))


def with_heard(method: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """State and memory where uploads travel encoded: the server keeps its copy of what clients remember."""
    state, memory = carry
    if not (isinstance(state, Joined) and isinstance(memory, Kept)):
        return carry
    follows = {place for place, channel in method.channels.items() if channel.feedback == "ef21"}
    heard = {place: kept for place, kept in memory.rest.items() if place in follows}
    return state._replace(heard=heard), memory


def with_secret(state: PyTree) -> PyTree:
    """A state whose noise does not follow from the seed alone."""
    if not isinstance(state, Joined):
        return state
    words: Any = np.frombuffer(os.urandom(8), np.uint32)
    return state._replace(secret=words)


def resolved(channels: Channels | None, method: Method, found: Sequence[Sent]) -> dict[str, Channel]:
    """The channel of every place that has one, checked against the upload there.

    Raises:
        ValueError: for combinations that are not possible, with the reason.
    """
    names = {name for one in found for name in (one.level, one.phase, "*")}
    if isinstance(channels, Mapping) and (unknown := sorted(set(channels) - names)):
        known = sorted(names)
        raise ValueError(f"channel: unknown phase or level {unknown[0]!r}; known are {known}.")
    its = {}
    for one in (one for one in found if one.number != PASSED_BY):
        channel = chosen(channels, one.level, one.phase)
        if one.program == "start":  # sent once, so not compressed
            channel = replace(channel, compress=None, feedback=None, server=None)
        if not one.floats:  # but a client's memory may contain its samples
            channel = Channel(examples=channel.examples)
        if channel.trivial:
            continue
        if (reason := _refused(channel, method, one)) is not None:
            raise ValueError(f"channel, phase {one.phase!r} of {type(method).__name__}: {reason}")
        its[one.place] = _with_feedback(channel, method, one)
    return its


def hidden(channels: Channels | None, found: Sequence[Sent]) -> bool:
    """Whether the server learns only sums, which holds for all exchanges or for none.

    Raises:
        ValueError: if only some exchanges are secure, or if the method needs single replies.
    """
    asked = {chosen(channels, one.level, one.phase).secure for one in found}
    if True not in asked:
        return False
    if False in asked:
        raise ValueError(
            "channel: secure=True applies to a whole run: give it to every channel of the mapping."
        )
    for one in found:
        if one.gathered or one.per_sample:
            raise ValueError(
                f"channel: {one.phase!r} needs single replies, but with secure=True the server learns only "
                "sums. Use a variant of the method that averages; `fs.exchanges` lists what each sends."
            )
    return True


def check_late(method: Method, found: Sequence[Sent]) -> None:
    """Raise unless a method's rounds can be buffered."""
    rounds = [one for one in found if one.program == "round"]
    if len(rounds) == 1 and (one := rounds[0]).times == 1 and not one.gathered and one.asked != "some":
        return
    raise ValueError(
        f"fs.Buffered needs a method with one exchange in a round, which is a mean over the round's clients; "
        f"{type(method).__name__} has {', '.join(repr(one.phase) for one in rounds)}. `fs.exchanges` lists "
        "them."
    )


def _refused(channel: Channel, method: Method, one: Sent) -> str | None:
    if one.per_sample:
        return (
            "it sends a number for every sample of a client, which channels cannot clip or compress. Give "
            "the method a batch_size."
        )
    # declared by the class itself: a subclass may use more of the samples
    if channel.examples is not None and not vars(type(method)).get("private_samples", False):
        return (
            "it is not among the methods that can hide single samples: all that a client takes of its "
            "samples must be means by Oracle.apply, see docs/channels.md. clip= and noise= hide whole "
            "clients with every method."
        )
    if channel.compress is not None and not channel.compress.unbiased and one.level in method.linear:
        return (
            f"the exchanges of the level {one.level!r} are a linear recursion, which diverges with a biased "
            "compressor. Compress only the level 'main', or use fs.QSGD, which is unbiased."
        )
    if channel.feedback not in ("auto", None, method.feedback) and not _bears(channel, method):
        lost = (
            "the server adds up its uploads, and what differences to the last upload omit is never sent"
            if method.feedback == "ef"
            else "the omitted parts of points and gradients arrive late, and at a constant step size x "
            "converges to a wrong point if clients differ"
        )
        return f"feedback={channel.feedback!r} does not fit: {lost}. Give 'auto', here {method.feedback!r}."
    if channel.server is not None and (one.gathered or not one.reference):
        return (
            "a server optimiser steps along the mean difference to a point, but here the server gets "
            f"{'single replies' if one.gathered else 'a mean without a reference point'}. "
            "`fs.exchanges` lists the exchanges with a reference; `fs.FedOpt` has two optimisers of its own."
        )
    if isinstance(channel.clip, Adaptive) and one.gathered:
        return (
            "an adaptive clip needs the mean of the uploads, but here the server gets each of them. Give a "
            "number."
        )
    return None


def _random(method: Method) -> bool:
    """Whether uploads vary even if x does not, because of minibatches or random directions."""
    batch = [v for name, v in vars(method).items() if name.endswith("batch_size")]
    return any(v is not None for v in batch) or "values" in method.needs


def _bears(channel: Channel, method: Method) -> bool:
    """Whether a method also works with the kind of feedback that it does not declare."""
    biased = channel.compress is not None and not channel.compress.unbiased
    return not biased or (method.feedback == "ef21" and _random(method))


def _with_feedback(channel: Channel, method: Method, one: Sent) -> Channel:
    """The channel with its error feedback chosen, if it is "auto"; see `Method.feedback`."""
    if channel.feedback != "auto":
        return channel
    compress = channel.compress
    if compress is None or channel.noise is not None:
        return replace(channel, feedback=None)
    random = _random(method)
    feedback: Feedback | None = "ef" if random else method.feedback
    if compress.unbiased and feedback == "ef":
        if random:  # feedback sends omitted parts later; unbiased noise does not need it
            feedback = None
        elif isinstance(compress, QSGD):
            compress = replace(compress, unbiased=False)
        elif any(compress.omega(math.prod(shape)) >= 1 for shape, _ in one.floats):
            feedback = None  # error feedback needs a contraction
    return replace(channel, compress=compress, feedback=feedback)


def channelled(
    method: Method,
    channels: dict[str, Channel],
    drops: Dropouts | None,
    found: Sequence[Sent],
    carry: tuple[PyTree, PyTree],
    clients: int,
    expected: float | None = None,
    late: bool = False,
) -> tuple[Channelled, tuple[PyTree, PyTree]]:
    """The method with its channels, and the state and memory extended by those of the channels."""
    state, memory = carry
    keeps: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for one in found:
        if late and one.program == "round":
            blanks = [np.broadcast_to(np.zeros(shape, dtype), (clients, *shape)) for shape, dtype in one.sent]
            keeps[LATE] = [np.zeros(clients, bool), *blanks]
        channel = channels.get(one.place)
        if channel is None:
            continue
        if channel.feedback is not None and channel.compress is not None:
            keeps[one.place] = [
                np.broadcast_to(np.zeros(shape, dtype), (clients, *shape)) for shape, dtype in one.floats
            ]
        if isinstance(channel.clip, Adaptive):
            bounds[one.place] = np.asarray(channel.clip.start, jnp.result_type(float))
        if channel.server is not None:
            zeros = [jnp.zeros(shape, jnp.result_type(dtype)) for shape, dtype in one.floats]
            steps[one.place] = jax.tree.map(np.asarray, channel.server.init(zeros))
    levels = tuple((one.place, one.level) for one in found)
    wrapped = Channelled(method, channels, drops, levels, expected, bool(keeps), late)
    joined = Joined(state, bounds, steps=steps)
    joined = joined if all(c.seeded for c in channels.values()) else with_secret(joined)
    return wrapped, (joined, Kept(memory, keeps) if keeps else memory)
