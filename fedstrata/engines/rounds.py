"""The text as every engine runs it: the start, one round, one measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.link import Joined
from fedstrata.core import counting, tree
from fedstrata.core.cohorts import MANY, by_weight, threshold
from fedstrata.core.fed import Fed, Population, Setup, by_size
from fedstrata.core.method import Method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.engines.engine import Carry, Lane
from fedstrata.engines.metrics import taken_name
from fedstrata.support.precision import Precision, computing_in
from fedstrata.support.shown import shapes

MakeFed = Callable[[Setup, Any, PyTree, Array | None, Integer], Fed]
START_KEY = 2**31 - 1  # stands for "before round 0" where a key is folded with a round's number


def cohort_of(
    setup: Setup, key: Key, data: Population, r: Integer, secret: Array | None = None
) -> Array | None:
    """The clients of round ``r``: None is everyone."""
    if setup.rate is not None:  # those with the least numbers, so that who is left out is random
        return jnp.sort(jnp.argsort(_numbers(setup, key, r, secret))[: setup.participants])
    if setup.participants == setup.clients:
        return None  # and no array: an exchange with everyone needs no look-up
    key = keys_of(key, r)[0]
    if by_size(setup, data):
        sizes, count = data.every_size, setup.participants
        return by_weight(key, sizes, count, threshold(sizes, count))
    # Ascending: in this order every engine stacks replies.
    return jnp.sort(uniformly(key, setup.clients, setup.participants))


def _numbers(setup: Setup, key: Key, r: Integer, secret: Array | None) -> Array:
    """A number in [0, 1) for each client: below the rate it takes part."""
    drawn = keys_of(key, r)[0]
    for word in () if secret is None else secret:  # noise hides less from those who know who was drawn
        drawn = jax.random.fold_in(drawn, word)
    return jax.random.uniform(drawn, (setup.clients,))


def secret_of(state: PyTree) -> Array | None:
    """The random words that noise, and independent draws of clients, depend on besides the seed; or None."""
    return state.secret if isinstance(state, Joined) else None


def uniformly(key: Key, clients: int, count: int) -> Array:
    """``count`` of the clients; all sets of this size are equally likely.

    A few of very many are the first different ones among twice as many draws, at a cost that does not grow
    with the clients; if these do not suffice, draw again. Otherwise all clients are shuffled.
    """
    if clients <= MANY or 8 * count > clients:
        return jax.random.choice(key, clients, (count,), replace=False)

    def draw(t: Array) -> tuple[Array, Array]:
        drawn = jax.random.randint(jax.random.fold_in(key, t), (2 * count,), 0, clients, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        new = jnp.ones(2 * count, bool).at[order[1:]].set(jnp.diff(drawn[order]) != 0)
        return drawn[jnp.argsort(~new, stable=True)[:count]], new.sum() >= count

    def again(now: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return now[0] + 1, *draw(now[0])

    start = (jnp.int32(0), jnp.zeros(count, jnp.int32), jnp.asarray(False))
    return jax.lax.while_loop(lambda now: ~now[2], again, start)[1]


def cohorts_of(
    setup: Setup, key: Key, data: Population, rounds: Array, secret: Array | None = None
) -> Array | None:
    """The clients of several rounds, drawn together: the rows that `cohort_of` gives."""
    return jax.vmap(lambda r: cohort_of(setup, key, data, r, secret))(rounds)


def keys_of(key: Key, r: Integer) -> tuple[Key, Key]:
    """The key for the clients of round ``r``, and the method's own key."""
    key_cohort, key_round = jax.random.split(jax.random.fold_in(key, r))
    return key_cohort, key_round


def one_round(
    make_fed: MakeFed,
    setup: Setup,
    method: Method,
    carry: Carry,
    key: Key,
    data: Population,
    r: Integer,
    cohort: Array | None = None,
) -> Carry:
    """Round ``r``, drawn from ``fold_in(key, r)`` and a channel's secret alone; the state keeps its dtypes.

    Its ``cohort`` is drawn here if it is None.
    """
    secret = secret_of(carry.state)
    chosen = cohort_of(setup, key, data, r, secret) if cohort is None else cohort
    key_round = keys_of(key, r)[1]
    fed = make_fed(setup, data, carry.memory, chosen, r)
    if setup.rate is not None:
        fed.drawn = _numbers(setup, key, r, secret) < setup.rate
    # of the default width: 1/r of a 32-bit integer would be a float32 where the rest is in float64
    r = r if isinstance(r, int) else jnp.asarray(r, jnp.result_type(int))
    state = method.at(r).round(setup.problem, fed, key_round, r, carry.state)
    _check("round", setup, method, fed, carry.state, state)
    return Carry(_like(carry.state, state), fed.memory)


