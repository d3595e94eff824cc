"""Counting while tracing: every oracle call and every number that travels, exactly, without run-time cost.

A program is traced once and runs many times, so what is counted is known when it is traced, up to factors
that
are known only when it runs (a client's size, a loop's length). A `Tally` therefore keeps two things:
``fixed``,
plain integers, and ``scaled``, integers with a traced factor. Loops multiply, verbs add over clients, and the
host puts the two together in Python integers, which do not overflow.

The code that counts never sees the tally: `count` books into whichever is open, and `loop` is
`jax.lax.scan` (or a `while` loop, where the length is traced) with the booking done right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Integer, PyTree

_open: list[Tally] = []


@dataclass
class Tally:
    """Counts by name: ``fixed`` integers, and ``scaled`` ones that a traced factor multiplies."""

    fixed: Counter[str] = field(default_factory=Counter)
    scaled: list[tuple[Counter[str], Any]] = field(default_factory=list)

    @property
    def factors(self) -> list[Any]:
        """The traced factors, in the order of ``scaled``."""
        return [jnp.asarray(factor, jnp.int32) for _, factor in self.scaled]

    def book(self, counts: Counter[str], times: Integer = 1) -> None:
        """Add ``times · counts``, where ``times`` may be traced."""
        if isinstance(times, int | np.integer):
            for name, amount in counts.items():
                self.fixed[name] += amount * int(times)
        elif counts:
            self.scaled.append((counts, times))

    def merge(self, inner: Tally, times: Integer, factors: list[Any]) -> None:
        """Add what ``inner`` booked in each of ``times`` repetitions, its factors already summed."""
        self.book(inner.fixed, times)
        for (counts, _), total in zip(inner.scaled, factors, strict=True):
            self.book(counts, total)


@contextmanager
def collect() -> Iterator[Tally]:
    """Open a tally; whatever is counted inside is booked there and nowhere else."""
    tally = Tally()
    _open.append(tally)
    try:
        yield tally
    finally:
        _open.pop()


def count(name: str, amount: int, times: Integer = 1) -> None:
    """Book ``times · amount`` under ``name`` in the open tally, if there is one."""
    if _open:
        _open[-1].book(Counter({name: amount}), times)


def merge(inner: Tally, times: Integer, factors: list[Any]) -> None:
    """`Tally.merge` into the open tally."""
    if _open:
        _open[-1].merge(inner, times, factors)


def repeat(times: Integer, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
    """``carry ← body(t, carry)`` for t = 0, …, times − 1, with counts multiplied; ``times`` may be traced."""
    last: list[Tally] = []

    def counted(carry: PyTree, t: Integer) -> tuple[PyTree, list[Any]]:
        with collect() as tally:
            carry = body(t, carry)
        last[:] = [tally]
        return carry, tally.factors

    if not isinstance(times, jax.core.Tracer):
        times = int(times)
        if times <= 0:
            return carry
        carry, factors = jax.lax.scan(counted, carry, jnp.arange(times))
        merge(last[0], times, [f.sum() for f in factors])
        return carry

    # A while loop must know its carry beforehand: one abstract pass finds how many factors there are.
    _, shapes = jax.eval_shape(counted, carry, jnp.zeros((), jnp.int32))
    zero = [jnp.zeros(s.shape, jnp.int32) for s in shapes]

    def step(t: Integer, both: tuple[PyTree, list[Any]]) -> tuple[PyTree, list[Any]]:
        carry, factors = counted(both[0], t)
        return carry, [a + b for a, b in zip(both[1], factors, strict=True)]

    carry, factors = jax.lax.fori_loop(0, times, step, (carry, zero))
    merge(last[0], jnp.maximum(times, 0), factors)
    return carry


def loop(
    times: Integer, step: Callable[..., PyTree], key: jax.Array, carry: PyTree, *, indexed: bool = False
) -> PyTree:
    """A client's local steps: ``carry ← step(carry, key_k)`` with a fresh key each.

    Args:
        times: how often; a plain integer compiles to a scan, a traced one (a client's own number of steps,
            zero included) to a while loop. Both draw the same keys.
        step: ``step(carry, key) -> carry``, or ``step(carry, key, k)`` with ``indexed=True``.
        key: the steps use ``fold_in(key, k)``.
        carry: where to start.
        indexed: whether ``step`` wants the step's number.
    """

    def body(k: Integer, carry: PyTree) -> PyTree:
        key_k = jax.random.fold_in(key, k)
        return step(carry, key_k, k) if indexed else step(carry, key_k)

    return repeat(times, body, carry)


def each(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`jax.vmap` over the leading axis of all arguments, with the counts of every slice added up."""
    last: list[Tally] = []

    def counted(*args: PyTree) -> tuple[PyTree, list[Any]]:
        with collect() as tally:
            value = function(*args)
        last[:] = [tally]
        return value, tally.factors

    value, factors = jax.vmap(counted)(*args)
    merge(last[0], jax.tree.leaves(args)[0].shape[0], [f.sum() for f in factors])
    return value


