"""Robust means, which a few hostile uploads cannot move far.

Each is a function of stacked uploads (n, d) and of n booleans: whether each arrived. ``share`` is the
fraction f/n of clients that may be hostile. Two optional steps before the mean reduce heterogeneity:

    mixing      every upload becomes the mean of its n − f nearest ones, itself included (Allouah et al. 2023)
    bucketing   uploads are first averaged in random groups of s (Karimireddy et al. 2022)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array, Key


def hostile(share: float, here: Array) -> Array:
    """The number f of hostile clients among those that answer."""
    return jnp.ceil(share * here.sum() - 1e-6).astype(jnp.int32)


def distances(rows: Array, here: Array) -> Array:
    """Squared distances between uploads that arrived, infinite for others."""
    squares = (rows**2).sum(1)
    far = jnp.maximum(squares[:, None] + squares[None] - 2 * rows @ rows.T, 0)
    return jnp.where(here[:, None] & here[None], far, jnp.inf)


@dataclass(frozen=True)
class Robust:
    """Base of the robust means.

    Args:
        share: the fraction of clients that may be hostile, below one half.
        mixing: whether each upload is first averaged with its nearest ones.
        bucketing: the size s of the random groups that are averaged first; None leaves this out.
    """

    share: float = 0.2
    mixing: bool = False
    bucketing: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ValueError(
                f"{type(self).__name__}: share is the fraction of hostile clients, in [0, 0.5), but is "
                f"{self.share!r}."
            )
        if self.bucketing is not None and not (isinstance(self.bucketing, int) and self.bucketing >= 1):
            raise ValueError(f"{type(self).__name__}: bucketing must be a whole number ≥ 1 or None.")

    def __call__(self, key: Key, rows: Array, here: Array, index: Array) -> Array:
        """The robust mean of the rows that arrived; ``index`` has the clients' indices."""
        share = self.share
        if self.bucketing is not None and self.bucketing > 1:
            rows, here = self._buckets(key, rows, here)
            share = min(share * self.bucketing, 0.49)  # a hostile upload corrupts its group
        if self.mixing:
            near = jnp.argsort(distances(rows, here), axis=1)
            count = here.sum() - hostile(share, here)
            counts = (jnp.arange(rows.shape[0]) < count)[None, :, None]
            rows = jnp.where(counts, rows[near], 0).sum(1) / jnp.maximum(count, 1)
        return self.mean(rows, here, hostile(share, here))

    def _buckets(self, key: Key, rows: Array, here: Array) -> tuple[Array, Array]:
        assert self.bucketing is not None
        number = rows.shape[0]
        order = jnp.argsort(jnp.where(here, jax.random.uniform(key, (number,)), 2.0))  # the absent last
        pad = -number % self.bucketing
        kept = jnp.pad(jnp.where(here[:, None], rows, 0)[order], ((0, pad), (0, 0)))
        there = jnp.pad(here[order], (0, pad)).reshape(-1, self.bucketing)
        sums = kept.reshape(-1, self.bucketing, rows.shape[1]).sum(1)
        return sums / jnp.maximum(there.sum(1), 1)[:, None], there.any(1)

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        """The mean, given that f uploads may be hostile."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Robust):
    """The plain mean, which a single upload can move anywhere, to show the effect of an attack."""

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        return jnp.where(here[:, None], rows, 0).sum(0) / jnp.maximum(here.sum(), 1)


@lru_cache(maxsize=64)
def _stages(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Batcher's sorting network for n rows: by stage, each row's partner and whether it keeps the less."""
    partner: list[np.ndarray] = []
    less: list[np.ndarray] = []
    free = np.zeros(n, int)  # free: the first stage in which a row has no partner
    for p in (1 << i for i in range((n - 1).bit_length())):
        for k in (p >> i for i in range(p.bit_length())):
            for j in range(k % p, n - k, 2 * k):
                for a in range(j, min(j + k, n - k)):
                    if a // (2 * p) != (a + k) // (2 * p):
                        continue
                    stage = max(free[a], free[a + k])
                    if stage == len(partner):
                        partner.append(np.arange(n))
                        less.append(np.ones(n, bool))
                    partner[stage][[a, a + k]], less[stage][a + k] = [a + k, a], False
                    free[[a, a + k]] = stage + 1
    return np.array(partner, np.int32).reshape(-1, n), np.array(less, bool).reshape(-1, n)


