"""Compressors: the payload that replaces a vector, and its reconstruction.

    payload = encode(key, v)      arrays that travel, which the ledger counts
    v̂ = decode(key, payload, d)   the same on both sides; ``key`` is shared and does not travel

Contractive compressors have E‖v̂ − v‖² ≤ (1 − δ)‖v‖²; unbiased ones have E v̂ = v and E‖v̂ − v‖² ≤ ω‖v‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from fedstrata.core.types import Array, Key, PyTree

LONG = (
    4096  # numbers from which the largest are found by a threshold: a sort takes ten times as long on a CPU
)
BUCKET = 512  # numbers that share a norm in `QSGD`, so that the error does not grow with d


class Compressor(Protocol):
    """The interface of compressors; see the module.

    Attributes:
        unbiased: whether E v̂ = v; then `omega` of d numbers is ω, a bound on E‖v̂ − v‖²/‖v‖².
        shared: whether all clients use the same random numbers.
    """

    @property
    def unbiased(self) -> bool: ...  # noqa: D102 (here and below: see the module)
    @property
    def shared(self) -> bool: ...  # noqa: D102
    def omega(self, d: int) -> float: ...  # noqa: D102
    def encode(self, key: Key, v: Array) -> PyTree: ...  # noqa: D102
    def decode(self, key: Key, payload: PyTree, d: int) -> Array: ...  # noqa: D102


def read(compressor: Compressor, key: Key, v: Array) -> Array:
    """The server's reconstruction of v; for some compressors by a faster computation."""
    if isinstance(compressor, TopK | RandK):
        return compressor.kept(key, v)
    return compressor.decode(key, compressor.encode(key, v), v.size).astype(v.dtype)


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


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(
            f"{name}: share is the fraction of numbers that is sent, in (0, 1], but is {share!r}."
        )