ORACLES = {"values": "function_values", "gradients": "gradients", "products": "hessian_products"}
TRAFFIC = ("exchanges", "floats_up", "floats_down", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Ledger:
    """Totals of a run.

    Attributes:
        rounds: averagings of the main variable.
        lower_rounds: exchanges of lower-level solvers.
        exchanges: messages down and up with the participating clients, of every level.
        floats_up, floats_down: numbers sent, summed over the clients.
        bytes_up, bytes_down: the same in bytes. Random seeds are shared beforehand and do not count.
        function_values, gradients, hessian_products: oracle calls, each for one sample.
        levels: the traffic again, by level ("main", "lower", "step").
    """

    rounds: int = 0
    exchanges: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    function_values: int = 0
    gradients: int = 0
    hessian_products: int = 0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def oracle_calls(self) -> int:
        """All oracle calls together."""
        return self.function_values + self.gradients + self.hessian_products

    @property
    def lower_rounds(self) -> int:
        """Exchanges of lower-level solvers."""
        return self.levels.get("lower", {}).get("exchanges", 0)

    @classmethod
    def from_counts(cls, rounds: int, counts: Counter[str]) -> Ledger:
        """Sort counts by name (``"main/bytes_up"``, ``"gradients"``) into a ledger."""
        levels: dict[str, dict[str, int]] = {}
        totals: Counter[str] = Counter()
        for name, amount in counts.items():
            level, _, entry = name.rpartition("/")
            if level:
                levels.setdefault(level, dict.fromkeys(TRAFFIC, 0))[entry] = amount
                totals[entry] += amount
            else:
                totals[ORACLES[entry]] += amount
        return cls(rounds=rounds, levels=levels, **totals)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the derived entries."""
        return {**asdict(self), "oracle_calls": self.oracle_calls, "lower_rounds": self.lower_rounds}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """The inverse of `to_dict`."""
        return cls(**{k: v for k, v in values.items() if k not in ("oracle_calls", "lower_rounds")})


def settle(tally: Tally, times: int, factors: Iterable[Any]) -> Counter[str]:
    """The counts of ``times`` repetitions, whose factors summed over them are given as (high, low) words."""
    total: Counter[str] = Counter()
    for name, amount in tally.fixed.items():
        total[name] += amount * times
    for (counts, _), factor in zip(tally.scaled, factors, strict=True):
        high, low = (int(word) for word in np.asarray(factor))
        for name, amount in counts.items():
            total[name] += amount * ((high << 32) + low)
    return +total  # without zeros


def traffic(level: str, message: PyTree, upload: Any, clients: int) -> Counter[str]:
    """The counts of one exchange with ``clients`` clients (shapes only)."""
    counts = Counter({f"{level}/exchanges": 1})
    for way, tree in (("down", message), ("up", upload)):
        leaves = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
        counts[f"{level}/floats_{way}"] = clients * sum(leaf.size for leaf in leaves)
        counts[f"{level}/bytes_{way}"] = clients * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return counts
