"""The user's options for uploads, participation and dropouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.channels.attacks import Attack
from fedstrata.channels.clipping import Adaptive
from fedstrata.channels.compression import Compressor
from fedstrata.channels.examples import Examples
from fedstrata.channels.means import Robust
from fedstrata.core import tree
from fedstrata.core.hyperparameters import Count, Number, check_fields
from fedstrata.core.types import Array, Integer, Key
from fedstrata.support.optimisers import first_like

Feedback = Literal["auto", "ef", "ef21"]
EVERYWHERE = "*"


@dataclass(frozen=True)
class Channel:
    """How each upload is transformed, as a difference to the reference point of its method.

    The client clips, adds noise and compresses; the server takes the mean and adds noise. See
    ``docs/channels.md``.

    Args:
        clip: the bound C on an upload's norm: a number, or `Adaptive`.
        noise: the noise multiplier z: the mean gets Gaussian noise of standard deviation z · C · (largest
            weight).
        noise_at: ``"server"`` adds the noise to the mean. ``"clients"`` adds a part of it to each upload, so
            that the mean has the same noise: the server sees no upload without noise, but a single upload has
            √m times less noise than it needs. ``"each"`` adds the full noise to each upload, so that no party
            has to be trusted.
        compress: the compressor: `TopK`, `RandK`, `QSGD`, `Sign` or `Cast`. The ledger counts the compressed
            size, and over a network each client's compressed upload travels.
        feedback: how compression errors are corrected: ``"ef"`` adds them to the next upload (Seide et al.
            2014). ``"ef21"`` sends differences to the server's copy of the client's last upload (Richtárik et
            al. 2021; with an unbiased compressor DIANA, Mishchenko et al. 2019). ``"auto"`` chooses the one
            that suits the method; None does not correct them.
        mean: a robust mean instead of the weighted mean: `TrimmedMean`, `Median`, `GeometricMedian`, `Krum`,
            `MultiKrum`, `CenteredClipping`.
        server: an optax optimiser for the server's step, with minus the mean difference as its gradient: for
            the exchanges of the level "main" that have a reference point.
        secure: over a network, sites mask what they send, so that the server learns only sums of uploads,
            metrics and counts, in every exchange of a run. It needs three sites, a method that averages, and
            the policy ``"wait"``. The other engines compute the same sum without masks.
        examples: clipping and noise for single samples, at each client: `Examples`.
        seeded: whether the noise and the draws of `Poisson` follow from the run's seed. Then the run can be
            repeated, but anyone who knows the seed can subtract the noise. False also uses random words from
            the operating system: for published results, and for several runs on the same samples. The server
            of a network with noise always uses them.
        delta: δ of the (ε, δ) in the history, if there is noise; None: 1/(10 · clients), for single samples
            1/(10 · the samples of the largest client).
        epsilon: the privacy budget: the run ends before the round that would exceed it; None: unlimited.
    """

    clip: float | Adaptive | None = None
    noise: float | None = None
    noise_at: Literal["server", "clients", "each"] = "server"
    compress: Compressor | None = None
    feedback: Feedback | None = "auto"
    mean: Robust | Attack | None = None
    server: optax.GradientTransformation | None = None
    secure: bool = False
    examples: Examples | None = None
    seeded: bool = True
    delta: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if not (self.examples is None or isinstance(self.examples, Examples)):
            raise TypeError(f"Channel: examples must be fs.Examples(clip, noise), but is {self.examples!r}.")
        if isinstance(self.compress, type) or not (self.compress is None or hasattr(self.compress, "omega")):
            raise TypeError(
                f"Channel: compress must be a compressor such as fs.TopK(0.1), but is {self.compress!r}."
            )
        if not (self.mean is None or isinstance(self.mean, Robust | Attack)):
            raise TypeError(f"Channel: mean must be a robust mean such as fs.Median(), but is {self.mean!r}.")
        if self.server is not None:
            object.__setattr__(self, "server", first_like(self.server))
        for name in ("clip", "noise"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            low = 0 if name == "noise" else np.nextafter(0, 1)
            if not (value is None or isinstance(value, Adaptive) or (number and value >= low)):
                raise ValueError(f"Channel: {name} must be a positive number or None, but is {value!r}.")
        if self.noise_at not in ("server", "clients", "each"):
            raise ValueError(
                f"Channel: noise_at must be 'server', 'clients' or 'each', not {self.noise_at!r}."
            )
        if self.feedback not in ("auto", "ef", "ef21", None):
            raise ValueError(
                f"Channel: feedback must be 'auto', 'ef', 'ef21' or None, not {self.feedback!r}."
            )
        for refused in (self._noise_refused(), self._mean_refused(), self._secure_refused()):
            if refused is not None:
                raise ValueError(f"Channel: {refused}")

    def _noise_refused(self) -> str | None:
        if self.examples is not None and self.noise is not None:
            return (
                "noise hides clients, examples= single samples, and a run has one ε. Give one of them; "
                "noise_at='each' hides samples as well as clients."
            )
        if self.noise is None and self.examples is None:
            given = "delta" if self.delta is not None else "epsilon" if self.epsilon is not None else None
            return given and f"{given} is a privacy parameter, which needs clip and noise, or examples."
        if self.noise is None:
            return None
        if self.clip is None:
            return "noise needs clip, because its standard deviation is a multiple of it."
        if isinstance(self.clip, Adaptive) and self.noise > 0 and self.clip.noise <= 0:
            return "an adaptive clip counts uploads, and this count needs noise too: give Adaptive(noise=…)."
        if self.compress is not None and self.feedback in ("ef", "ef21"):
            return (
                "error feedback adds unbounded terms from earlier rounds, which the noise does not hide. "
                "Give feedback=None with noise."
            )
        if self.noise_at == "clients" and self.compress is not None and not self.compress.shared:
            return (
                "with noise_at='clients' the parts of the noise add up in the mean, but not those of "
                "compressed uploads. Give noise_at='server' or 'each', or fs.RandK, whose places all share."
            )
        return None

    def _mean_refused(self) -> str | None:
        if self.mean is None:
            return None
        if self.noise is not None and self.noise_at != "each":
            return (
                "a robust mean depends on single uploads, and one client may move it further than the noise "
                "of a mean hides. Give noise_at='each', or leave mean= out."
            )
        return (
            "an adaptive clip needs the plain mean: leave mean= out."
            if isinstance(self.clip, Adaptive)
            else None
        )

    def _secure_refused(self) -> str | None:
        if not self.secure:
            return None
        if self.mean is not None:
            return "a robust mean needs single uploads, which secure=True hides: give only one of them."
        if self.compress is not None:
            return (
                "a masked upload cannot be compressed, because masks are random: leave compress= or "
                "secure=True out."
            )
        return None

    @property
    def trivial(self) -> bool:
        """Whether uploads are left unchanged."""
        parts = self.clip, self.compress, self.mean, self.examples, self.server
        return all(part is None for part in parts)

    @property
    def noisy(self) -> bool:
        """Whether uploads or samples get noise."""
        return bool(self.noise) or (self.examples is not None and bool(self.examples.noise))


tree.register(Channel, lambda c: {n for n in ("clip", "noise", "examples") if getattr(c, n) is not None})


@dataclass(frozen=True)
class Dropouts:
    """Clients that drop out of a round: at random, by a trace, or because they are too slow.

    The others' weights are scaled up. If all clients drop out, the state does not change.

    Args:
        probability: the probability that a client drops out of a round, independently.
        when: ``"before"`` the client computes, or ``"after"``: its upload is lost, but its memory has
            changed, which the server does not know.
        trace: which clients are available: booleans (rounds, clients), repeated after the last round; for
            example those that a network's policy "drop" left (``present/NAME`` in the history).
        seconds: each client's simulated seconds for a round: (clients,), or (rounds, clients), repeated after
            the last round.
        deadline: the seconds after which the server stops waiting; needs ``seconds``.
    """

    probability: Annotated[float, Number("a probability in [0, 1)", 0.0, math.nextafter(1, 0))] = 0.0
    when: Literal["before", "after"] = "before"
    trace: Any = None
    seconds: Any = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.seconds is None) != (self.deadline is None):
            raise ValueError("Dropouts: deadline needs seconds=, and seconds need deadline=.")
        for name, kind in (("trace", bool), ("seconds", float)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(value, kind))

    def check(self, clients: int) -> None:
        """Raise if the arrays are for another number of clients."""
        for name, dimensions in (("trace", (2,)), ("seconds", (1, 2))):
            shape = np.shape(getattr(self, name))
            if shape and (len(shape) not in dimensions or shape[-1] != clients or 0 in shape):
                raise ValueError(
                    f"Dropouts: {name} must have the shape (rounds, {clients}), as there are {clients} "
                    f"clients, but has {shape}."
                )

    def answering(self, key: Key, r: Integer, clients: int) -> Array:
        """Whether each client answers in round r."""
        here = jax.random.bernoulli(key, 1 - self.probability, (clients,))
        if self.trace is not None:
            trace = jnp.asarray(self.trace)
            here &= trace[r % trace.shape[0]]
        if self.seconds is not None and self.deadline is not None:
            seconds = jnp.atleast_2d(jnp.asarray(self.seconds))
            here &= seconds[r % seconds.shape[0]] <= self.deadline
        return here


tree.register(Dropouts, lambda d: {n for n in vars(d) if n != "when" and getattr(d, n) is not None})


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each client takes part in each round with a probability, independently.

    Privacy accounting needs it: cohorts of a fixed size have almost no amplification. Programs need a fixed
    size, so a round has room for ``capacity`` clients; if more are drawn, which almost never happens, some
    are left out.

    Args:
        q: the probability.
        capacity: the largest cohort; None: q·m plus six standard deviations, at most m.
    """

    q: Annotated[float, Number("a probability in (0, 1]", 0.0, 1.0, open_low=True)]
    capacity: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def room(self, clients: int) -> int:
        """The largest cohort."""
        if self.capacity is not None:
            return min(self.capacity, clients)
        return min(clients, int(np.ceil(self.q * clients + 6 * np.sqrt(self.q * (1 - self.q) * clients))) + 1)