def in_a_loop(
    carry: Any,
    first: int,
    rounds: np.ndarray,
    some: Callable[[Any, int, int], tuple[Any, int, Counter[str], int]],
    measured: Callable[[Any, int], Mapping[str, Any]],
) -> tuple[Any, Lane]:
    """Rounds in a loop on the host, which ends at the first state that is not finite.

    Args:
        carry: the values that pass from round to round.
        first: the first round.
        rounds: how many before each evaluation.
        some: ``some(carry, r, stop)`` does rounds from r, not past stop: the carry after them, the next
            round, what was counted, and the round that went bad, or −1.
        measured: ``measured(carry, r)`` are the metrics.
    """
    r, bad = first, -1
    history, counts = [], []
    for number in rounds.tolist():
        stop, counted_here = r + number, Counter[str]()
        while r < stop and bad < 0:
            carry, r, counted, bad = some(carry, r, stop)
            counted_here.update(counted)
        history.append(measured(carry, r))
        counts.append(counted_here)
        if bad >= 0:
            break
    values = {name: np.array([float(row[name]) for row in history]) for name in history[0]}
    return carry, Lane(values, counts, bad)


def before_rounds(
    make_fed: MakeFed, setup: Setup, method: Any, carry: Carry, key: Key, data: Population
) -> Carry:
    """The method's exchanges before the first round, with all clients."""
    fed = make_fed(setup, data, carry.memory, None, 0)
    state = method.at(0).start(setup.problem, fed, jax.random.fold_in(key, START_KEY), carry.state)
    _check("start", setup, method, fed, carry.state, state)
    return Carry(_like(carry.state, state), fed.memory)


def _check(text: str, setup: Setup, method: Method, fed: Fed, before: PyTree, after: PyTree) -> None:
    """Raise if a text reveals more than its method declares, or returns another structure."""
    name = getattr(method, "name", type(method).__name__)
    if fed.gathered and method.reveals_on(setup.problem) == "averages":
        raise TypeError(
            f"{name} gathers single replies, but says that it reveals averages alone. Let it say so, "
            "def reveals_on(self, problem): return 'replies'; or use fed.average."
        )
    if not tree.same_structure(after, before):
        raise TypeError(
            f"{name}.{text} must return a state like the one of init, {shapes(before)}, but returns "
            f"{shapes(after)}."
        )


def _like(before: PyTree, after: PyTree) -> PyTree:
    # A carry that changed its dtype would be refused by the loop over rounds.
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after, before)


def measure(
    make_fed: MakeFed, setup: Setup, method: Method, carry: Carry, data: Population
) -> dict[str, Array]:
    """All metrics at the current point: the method's own, the problem's and the user's."""
    x, y = method.output(carry.state, carry.memory)
    values: dict[str, Any] = dict(method.metrics(carry.state))
    problem = method.judged_as(setup.problem)
    # the lower precision is for steps: a metric is what it says
    precision: Precision = "highest" if setup.precision == "highest" else "float32"
    with counting.collect(), computing_in(precision):  # measuring costs nothing in the ledger
        fed = make_fed(setup, data, carry.memory, None, 0)
        data = data.seen()
        if setup.measure_problem:
            values.update(problem.measure(fed.mean, x, y))
        for name, metric in setup.metrics:
            series = metric.measured(name, problem, fed, data, (method.plain_state(carry.state), x, y))
            for taken in series.keys() & values.keys():
                raise ValueError(taken_name(taken))
            values.update(series)
    for name, value in values.items():
        if not isinstance(value, int | float | np.number | np.bool_ | np.ndarray | jax.Array):
            raise TypeError(f"The metric {name!r} must be one number, but is a {type(value).__name__}.")
        if jnp.shape(value) != ():
            raise TypeError(f"The metric {name!r} must be one number, but has the shape {jnp.shape(value)}.")
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in values.items()}


def run_text(
    program: str,
    make_fed: MakeFed,
    setup: Setup,
    method: Method,
    carry: Carry,
    key: Key,
    data: Any,
    r: Integer,
    cohort: Array | None = None,
) -> Any:
    """Run ``"start"``, ``"round"`` or ``"measure"`` of a text: the carry after it, or the metrics."""
    if program == "start":
        return before_rounds(make_fed, setup, method, carry, key, data)
    if program == "round":
        return one_round(make_fed, setup, method, carry, key, data, r, cohort)
    return measure(make_fed, setup, method, carry, data)


def finite(state: PyTree) -> Array:
    """Whether every floating leaf of a state is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all() if leaves else jnp.asarray(True)