def _threshold(size: Array, k: int) -> Array:
    """A threshold that at most k of the numbers exceed, by bisection."""

    def step(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        many = (size > middle).sum() > k
        return jnp.where(many, middle, ends[0]), jnp.where(many, ends[1], middle)

    return jax.lax.fori_loop(0, 24, step, (jnp.zeros((), size.dtype), size.max()))[1]


@dataclass(frozen=True)
class TopK(Biased):
    """The largest numbers of each array, with their indices: δ = k/d.

    Args:
        share: the fraction k/d of the numbers that is sent.

    >>> TopK(0.5).decode(None, TopK(0.5).encode(None, jnp.array([1.0, -3.0, 2.0, 0.5])), 4).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """

    share: float

    def __post_init__(self) -> None:
        _check_share("TopK", self.share)

    def encode(self, key: Key, v: Array) -> Any:
        """Values and indices; only values if all are sent."""
        k = entries(self.share, v.size)
        if k == v.size:
            return v
        size = jnp.abs(v)
        if v.size < LONG:
            places = jax.lax.top_k(size, k)[1]
        else:
            places = jnp.nonzero(size > _threshold(size, k), size=k, fill_value=v.size)[0]
        return v.at[places].get(mode="fill", fill_value=0), places.astype(_index(v.size))

    def kept(self, key: Key, v: Array) -> Array:
        """``decode(encode(v))``, five times as fast for long arrays on a CPU."""
        k, size = entries(self.share, v.size), jnp.abs(v)
        if v.size < LONG or k == v.size:
            return self.decode(key, self.encode(key, v), v.size)
        return jnp.where(size > _threshold(size, k), v, 0)

    def decode(self, key: Key, payload: Any, d: int) -> Array:
        """Zero elsewhere."""
        if not isinstance(payload, tuple):
            return payload
        values, places = payload
        return jnp.zeros((d,), values.dtype).at[places].set(values, mode="drop")


def _index(d: int) -> Any:
    return jnp.uint16 if d < 2**16 else jnp.uint32


@dataclass(frozen=True)
class RandK:
    """Numbers at random indices, the same for all clients, from a shared seed.

    Args:
        share: the fraction k/d of the numbers that is sent.
        scaled: whether to multiply by d/k, which makes it unbiased with ω = d/k − 1; otherwise δ = k/d.
    """

    share: float
    scaled: bool = False
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_share("RandK", self.share)

    @property
    def unbiased(self) -> bool:
        """Whether it is scaled."""
        return self.scaled

    def omega(self, d: int) -> float:
        """See `Compressor`."""
        return d / entries(self.share, d) - 1 if self.scaled else math.inf

    def _places(self, key: Key, d: int) -> Array:
        return jax.random.permutation(key, d)[: entries(self.share, d)]

    def encode(self, key: Key, v: Array) -> Array:
        """The values; the indices follow from the key."""
        return v if entries(self.share, v.size) == v.size else v[self._places(key, v.size)]

    def kept(self, key: Key, v: Array) -> Array:
        """``decode(encode(v))``, with a mask that is the same for all clients."""
        k = entries(self.share, v.size)
        mask = jnp.zeros((v.size,), v.dtype).at[self._places(key, v.size)].set(1)
        return v if k == v.size else v * mask * (v.size / k if self.scaled else 1)

    def decode(self, key: Key, payload: Array, d: int) -> Array:
        """Zero elsewhere."""
        if payload.size == d:
            return payload
        out = jnp.zeros((d,), payload.dtype).at[self._places(key, d)].set(payload)
        return out * (d / payload.size) if self.scaled else out


@dataclass(frozen=True)
class QSGD:
    """Stochastic rounding of each number in units of the norm (Alistarh et al. 2017).

    Each 512 numbers share a norm: ω ≤ min(512/s², √512/s) with s = 2^(bits−1) − 1 levels.

    Args:
        bits: 2, 4 or 8 bits per number, including the sign.
    """

    bits: int = 8
    unbiased: ClassVar[bool] = True
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"QSGD: bits must be 2, 4 or 8, but is {self.bits!r}.")

    @property
    def levels(self) -> int:
        """The number s of positive levels."""
        return 2 ** (self.bits - 1) - 1

    def omega(self, d: int) -> float:
        """See `Compressor`."""
        together = min(d, BUCKET)
        return min(together / self.levels**2, math.sqrt(together) / self.levels)

    def encode(self, key: Key, v: Array) -> tuple[Array, Array]:
        """The packed levels, and the norm of every bucket."""
        rows = jnp.pad(v, (0, -v.size % BUCKET)).reshape(-1, BUCKET) if v.size > BUCKET else v[None]
        norms = jnp.linalg.norm(rows, axis=1)
        scaled = jnp.abs(rows) / jnp.where(norms > 0, norms, 1)[:, None] * self.levels
        up = jax.random.uniform(key, rows.shape, rows.dtype) < scaled - jnp.floor(scaled)
        levels = jnp.sign(rows) * jnp.minimum(jnp.floor(scaled) + up, self.levels)
        codes = (levels.reshape(-1)[: v.size] + self.levels).astype(jnp.uint8)
        each = 8 // self.bits
        together = jnp.pad(codes, (0, -v.size % each)).reshape(-1, each)
        shifts = jnp.arange(each, dtype=jnp.uint8) * self.bits
        return (together << shifts).sum(1, dtype=jnp.uint8), norms

    def decode(self, key: Key, payload: tuple[Array, Array], d: int) -> Array:
        """Levels times norms."""
        packed, norms = payload
        shifts = jnp.arange(8 // self.bits, dtype=jnp.uint8) * self.bits
        codes = ((packed[:, None] >> shifts) & (2**self.bits - 1)).reshape(-1)[:d]
        levels = codes.astype(norms.dtype) - self.levels
        rows = jnp.pad(levels, (0, -d % BUCKET)).reshape(-1, BUCKET) if d > BUCKET else levels[None]
        return (rows * (norms[:, None] / self.levels)).reshape(-1)[:d]


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
    """Another floating-point format.

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