@dataclass(frozen=True)
class Buffered:
    """Asynchronous rounds with a buffer (FedBuff, Nguyen et al. 2022): nobody waits for slow clients.

    All clients compute all the time. In each round the server takes the uploads of ``size`` clients, drawn
    uniformly: each computed from the point of its previous draw, and now gets the current one. An upload
        counts as a difference to the point that it was computed from. Only for methods whose round has one
        exchange, a mean.

    Args:
        size: the number of uploads in a round.
    """

    size: Count

    def __post_init__(self) -> None:
        check_fields(self)


Channels = Channel | Mapping[str, Channel]


def chosen(channels: Channels | None, level: str, phase: str) -> Channel:
    """The channel of an exchange: by its phase's name, else its level's, else ``"*"``.

    A single channel applies to all exchanges, but compresses, and takes server steps in, only those of the
    level "main".
    """
    if isinstance(channels, Channel):
        return channels if level == "main" else _whole(channels)
    for name in (phase, level, EVERYWHERE):
        if channels is not None and name in channels:
            return channels[name]
    return Channel()


def _whole(channel: Channel) -> Channel:
    return replace(channel, compress=None, feedback=None, server=None)


def given_by(channels: Channels | None) -> list[Channel]:
    """All channels of an argument ``channel=``."""
    return (
        list(channels.values()) if isinstance(channels, Mapping) else [] if channels is None else [channels]
    )


def check_channels(channels: object) -> None:
    """Raise if this is neither a channel nor a mapping of channels by name."""
    if isinstance(channels, Mapping):
        for name, one in channels.items():
            if not (isinstance(name, str) and isinstance(one, Channel)):
                raise TypeError(
                    f"channel: {name!r} must be a phase, a level or '*' with an fs.Channel, not {one!r}."
                )
    elif not (channels is None or isinstance(channels, Channel)):
        raise TypeError(f"channel must be an fs.Channel or a dict of them, but is {channels!r}.")
