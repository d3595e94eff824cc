"""Compressors: the payload that replaces a vector, and its reconstruction.

    payload = encode(key, v)      arrays that travel, which the ledger counts
    v̂ = decode(key, payload, d)   the same on both sides; ``key`` is shared and does not travel

Contractive compressors have E‖v̂ − v‖² ≤ (1 − δ)‖v‖²; unbiased ones have E v̂ = v and E‖v̂ − v‖² ≤ ω‖v‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedstrata.core.hyperparameters import Number, check_fields
from fedstrata.core.types import Array, Key, PyTree, Real

Share = Annotated[float, Number("the fraction of numbers that is sent, in (0, 1]", 0.0, 1.0, open_low=True)]
LONG = 512  # from this length on, bisection finds the largest numbers: a sort takes longer on a CPU
SAMPLED, STRIDE = 2**13, 17  # from this length on, every 17th number tells first where to look
EXPECTED = 8  # passes, at most, before the interval is halved each time
BUCKET = 512  # numbers that share a scale in `QSGD`, so that the error does not grow with d


class Compressor(Protocol):
    """The interface of compressors; see the module.

    Attributes:
        unbiased: whether E v̂ = v; then `omega` of d numbers is ω, a bound on E‖v̂ − v‖²/‖v‖².
        shared: whether all clients use the same random numbers.
    """

    @property
    def unbiased(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    def omega(self, d: int) -> float: ...
    def encode(self, key: Key, v: Array) -> PyTree: ...
    def decode(self, key: Key, payload: PyTree, d: int) -> Array: ...


def read(compressor: Compressor, key: Key, v: Array) -> Array:
    """The server's reconstruction of v; for some compressors by a faster computation."""
    if isinstance(compressor, TopK | RandK | QSGD):
        return compressor.kept(key, v)
    return compressor.decode(key, compressor.encode(key, v), v.size).astype(v.dtype)


class Pace(NamedTuple):
    """What a compressor allows.

    Attributes:
        slower: the factor by which step sizes must be shorter.
        rate: the most by which errors fall in a round.
    """

    slower: float
    rate: float


def pace(compressor: Compressor, d: int, clients: int) -> Pace:
    """The pace of a method with error feedback under a compressor of d numbers.

    δ: 1 + √(1−δ)/(1 − √(1−δ)) and (1 − √(1−δ))/2 (EF21, Richtárik et al. 2021, Theorem 2, with L̃ = L); ω:
    1 + 6ω/m and 1/(2(1 + ω)) (DIANA, Horváth et al. 2019), where clients that draw the same random numbers
    count as one. Both with δ or ω of a normal vector: that of the worst one is several times worse.
    """
    match compressor:
        case TopK():  # the part of the largest numbers in ‖v‖²
            normal = NormalDist()
            z = normal.inv_cdf(1 - entries(compressor.share, d) / d / 2) if compressor.share < 1 else 0.0
            delta = entries(compressor.share, d) / d + 2 * z * normal.pdf(z)
        case Sign():  # half of a normal vector's: what is left out soon has a few large numbers
            delta = 1 / math.pi
        case QSGD():
            most = math.sqrt(2 * math.log(max(min(d, BUCKET), 2)))  # the largest of normal numbers
            omega = (most / compressor.levels) ** 2 / 6 if compressor.levels > 1 else max(0.8 * most - 1, 0.0)
            delta = 1 / (1 + omega)
        case RandK():
            omega = d / entries(compressor.share, d) - 1
            delta = 1 / (1 + omega)
        case Cast():
            return Pace(1.0, 1.0)
        case _:
            omega = compressor.omega(d)
            delta = 1 / (1 + omega)
    if compressor.unbiased:
        return Pace(1 + 6 * omega / (1 if compressor.shared else clients), 1 / (2 * (1 + omega)))
    root = math.sqrt(max(1 - delta, 0.0))
    if root == 1:
        raise ValueError(f"how {compressor!r} contracts is not known, so steps cannot be planned for it.")
    return Pace(1 / (1 - root), (1 - root) / 2 if root > 0 else 1.0)


