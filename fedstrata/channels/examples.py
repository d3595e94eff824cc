"""Clipping and noise for single samples, in the means over a client's samples.

    mean_s op(f(·, s))   →   1/b Σ_{s drawn} clip(op(f(·, s)), C) + N(0, (z C/b)²)

for an ``op`` that is linear in f: the value, a gradient, a product with the Hessian (`Oracle.apply`). A
minibatch takes each sample with probability b/n, independently; a full batch takes all, with b = n. The noise
uses a key of the exchange (at a real site, a key that only the site has), the place of the call in the
phase and the turns of its loops, so that no two means share their noise.

Every other access to samples is refused: single values, means without clipping, and the arrays themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.clipping import bounded, deviation_of, noised
from fedstrata.channels.spots import spot, spots
from fedstrata.core import counting, tree
from fedstrata.core.client import AUGMENTS, Client, Oracle, Samples
from fedstrata.core.term import Seeded, Term, keys_of
from fedstrata.core.types import Array, Function, Integer, Key, Phase, PyTree, Real
from fedstrata.support.precision import in_precision

MADE, USED = "made", "used"
MARK = "sample means"  # before the names under which they are counted


@dataclass(frozen=True)
class Examples:
    """Differential privacy of a client's single samples, without trust in the server.

    In every mean over samples, each sample's term is clipped, and the client adds noise.

    Args:
        clip: the bound C on the norm of one sample's term in a gradient or a product.
        noise: the noise multiplier z: a mean over b samples gets noise of standard deviation z · C/b.
        values: the bound C on a sample's values, and on their differences in zeroth-order methods.
    """

    clip: float
    noise: float = 0.0
    values: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not (number and value >= 0 and (value > 0 or name == "noise")):
                raise ValueError(f"Examples: {name} must be a positive number, but is {value!r}.")


tree.register(Examples, lambda e: {"clip", "noise", "values"})


class Release(NamedTuple):
    """Means over the same samples that a phase takes each time it runs.

    Attributes:
        part: ``"train"`` or ``"valid"``.
        batch_size: the expected number of samples; None is all.
        draws: the number of draws of samples.
        uses: the number of means that use each draw.
    """

    part: str
    batch_size: int | None
    draws: int
    uses: int


class _Source(NamedTuple):
    """The bounds, the key and the part of the data of private means."""

    examples: Examples
    key: Key
    part: str


class PrivateOracle(Oracle):
    """A mean over samples that can only be evaluated by `apply`."""

    def __init__(
        self, term: Term, drawn: PyTree, weights: Array, unit: Real, size: Integer, source: _Source, name: str
    ) -> None:
        its = {"term": term, "_drawn": drawn, "_weights": weights, "_unit": unit, "size": size}
        for field, value in {**its, "_source": source, "_name": name}.items():
            object.__setattr__(self, field, value)

    def apply(self, op: Function, of: str = "derivatives") -> Any:
        its: Any = self
        term, examples = self.term, its._source.examples
        if term.reads == "nothing":
            return op(term.function)
        bound = examples.values if of == "values" else examples.clip
        row = partial(_bounded, lambda sample: op(in_precision(term.at(sample))), bound)
        rows = jax.vmap(row)(its._drawn)
        total = jax.tree.map(lambda r: jnp.tensordot(its._weights.astype(r.dtype), r, axes=1), rows)
        counting.count(f"{its._name}/{USED}", 1)
        deviation = deviation_of(examples.noise, bound) * its._unit
        return noised(spot().fold(its._source.key), total, deviation)

    def silent(self, *args: PyTree) -> NoReturn:
        """Refused."""
        raise _refused(f"a mean of {self.term!r} in a form in which single samples have no bound")

    def each(self, *args: PyTree) -> NoReturn:
        """Refused."""
        raise _refused(f"every sample's value of {self.term!r}")

    def weigh(self) -> NoReturn:
        """Refused."""
        raise _refused("single samples' weights")

    samples = weights = property(lambda self: self.weigh())


def _bounded(op: Callable[[PyTree], PyTree], bound: Real, sample: PyTree) -> PyTree:
    return bounded(op(sample), bound)[0]


class PrivateSamples(Samples):
    """A client's samples, accessible only through bounded means with noise."""

    def __init__(self, samples: Samples, source: _Source) -> None:
        for field, value in {"size": samples.size, "_samples": samples, "_source": source}.items():
            object.__setattr__(self, field, value)

    def mean(self, function: Function, key: Key, batch_size: int | None) -> Oracle:
        its: Any = self
        samples, source, term = its._samples, its._source, Term.of(function)
        if term.reads == "batch" or term.mean is not None:
            raise _refused(
                f"{term!r}, which reads a whole batch"
                if term.reads == "batch"
                else f"another mean of {term!r} than the arithmetic one, which has no bound per sample"
            )
        at = spot()
        rows, mine = samples.data, at.fold(source.key)
        number = jax.tree.leaves(rows)[0].shape[0]
        there = jnp.arange(number) < self.size
        b: Any = self.size
        if batch_size is not None:
            b = jnp.minimum(self.size, batch_size)
            there &= jax.random.uniform(mine, (number,)) < b / self.size
        if samples.augment is not None:
            rows = jax.vmap(samples.augment)(rows, keys_of(rows, jax.random.fold_in(mine, AUGMENTS)))
        if term.draws:
            rows = Seeded(rows, keys_of(rows, jax.random.fold_in(mine, AUGMENTS + 1)))
        unit = 1.0 / jnp.asarray(b, jnp.result_type(float))
        what = "all" if batch_size is None else batch_size
        name = f"{MARK}/{source.part}/{what}/{at.path}"
        counting.count(f"{name}/{MADE}", 1)
        size = self.size if batch_size is None else batch_size
        return PrivateOracle(term, rows, jnp.where(there, unit, 0.0), unit, size, source, name)

    def full_mean(self, function: Function) -> NoReturn:
        """Refused."""
        raise _refused(f"a mean of {Term.of(function)!r} without a key for noise")

    def _hidden(self, *_: Any) -> NoReturn:
        raise _refused("the samples themselves")

    take = fetched = _hidden  # type: ignore[assignment]
    data = leaves = rows = offset = capacity = augment = property(_hidden)