def _ascending(rows: Array, here: Array) -> Array:
    """Each coordinate in ascending order, the absent and NaN last.

    Whole rows are compared, which on a CPU takes a tenth of the time of sorting every column.
    """
    rows = jnp.where(here[:, None] & ~jnp.isnan(rows), rows, jnp.inf)

    def stage(rows: Array, compared: tuple[Array, Array]) -> tuple[Array, None]:
        other = rows[compared[0]]
        return jnp.where(compared[1][:, None], jnp.minimum(rows, other), jnp.maximum(rows, other)), None

    partner, less = _stages(rows.shape[0])
    return jax.lax.scan(stage, rows, (jnp.asarray(partner), jnp.asarray(less)))[0]


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean without the f smallest and f largest values of each coordinate (Yin et al. 2018)."""

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        n, place = here.sum(), jnp.arange(rows.shape[0])[:, None]
        kept = (place >= f) & (place < n - f)
        return jnp.where(kept, _ascending(rows, here), 0).sum(0) / jnp.maximum(n - 2 * f, 1)


@dataclass(frozen=True)
class Median(Robust):
    """The median of each coordinate, for any share."""

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        ordered, n = _ascending(rows, here), here.sum()
        found = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        return jnp.where(n > 0, found, 0)


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point with the least sum of distances, by smoothed Weiszfeld steps (Pillutla et al. 2022).

    Args:
        steps: the number of Weiszfeld steps.
        smoothing: the lower bound on distances.
    """

    steps: int = 32
    smoothing: float = 1e-6

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        rows = jnp.where(here[:, None], rows, 0)
        share = (here / jnp.maximum(here.sum(), 1)).astype(rows.dtype)

        def step(_: int, z: Array) -> Array:
            w = share / jnp.maximum(jnp.linalg.norm(rows - z, axis=1), self.smoothing)
            return w @ rows / jnp.maximum(w.sum(), jnp.finfo(rows.dtype).tiny)

        return jax.lax.fori_loop(0, self.steps, step, share @ rows)


@dataclass(frozen=True)
class Krum(Robust):
    """The upload closest to its n − f − 1 neighbours (Blanchard et al. 2017, neighbours as in byzfl)."""

    def kept(self, n: Array, f: Array) -> Any:
        """The number of uploads that are averaged."""
        return 1

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        n, number = here.sum(), rows.shape[0]
        ordered = jnp.sort(jnp.where(jnp.eye(number, dtype=bool), jnp.inf, distances(rows, here)), axis=1)
        near = (jnp.arange(number)[None] < n - f - 1) & jnp.isfinite(ordered)
        score = jnp.where(here, jnp.where(near, ordered, 0).sum(1), jnp.inf)
        order, kept = jnp.argsort(score), self.kept(n, f)
        counts = (jnp.arange(number) < kept)[:, None]
        return jnp.where(counts, jnp.where(here[:, None], rows, 0)[order], 0).sum(0) / jnp.maximum(kept, 1)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The mean of the n − f uploads that are closest to their neighbours."""

    def kept(self, n: Array, f: Array) -> Any:
        return n - f


@dataclass(frozen=True)
class CenteredClipping(Robust):
    """v ← v + mean clip(u − v, radius), iterated from the reference (Karimireddy et al. 2021).

    Args:
        radius: the clipping radius, in units of an upload's difference to its reference.
        steps: the number of iterations.
    """

    radius: float = 1.0
    steps: int = 5

    def mean(self, rows: Array, here: Array, f: Array) -> Array:
        rows = jnp.where(here[:, None], rows, 0)
        share = (here / jnp.maximum(here.sum(), 1)).astype(rows.dtype)

        def step(_: int, v: Array) -> Array:
            off = rows - v
            size = jnp.linalg.norm(off, axis=1)
            return v + (share * jnp.minimum(1, self.radius / jnp.where(size > 0, size, 1))) @ off

        return jax.lax.fori_loop(0, self.steps, step, jnp.zeros_like(rows[0]))