def entries(share: float, d: int) -> int:
    """The number k of d entries that are sent, at least one."""
    return max(1, min(d, math.ceil(share * d - 1e-9)))


@dataclass(frozen=True)
class Biased:
    """Base of the biased compressors."""

    unbiased: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    def omega(self, d: int) -> float:
        """Infinite, because v̂ is biased."""
        return math.inf


def largest(v: Array, k: int, short: int = 0) -> Array:
    """A mask of the k numbers of the largest size; of equal ones the first count.

    Sizes that differ by less than 2⁻²⁴ of the largest count as equal. If up to ``short`` of the k may be
    missing, it takes a third of the passes: in differences of points, which are rounded, ties are common.
    """
    d, guesses = v.size, list[Array]()
    if short and d >= SAMPLED:
        some, part = v[::STRIDE], k / STRIDE
        off = 2 * math.sqrt(part) + 1  # two standard deviations of the sample's count
        wanted = jnp.array([part + off, max(part - off, 2.0)])
        guesses = list(jax.vmap(lambda w: _threshold(some, w + off / 4, w - off / 4, [])[1])(wanted))
    low, high, above = _threshold(v, k, k - short, guesses)
    size, place = jnp.abs(v), jax.lax.iota(jnp.int32, d)
    equal = (size > low) & (size <= high)

    def lengthen(now: tuple[Array, Array]) -> tuple[Array, Array]:
        until, step = now[0] + now[1], now[1] // 2
        return jnp.where(_count(equal & (place < until)) <= k - above, until, now[0]), step

    until, _ = jax.lax.while_loop(
        lambda now: (now[1] > 0) & (above < k - short),
        lengthen,
        (jnp.int32(0), jnp.int32(1 << (d.bit_length() - 1))),
    )
    return (size > high) | (equal & (place < until))


def _threshold(v: Array, most: Real, least: Real, guesses: list[Array]) -> tuple[Array, Array, Array]:
    """Two bounds, and how many sizes exceed the upper one: from ``least`` to ``most``, if possible.

    It tries the guesses, then interpolates between the bounds, as counts of sizes often fall exponentially.
    Every third time, and in the end each time, it halves the interval.
    """
    wanted = (most + least) / 2

    def narrow(ends: tuple[Array, Array, Array, Array, Any]) -> tuple[Array, Array, Array, Array, Any]:
        low, high, under, above, j = ends
        expected = jnp.log(under / wanted) / jnp.log(under / jnp.maximum(above, 0.5))
        part = jnp.where((j < EXPECTED) & (j % 3 > 0), jnp.clip(expected, 0.02, 0.98), 0.5)
        middle = low + (high - low) * part.astype(low.dtype)
        for i, guess in enumerate(guesses):
            middle = jnp.where(j == i, jnp.clip(guess, low, high), middle)
        many = _count(jnp.abs(v) > middle)
        low, under = jnp.where(many > most, middle, low), jnp.where(many > most, many, under)
        return low, jnp.where(many > most, high, middle), under, jnp.where(many > most, above, many), j + 1

    top = jnp.abs(v).max()
    none = jnp.zeros_like(_count(v > top))
    first = jnp.zeros_like(top), top, none + v.size, none, jnp.int32(0)
    low, high, _, above, _ = jax.lax.while_loop(
        lambda now: (now[4] < EXPECTED + 24) & (now[3] < least), narrow, first
    )
    return low, high, above


def _count(mask: Array) -> Array:
    # sums of float32 are faster, and exact below 2²⁴
    return mask.astype(jnp.float32 if mask.size < 2**24 else jnp.int32).sum()