def _refused(what: str) -> TypeError:
    return TypeError(
        f"The method takes {what}, where samples are private (Channel(examples=…)). Only means by "
        "Oracle.apply, as fedstrata.estimators takes them, can be bounded sample by sample and noised."
    )


def private(phase: Phase, examples: Examples, key: Key) -> Phase:
    """A phase whose client reveals its samples only in bounded means with noise.

    Args:
        phase: the method's.
        examples: bounds and noise.
        key: of this client in this exchange; the server must not know it.
    """

    def hidden(problem: Any, client: Client, key_of_phase: Key, *message: PyTree) -> Any:
        train = PrivateSamples(client.train, _Source(examples, key, "train"))
        valid = train
        if client.valid is not client.train:
            valid = PrivateSamples(client.valid, _Source(examples, key, "valid"))
        with spots():
            return phase(problem, replace(client, train=train, valid=valid), key_of_phase, *message)

    return hidden


def releases(tally: counting.Tally) -> tuple[tuple[Release, ...] | None, counting.Tally]:
    """The counts of private means, and all other counts; None for a number that depends on the run."""
    ours = {name: n for name, n in tally.fixed.items() if name.startswith(MARK)}
    later = [name for counts, _ in tally.scaled for name in counts if name.startswith(MARK)]
    if not (ours or later):
        return (), tally
    fixed = Counter({name: n for name, n in tally.fixed.items() if name not in ours})
    scaled = [(Counter({n: c for n, c in counts.items() if n not in later}), f) for counts, f in tally.scaled]
    tally = counting.Tally(fixed, [(counts, f) for counts, f in scaled if counts])
    if later:
        return None, tally
    found = []
    for name in (name for name in ours if name.endswith(MADE)):
        _, part, what, *_ = name.split("/")
        uses = -(-ours.get(name.removesuffix(MADE) + USED, 0) // ours[name])
        found.append(Release(part, None if what == "all" else int(what), ours[name], uses))
    return tuple(one for one in found if one.uses), tally
