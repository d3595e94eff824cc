"""Count oracle calls and traffic while tracing: exact, at no run-time cost.

A program is traced once and runs many times, so what is counted is known when it is traced, up to factors
that are known only when it runs (a client's size, a loop's length). A `Tally` therefore keeps two things:
``fixed``, plain integers, and ``scaled``, integers with a traced factor. Loops multiply, verbs add over
clients, and the host puts the two together in Python integers, which do not overflow: a `Ledger`.

The code that counts never sees the tally: `count` books into whichever is open, and `loop` is
`jax.lax.scan` (or a `while` loop, where the length is traced) with the booking done right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import compress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.support import html
from fedstrata.support.private_jax import trace_of
from fedstrata.support.shown import line
from fedstrata.support.tracing import is_traced, traced

T = TypeVar("T")
ORACLES = {"values": "function_values", "gradients": "gradients", "products": "hessian_products"}
AT_ONCE = 1024  # local steps, at most, whose keys are made before the first of them
TRAFFIC = ("exchanges", "gathers", "floats_up", "floats_down", "bytes_up", "bytes_down")

Until = Callable[[PyTree], jax.Array]
Body = Callable[[Any, PyTree], PyTree]  # of a loop: the turn, and the carry before it
Items = tuple[tuple[str, int], ...]


@jax.tree_util.register_pytree_node_class
@dataclass
class Tally:
    """Counts by name: ``fixed`` integers, and ``scaled`` ones that a traced factor multiplies.

    As a pytree its leaves are the factors and all else is structure. So a traced function can simply return
    its tally: `jax.vmap` and `jax.lax.scan` stack the factors, `jax.eval_shape` and `jax.jit` hand on the
    counts.
    """

    fixed: Counter[str] = field(default_factory=Counter)
    scaled: list[tuple[Counter[str], Any]] = field(default_factory=list)

    def tree_flatten(self) -> tuple[list[Any], tuple[Items, tuple[Items, ...]]]:
        """The factors, and the counts as comparable tuples."""
        factors = [factor for _, factor in self.scaled]
        return factors, (_items(self.fixed), tuple(_items(counts) for counts, _ in self.scaled))

    @classmethod
    def tree_unflatten(cls, counts: tuple[Items, tuple[Items, ...]], factors: list[Any]) -> Tally:
        """The inverse of `tree_flatten`."""
        fixed, scaled = counts
        return cls(
            Counter(dict(fixed)), [(Counter(dict(c)), f) for c, f in zip(scaled, factors, strict=True)]
        )

    def book(self, counts: Counter[str], times: Integer = 1) -> None:
        """Add ``times · counts``, where ``times`` may be traced."""
        if not is_traced(times):
            for name, amount in counts.items():
                self.fixed[name] += amount * int(times)
        elif counts:
            times = jnp.asarray(times, jnp.int32)
            for j, (already, factor) in enumerate(self.scaled):
                if factor is times:  # the fewer factors, the less there is to compile
                    self.scaled[j] = already + counts, factor
                    return
            self.scaled.append((counts, times))

    def total(self) -> Counter[str]:
        """Plain counts; every factor must be a number."""
        counts = Counter(self.fixed)
        for names, factor in self.scaled:
            for name, amount in names.items():
                counts[name] += amount * int(factor)
        return +counts  # without zeros


def _items(counts: Counter[str]) -> Items:
    return tuple(sorted(counts.items()))


# What wraps a loop's body ``(turn, …)`` where its turns are told apart, see `fedstrata.channels.spots`.
turning: ContextVar[Callable[..., Any]] = ContextVar("turning", default=lambda body: body)
# Each thread traces by itself, and a thread that JAX starts for a callback books nowhere.
_open: ContextVar[Tally | None] = ContextVar("the open tally", default=None)


@contextmanager
def collect() -> Iterator[Tally]:
    """Open a tally; whatever is counted inside is booked there and nowhere else."""
    tally = Tally()
    token = _open.set(tally)
    try:
        yield tally
    finally:
        _open.reset(token)


def counted(function: Callable[..., T]) -> Callable[..., tuple[T, Tally]]:
    """Wrap a function to return ``(value, tally)`` and book nothing itself."""

    def run(*args: PyTree) -> tuple[T, Tally]:
        with collect() as tally:
            value = function(*args)
        return value, tally

    return run


def count(name: str, amount: int, times: Integer = 1) -> None:
    """Book ``times · amount`` under ``name`` in the open tally, if there is one."""
    book(Tally(Counter({name: amount})), times)


def book(tally: Tally, times: Integer = 1) -> None:
    """Book ``times`` repetitions of a tally whose factors are already summed over them."""
    if (into := _open.get()) is not None:
        into.book(tally.fixed, times)
        for counts, factor in tally.scaled:
            into.book(counts, factor)


def summed(tally: Tally) -> Tally:
    """A tally that `jax.vmap` or `jax.lax.scan` stacked, with its factors summed."""
    return jax.tree.map(lambda factor: factor.sum(0, dtype=factor.dtype), tally)


def repeat(times: Integer, body: Body, carry: PyTree, until: Until | None = None) -> PyTree:
    """``carry ← body(t, carry)`` for t = 0, …, times − 1, with counts multiplied; ``times`` may be traced.

    The loop ends before a turn at which ``until(carry)`` holds.
    """
    body = turning.get()(body)
    eager = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    if eager and not is_traced(times):  # phases see values, and each turn may count another number
        turn = 0
        while turn < times and not (until is not None and until(carry)):
            carry = body(jnp.int32(turn), carry)
            turn += 1
        return carry
    if until is None and not is_traced(times):
        return _scan(lambda carry, t: body(t, carry), carry, jnp.arange(max(int(times), 0)))
    step = counted(lambda carry, t: body(t, carry))
    # A while loop must know its carry beforehand: which factors there are.
    (_, shapes), again = traced(step, carry, jnp.zeros((), jnp.int32))

    def goes_on(now: tuple[Integer, PyTree, Tally]) -> jax.Array:
        due = jnp.asarray(now[0] < times)
        return due if until is None else due & ~until(now[1])

    def stepped(now: tuple[Integer, PyTree, Tally]) -> tuple[Integer, PyTree, Tally]:
        carry, tally = again(now[1], now[0])
        return now[0] + 1, carry, jax.tree.map(jnp.add, now[2], tally)

    start = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    turns, carry, tally = jax.lax.while_loop(goes_on, stepped, (jnp.int32(0), carry, start))
    book(tally, turns)
    return carry


def _scan(step: Callable[[PyTree, PyTree], PyTree], carry: PyTree, turns: PyTree) -> PyTree:
    """``carry ← step(carry, turn)`` for each of the turns on the leading axis, with counts added up."""
    if not (times := jax.tree.leaves(turns)[0].shape[0]):
        return carry
    constant = Tally()

    def scanned(carry: PyTree, turn: PyTree) -> tuple[PyTree, Tally]:
        nonlocal constant
        carry, tally = counted(step)(carry, turn)
        tally, constant = _parted(tally, turn)
        return carry, tally

    carry, tallies = jax.lax.scan(scanned, carry, turns)
    book(summed(tallies), times)
    _book_constant(constant, times)
    return carry


def _parted(tally: Tally, inside: PyTree) -> tuple[Tally, Tally]:
    """Split a tally: factors that depend on the arguments of a loop's or map's body, and constant ones.

    Constant factors come from outside the body. If the body is not traced, all factors count as dependent.
    """
    if not tally.scaled:
        return tally, Tally()
    here = trace_of(jax.tree.leaves(inside)[0])
    changing = [here is None or trace_of(factor) is here for _, factor in tally.scaled]
    constant = [entry for entry, changes in zip(tally.scaled, changing, strict=True) if not changes]
    return Tally(tally.fixed, list(compress(tally.scaled, changing))), Tally(scaled=constant)


def _book_constant(tally: Tally, times: int) -> None:
    """Book ``times`` repetitions of constant factors, which adds no computation to the program."""
    for counts, factor in tally.scaled:
        book(Tally(Counter({name: times * amount for name, amount in counts.items()})), factor)


def loop(
    times: Integer, step: Callable[..., PyTree], key: Key, carry: PyTree, *, indexed: bool = False
) -> PyTree:
    """A client's local steps: ``carry ← step(carry, key_k)`` with a fresh key each.

    Args:
        times: the number of steps; a plain integer compiles to a scan, a traced one (a client's own number of
            steps, zero included) to a while loop. Both draw the same keys.
        step: ``step(carry, key) -> carry``, or ``step(carry, key, k)`` with ``indexed=True``.
        key: the steps use ``fold_in(key, k)``.
        carry: where to start.
        indexed: whether ``step`` takes the step's number.
    """
    fold = partial(jax.random.fold_in, key)

    def body(k: Integer, carry: PyTree, key_k: Key | None = None) -> PyTree:
        key_k = fold(k) if key_k is None else key_k
        return step(carry, key_k, k) if indexed else step(carry, key_k)

    eager = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    if eager or is_traced(times) or not 0 < times <= AT_ONCE:
        return repeat(times, body, carry)
    numbers = jnp.arange(int(times))  # all keys in one pass: at each step of a GPU they were a kernel more
    body = turning.get()(body)
    return _scan(lambda carry, turn: body(turn[0], carry, turn[1]), carry, (numbers, jax.vmap(fold)(numbers)))


def each(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`jax.vmap` over the leading axis of all arguments, with the counts of every slice added up."""
    times, constant = jax.tree.leaves(args)[0].shape[0], Tally()
    body = turning.get()(lambda _, own: function(*own))

    def one(j: jax.Array, *own: PyTree) -> tuple[PyTree, Tally]:
        nonlocal constant
        value, tally = counted(body)(j, own)
        tally, constant = _parted(tally, own)
        return value, tally

    value, tallies = jax.vmap(one)(jnp.arange(times), *args)
    book(summed(tallies), times)
    _book_constant(constant, times)
    return value