@dataclass(frozen=True)
class TopK(Biased):
    """The largest numbers of each array, with their indices: δ = k/d; of 512 numbers or more at least 0.99 k.

    Args:
        share: the fraction k/d of the numbers that is sent.

    >>> TopK(0.5).decode(None, TopK(0.5).encode(None, jnp.array([1.0, -3.0, 2.0, 0.5])), 4).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """

    share: Share

    def __post_init__(self) -> None:
        check_fields(self)

    def encode(self, key: Key, v: Array) -> Any:
        """Values and indices; only values if all are sent."""
        k = entries(self.share, v.size)
        if k == v.size:
            return v
        if v.size < LONG:
            places = jax.lax.top_k(jnp.abs(v), k)[1]
        else:
            places = jnp.nonzero(largest(v, k, k // 100), size=k, fill_value=v.size)[0]
        return v.at[places].get(mode="fill", fill_value=0), places.astype(
            jnp.uint16 if v.size < 2**16 else jnp.uint32
        )

    def kept(self, key: Key, v: Array) -> Array:
        """``decode(encode(v))``, five times as fast for long arrays on a CPU."""
        k = entries(self.share, v.size)
        if v.size < LONG or k == v.size:
            return self.decode(key, self.encode(key, v), v.size)
        return jnp.where(largest(v, k, k // 100), v, 0)

    def decode(self, key: Key, payload: Any, d: int) -> Array:
        """Zero elsewhere."""
        if not isinstance(payload, tuple):
            return payload
        values, places = payload
        return jnp.zeros((d,), values.dtype).at[places].set(values, mode="drop")


@dataclass(frozen=True)
class RandK:
    """Numbers at random indices, the same for all clients, from a shared seed.

    Args:
        share: the fraction k/d of the numbers that is sent.
        scaled: whether to multiply by d/k, which makes it unbiased with ω = d/k − 1; otherwise δ = k/d.
    """

    share: Share
    scaled: bool = False
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def unbiased(self) -> bool:
        """Whether it is scaled."""
        return self.scaled

    def omega(self, d: int) -> float:
        return d / entries(self.share, d) - 1 if self.scaled else math.inf

    def _drawn(self, key: Key, d: int) -> Array:
        """A mask of the numbers that are sent: those with the largest random numbers, without a sort."""
        return largest(jax.random.uniform(key, (d,)), entries(self.share, d))

    def _places(self, key: Key, d: int) -> Array:
        return jnp.nonzero(self._drawn(key, d), size=entries(self.share, d))[0]

    def encode(self, key: Key, v: Array) -> Array:
        """The values; the indices follow from the key."""
        return v if entries(self.share, v.size) == v.size else v[self._places(key, v.size)]

    def kept(self, key: Key, v: Array) -> Array:
        """``decode(encode(v))``, with a mask that is the same for all clients."""
        k = entries(self.share, v.size)
        if k == v.size:
            return v
        return jnp.where(self._drawn(key, v.size), v * (v.size / k if self.scaled else 1), 0)

    def decode(self, key: Key, payload: Array, d: int) -> Array:
        """Zero elsewhere."""
        if payload.size == d:
            return payload
        out = jnp.zeros((d,), payload.dtype).at[self._places(key, d)].set(payload)
        return out * (d / payload.size) if self.scaled else out


@dataclass(frozen=True)
class QSGD:
    """Stochastic rounding of each number to s levels of the largest (Alistarh et al. 2017, section 5).

    Blocks of 512 numbers share their largest: ω ≤ min(512/4s², √512/s) with s = 2^(bits−1) − 1. In units of
    the norm, as in the paper's theory, the error is several times as large.

    Args:
        bits: 2, 4 or 8 bits per number, including the sign.
        unbiased: False scales the levels for the least squared error, as error feedback needs: the error is
            then always shorter than v, but v̂ is biased.
    """

    bits: int = 8
    unbiased: bool = True
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"QSGD: bits must be 2, 4 or 8, but is {self.bits!r}.")

    @property
    def levels(self) -> int:
        """The number s of positive levels."""
        return 2 ** (self.bits - 1) - 1

    def omega(self, d: int) -> float:
        if not self.unbiased:
            return math.inf
        together = min(d, BUCKET)
        return min(together / (4 * self.levels**2), math.sqrt(together) / self.levels)

    def rounded(self, key: Key, v: Array) -> tuple[Array, Array]:
        """The signed levels of the numbers in each bucket, and the largest of every bucket."""
        rows = jnp.pad(v, (0, -v.size % BUCKET)).reshape(-1, BUCKET) if v.size > BUCKET else v[None]
        most = jnp.abs(rows).max(axis=1)
        scaled = jnp.abs(rows) / jnp.where(most > 0, most, 1)[:, None] * self.levels  # most may be tiny
        levels = jnp.minimum(jnp.floor(scaled + _fractions(key, rows)), self.levels)
        if not self.unbiased:
            squares = (levels**2).sum(axis=1)
            most = most * (scaled * levels).sum(axis=1) / jnp.where(squares > 0, squares, 1)
        return jnp.where(rows < 0, -levels, levels), most

    def kept(self, key: Key, v: Array) -> Array:
        """``decode(encode(v))``, without packing."""
        levels, most = self.rounded(key, v)
        return (levels * (most[:, None] / self.levels)).reshape(-1)[: v.size]

    def encode(self, key: Key, v: Array) -> tuple[Array, Array]:
        """The packed levels, and the largest of every bucket."""
        levels, most = self.rounded(key, v)
        codes = (levels.reshape(-1)[: v.size] + self.levels).astype(jnp.uint8)
        each = 8 // self.bits
        together = jnp.pad(codes, (0, -v.size % each)).reshape(-1, each)
        shifts = jnp.arange(each, dtype=jnp.uint8) * self.bits
        return (together << shifts).sum(1, dtype=jnp.uint8), most

    def decode(self, key: Key, payload: tuple[Array, Array], d: int) -> Array:
        """Levels times the largest."""
        packed, most = payload
        shifts = jnp.arange(8 // self.bits, dtype=jnp.uint8) * self.bits
        codes = ((packed[:, None] >> shifts) & (2**self.bits - 1)).reshape(-1)[:d]
        levels = codes.astype(most.dtype) - self.levels
        rows = jnp.pad(levels, (0, -d % BUCKET)).reshape(-1, BUCKET) if d > BUCKET else levels[None]
        return (rows * (most[:, None] / self.levels)).reshape(-1)[:d]


def _fractions(key: Key, rows: Array) -> Array:
    """A random number in [0, 1) of 16 bits for each entry: more bits would be lost in rounding.

    A mixing function of places (Ettinger's "lowbias32") is good enough for rounding, and takes a fifth of the
    time of JAX's generator, which draws its two seeds.
    """
    half = -(-rows.shape[1] // 2)
    one, other = jax.random.bits(key, (2,), jnp.uint32)
    words = (jnp.arange(rows.shape[0] * half, dtype=jnp.uint32).reshape(-1, half) + one) * jnp.uint32(
        0x9E3779B9
    )
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor) + other
    words = words ^ (words >> 16)
    both = jnp.concatenate([words & 0xFFFF, words >> 16], axis=1)[:, : rows.shape[1]]
    return both.astype(rows.dtype) / 2**16


@dataclass(frozen=True)
class Sign(Biased):
    """The signs, one bit each, and the mean absolute value: δ = ‖v‖₁²/(d‖v‖²)."""

    def encode(self, key: Key, v: Array) -> tuple[Array, Array]:
        """The packed signs, and the mean absolute value."""
        return jnp.packbits(v >= 0), jnp.abs(v).mean()

    def decode(self, key: Key, payload: tuple[Array, Array], d: int) -> Array:
        """The signs times the mean absolute value."""
        bits, size = payload
        return jnp.where(jnp.unpackbits(bits, count=d) > 0, size, -size)


@dataclass(frozen=True)
class Cast(Biased):
    """Conversion to another floating-point format.

    Args:
        dtype: such as ``"bfloat16"``, ``"float16"`` or ``"float8_e4m3fn"``.
    """

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating):
            raise ValueError(f"Cast: dtype must be a floating-point format, but is {self.dtype!r}.")

    def encode(self, key: Key, v: Array) -> Array:
        """The same numbers, rounded."""
        return v.astype(self.dtype)

    def decode(self, key: Key, payload: Array, d: int) -> Array:
        """The same numbers in the default float type."""
        return payload.astype(jnp.result_type(float))
