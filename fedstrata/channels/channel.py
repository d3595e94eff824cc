"""What a user says of uploads on their way, and of who answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedstrata.channels.attacks import Attack
from fedstrata.channels.clipping import Adaptive
from fedstrata.channels.compression import Compressor
from fedstrata.channels.examples import Examples
from fedstrata.channels.means import Robust
from fedstrata.core import tree

Feedback = Literal["auto", "ef", "ef21"]
EVERYWHERE = "*"


@dataclass(frozen=True)
class Channel:
    """What happens to each upload, as a difference to the reference that its method names.

    At a client: clip, add noise, compress. At the server: take the mean, add noise. See ``docs/channels.md``.

    Args:
        clip: the bound C of an upload's norm; a number, or `Adaptive`.
        noise: the noise multiplier z: the mean gets Gaussian noise of standard deviation z · C · (largest
            weight).
        noise_at: ``"server"`` adds it to the mean. ``"clients"`` adds a part of it to each upload, so that
            the mean has as much: nobody sees an upload without noise, and a single one has √m times less than
            it needs by itself. ``"each"`` adds all of it to each upload: no one needs to be trusted.
        compress: what is sent in its place: `TopK`, `RandK`, `QSGD`, `Sign`, `Cast`. The ledger counts that;
            the network engine sends decoded numbers in this version, so that more bytes travel there.
        feedback: what becomes of what a compressor leaves out: ``"ef"`` adds it to the next upload (Seide et
            al. 2014). ``"ef21"`` sends differences to what the server has of this client (Richtárik et al.
            2021; for an unbiased compressor DIANA, Mishchenko et al. 2019). ``"auto"`` is the one that the
            method bears, None drops it.
        mean: a robust mean in place of the weighted one: `TrimmedMean`, `Median`, `GeometricMedian`, `Krum`,
            `MultiKrum`, `CenteredClipping`.
        secure: over a network, sites mask what they send so that the server learns sums alone, of uploads,
            metrics and counts; for every exchange of a run. It needs three sites, methods that average, and
            the policy ``"wait"``. The other engines, where nothing travels, compute the same sum plainly.
        examples: bounds and noise for single samples, at each client: `Examples`.
        delta: δ of the (ε, δ) in the history, where there is noise; None is 1/(10 · clients), for single
            samples 1/(10 · the samples of the largest client).
        epsilon: the budget: the run ends before the round that would exceed it; None is no budget.
    """

    clip: float | Adaptive | None = None
    noise: float | None = None
    noise_at: Literal["server", "clients", "each"] = "server"
    compress: Compressor | None = None
    feedback: Feedback | None = "auto"
    mean: Robust | Attack | None = None
    secure: bool = False
    examples: Examples | None = None
    delta: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if not (self.examples is None or isinstance(self.examples, Examples)):
            raise TypeError(f"Channel: examples must be fs.Examples(clip, noise), but is {self.examples!r}.")
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
            return given and f"{given} is about privacy, which needs clip and noise, or examples."
        if self.noise is None:
            return None
        if self.clip is None:
            return "noise needs clip, the bound that it is a multiple of."
        if isinstance(self.clip, Adaptive) and self.noise > 0 and self.clip.noise <= 0:
            return "an adaptive clip counts uploads, and the count needs noise too: Adaptive(noise=…)."
        if self.compress is not None and self.feedback in ("ef", "ef21"):
            return (
                "what feedback adds to an upload comes from earlier rounds, without a bound, so that noise "
                "does "
                "not hide it. Give feedback=None with noise."
            )
        return None

    def _mean_refused(self) -> str | None:
        if self.mean is None:
            return None
        if self.noise is not None and self.noise_at != "each":
            return (
                "a robust mean looks at single uploads, and one client may move it further than noise for a "
                "mean "
                "hides. Give noise_at='each', or the plain mean."
            )
        return "an adaptive clip counts uploads in a plain mean." if isinstance(self.clip, Adaptive) else None

    def _secure_refused(self) -> str | None:
        if not self.secure:
            return None
        if self.mean is not None:
            return "a robust mean looks at single uploads, which secure=True hides: give one of them."
        if self.compress is not None:
            return (
                "a masked upload has as many bits as one that is not compressed, since masks look random: "
                "leave compress= or secure=True out."
            )
        return None

    @property
    def trivial(self) -> bool:
        """Whether it changes nothing."""
        return self.clip is None and self.compress is None and self.mean is None and self.examples is None


tree.register(Channel, lambda c: {n for n in ("clip", "noise", "examples") if getattr(c, n) is not None})


@dataclass(frozen=True)
class Dropouts:
    """Clients that do not answer in a round, each by itself.

    The others' weights are scaled up. Where nobody answers, nothing moves.

    Args:
        probability: of each client in each round.
        when: ``"before"`` it computes, or ``"after"``: its upload is lost, and it has changed what it
            remembers, of which the server knows nothing.
    """

    probability: float
    when: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ValueError(f"Dropouts: probability must be in [0, 1), but is {self.probability!r}.")
        if self.when not in ("before", "after"):
            raise ValueError(f"Dropouts: when must be 'before' or 'after', but is {self.when!r}.")


tree.register(Dropouts, lambda d: {"probability"})


@dataclass(frozen=True)
class Poisson:
    """Participation of each client in each round with a probability, by itself.

    It is what privacy accounting asks for: cohorts of a fixed size are hardly amplified. Programs need a
    fixed size, so a round has room for ``capacity`` clients; where more are drawn, which almost never
    happens, some of them are left out.

    Args:
        q: the probability.
        capacity: None is q·m plus six standard deviations, at most m.
    """

    q: float
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise ValueError(f"Poisson: q is a probability in (0, 1], but is {self.q!r}.")

    def room(self, clients: int) -> int:
        """How many clients of a round there is room for."""
        if self.capacity is not None:
            return min(self.capacity, clients)
        return min(clients, int(np.ceil(self.q * clients + 6 * np.sqrt(self.q * (1 - self.q) * clients))) + 1)


Channels = Channel | Mapping[str, Channel]


def chosen(channels: Channels | None, level: str, phase: str) -> Channel:
    """The channel of an exchange: by its phase's name, else its level's, else ``"*"``.

    One channel is for all exchanges; what it compresses are those of the level "main".
    """
    if isinstance(channels, Channel):
        return channels if level == "main" or channels.compress is None else _whole(channels)
    for name in (phase, level, EVERYWHERE):
        if channels is not None and name in channels:
            return channels[name]
    return Channel()


def _whole(channel: Channel) -> Channel:
    return replace(channel, compress=None, feedback=None)


def check_channels(channels: object) -> None:
    """Raise where this is neither a channel nor channels by name."""
    if isinstance(channels, Mapping):
        for name, one in channels.items():
            if not (isinstance(name, str) and isinstance(one, Channel)):
                raise TypeError(
                    f"channel: {name!r} must be a phase, a level or '*' with an fs.Channel, not {one!r}."
                )
    elif not (channels is None or isinstance(channels, Channel)):
        raise TypeError(f"channel must be an fs.Channel or a dict of them, but is {channels!r}.")