def traffic(level: str, message: PyTree, upload: PyTree, clients: int, each_reply: bool) -> Counter[str]:
    """The counts of one exchange with ``clients`` clients (shapes only).

    ``gathers`` counts the exchanges after which the server knows single replies: the mean of one reply
    is that reply.
    """
    counts = Counter({f"{level}/exchanges": 1, f"{level}/gathers": int(each_reply)})
    for way, tree in (("down", message), ("up", upload)):
        leaves = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
        counts[f"{level}/floats_{way}"] = clients * sum(leaf.size for leaf in leaves)
        counts[f"{level}/bytes_{way}"] = clients * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return counts


@dataclass(frozen=True)
class Ledger:
    """Totals of a run.

    Attributes:
        rounds: averagings of the main variable.
        lower_rounds: exchanges of lower-level solvers.
        exchanges: messages down and up with the participating clients, of every level.
        gathers: exchanges in which the server saw single clients' replies, not only their mean.
        floats_up, floats_down: numbers sent, summed over the clients.
        bytes_up, bytes_down: the same in bytes. Random seeds are shared beforehand and do not count.
        function_values, gradients, hessian_products: oracle calls, each for one sample.
        levels: the traffic again, by level ("main", "lower", "step").
    """

    rounds: int = 0
    exchanges: int = 0
    gathers: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    function_values: int = 0
    gradients: int = 0
    hessian_products: int = 0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        totals = {"rounds": self.rounds, "exchanges": self.exchanges}
        sent = {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        return line("Ledger", {**totals, **sent, "oracle_calls": self.oracle_calls})

    def _repr_html_(self) -> str:
        totals = {n: v for n, v in self.to_dict().items() if v and n != "levels"}
        return html.facts("Ledger", {n.replace("_", " "): f"{v:,}" for n, v in totals.items()})

    @property
    def oracle_calls(self) -> int:
        """All oracle calls together."""
        return self.function_values + self.gradients + self.hessian_products

    @property
    def lower_rounds(self) -> int:
        """Exchanges of lower-level solvers."""
        return self.levels.get("lower", {}).get("exchanges", 0)

    def __add__(self, other: Ledger) -> Ledger:
        """The sum of two ledgers."""
        totals = {name: value + vars(other)[name] for name, value in vars(self).items() if name != "levels"}
        names = {**self.levels, **other.levels}
        levels = {n: dict(Counter(self.levels.get(n)) + Counter(other.levels.get(n))) for n in names}
        return Ledger(levels=levels, **totals)

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
        """A dict of plain values, derived entries included."""
        return {**asdict(self), "oracle_calls": self.oracle_calls, "lower_rounds": self.lower_rounds}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """The inverse of `to_dict`."""
        return cls(**{k: v for k, v in values.items() if k not in ("oracle_calls", "lower_rounds")})
