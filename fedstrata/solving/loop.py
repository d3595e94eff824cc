"""The loop over rounds: metrics, ledger, checkpoints, progress, early stop, divergence.

The rounds themselves are compiled by the engine in chunks that end at evaluations. Between two chunks, which
last about
`PAUSE` seconds, the host looks: it moves the progress bar, calls the callbacks, saves, and stops on Ctrl-C. A
chunk's length never recompiles anything and never changes a result: round r draws from ``fold_in(seed, r)``
alone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.counting import Ledger
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import METHODS, Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.engines import engine_of
from fedstrata.engines.base import Carry, Setup
from fedstrata.engines.simulated import EVALUATIONS
from fedstrata.solving.checkpoint import (
    Checkpoint,
    CheckpointError,
    flatten,
    load_arrays,
    save_arrays,
    unflatten,
)
from fedstrata.solving.progress import Progress
from fedstrata.solving.result import BOOKKEEPING, Result, describe_method

PAUSE = 0.5  # seconds between two looks at a running program


class Diverged(FloatingPointError):
    """The iterates are no longer finite. ``result`` is what there was at the last finite evaluation."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Progressed:
    """What a callback sees after an evaluation: the round, the metrics so far, the state, the ledger."""

    round: int
    rounds: int
    history: Mapping[str, list[float]]
    state: PyTree
    ledger: Ledger


Callback = Callable[[Progressed], bool | None]


@dataclass(frozen=True)
class EarlyStop:
    """Stop at a metric's ``target``, or after ``patience`` evaluations without a gain of ``min_delta``.

    >>> import fedstrata as fs
    >>> fs.EarlyStop("loss", patience=10)
    EarlyStop(metric='loss', patience=10, min_delta=0.0, target=None, mode='min')
    """

    metric: str
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"EarlyStop: mode must be 'min' or 'max', but is {self.mode!r}.")
        if self.patience is None and self.target is None:
            raise ValueError("EarlyStop needs a patience or a target.")

    def __call__(self, progressed: Progressed) -> bool:
        """Whether to stop now."""
        if self.metric not in progressed.history:
            known = sorted(set(progressed.history) - set(BOOKKEEPING))
            raise KeyError(f"EarlyStop: there is no metric {self.metric!r}; there are {known}.")
        sign = 1.0 if self.mode == "min" else -1.0
        values = sign * np.asarray(progressed.history[self.metric])
        if self.target is not None and values[-1] <= sign * self.target:
            return True
        if self.patience is None or len(values) <= self.patience:
            return False
        return bool(values[-self.patience :].min() > values[: -self.patience].min() - self.min_delta)


@dataclass
class Run:
    """What a run has gathered so far."""

    carry: Carry
    round: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def ledger(self) -> Ledger:
        """The counts so far."""
        return Ledger.from_counts(self.round, self.counts)

    def record(self, values: dict[str, float], seconds: float) -> None:
        """Add an evaluation to the history."""
        ledger = self.ledger()
        row = {
            "round": self.round,
            "exchanges": ledger.exchanges,
            "bytes_up": ledger.bytes_up,
            "bytes_down": ledger.bytes_down,
            "seconds": seconds,
            **values,
        }
        for name, value in row.items():
            self.history.setdefault(name, []).append(value)


def solve(
    problem: Problem,
    method: Method,
    data: FederatedData,
    x0: PyTree,
    *,
    y0: PyTree = None,
    rounds: int,
    seed: int = 0,
    participation: float | int = 1.0,
    engine: Any = "simulated",
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    eval_every: int = 1,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
    weights: str = "uniform",
    callbacks: Iterable[Callback] = (),
    default_metrics: bool = True,
) -> Result:
    """Solve a federated problem.

    Args:
        problem: what is to be solved, e.g. ``fs.Minimization(loss)``.
        method: how, e.g. ``fs.FedAvg(gamma=0.1, H=5)``.
        data: the clients' samples.
        x0: where the main variable starts, any pytree of arrays.
        y0: where the second variable starts, for problems that have one.
        rounds: how many rounds; one round is one averaging of x.
        seed: of all randomness; the same seed gives the same iterates in every engine, up to rounding.
        participation: a fraction of the clients (a float in (0, 1]) or a number of them (an int) per round.
        engine: ``"simulated"``, ``"sharded"``, ``"debug"``, or an engine object.
        metrics: name → function of ``(x, y)``, of the state (one argument), or of ``(x, y, data)``; each one
            number.
            They are added to the problem's own and evaluated inside the compiled program.
        eval_every: rounds between two evaluations; the start and the last round are always evaluated.
        checkpoint: a path or a `Checkpoint`; the run is saved there now and then, on Ctrl-C and at the end.
        resume: continue from the checkpoint if there is one.
        progress: show a progress bar when it takes longer than two seconds.
        weights: ``"uniform"`` (as in the papers) or ``"size"``: the clients' weights in averages.
        callbacks: called after each evaluation; a true return stops the run. See `EarlyStop`.
        default_metrics: whether the problem's own metrics, full passes over the data, are evaluated.

    Returns:
        A `Result`; what there is so far, where the run was stopped or interrupted.

    Raises:
        Diverged: when the iterates are no longer finite.
        TypeError, ValueError: for arguments that do not fit together, before anything is computed.
    """
    began = time.perf_counter()
    engine = engine_of(engine)
    setup = check_arguments(
        problem, method, data, rounds, seed, participation, metrics, eval_every, weights, default_metrics
    )
    method = method.plan(rounds)
    data = data.cast()
    x0, y0 = tree.as_floats(problem.first(x0), "x0"), tree.as_floats(y0, "y0")
    for name, point in (("x0", x0), ("y0", y0)):
        if bad := tree.nonfinite_leaves(point):
            raise ValueError(f"{name} is not finite in {', '.join(bad)}.")
    y0 = check_point(problem, data, x0, y0)
    carry = initial_carry(problem, method, x0, y0, data.clients)
    saving = (
        checkpoint if checkpoint is None or isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    )
    config = {
        "problem": type(problem).__name__,
        "method": describe_method(method),
        "seed": seed,
        "participants": setup.participants,
        "weights": weights,
        "eval_every": eval_every,
        "clients": data.clients,
    }
    run = Run(carry)
    if resume:
        if saving is None:
            raise ValueError("resume=True needs a checkpoint path.")
        if saving.file.exists():
            run = _load(saving, carry, config, rounds)
    elif saving is not None and saving.file.exists() and not saving.overwrite:
        raise CheckpointError(
            f"{saving.file} exists already. Give resume=True to continue it, another path, or "
            "Checkpoint(…, overwrite=True)."
        )
    placed = engine.place(data)
    run.carry = engine.place_carry(run.carry, data.clients)
    callbacks = tuple(callbacks)

    def result(status: str) -> Result:
        host = engine.fetch(run.carry, data.clients)
        x, y = method.output(jax.tree.map(jnp.asarray, host.state), jax.tree.map(jnp.asarray, host.memory))
        history = {name: np.asarray(values) for name, values in run.history.items()}
        return Result(x, y, history, run.ledger(), method, run.seconds, status, host.state, problem, data)

    def save() -> None:
        if saving is None:
            return
        host = engine.fetch(run.carry, data.clients)  # with several processes, all must take part in this
        if jax.process_index() == 0:
            _save(saving, host, run, config)

    earlier = run.seconds
    status, saved_round, saved_at, evaluations = "done", run.round, time.perf_counter(), 1
    with Progress(rounds, run.round, enabled=progress) as bar, _interruptible() as interrupted:
        if run.round == 0 and not run.history and hasattr(method, "start"):
            run.carry, counts = engine.begin(setup, method, run.carry, seed, placed)
            run.counts.update(counts)
            for remark in method.remarks(engine.fetch(run.carry, data.clients).state):
                warnings.warn(remark, stacklevel=2)
        plan = plan_of(run.round, rounds, eval_every, first=not run.history)
        while plan:
            length = 1 if callbacks else _until_saving(plan[:evaluations], saving, run.round - saved_round)
            these, plan = plan[:length], plan[length:]
            started = time.perf_counter()
            advanced = engine.advance(
                setup, method, run.carry, seed, placed, run.round, np.array(these, np.int32)
            )
            now = started + engine.agree(time.perf_counter() - started)
            trouble = _first_bad(setup, advanced, run.round, these)
            if trouble is not None:
                run.seconds = earlier + now - began
                save()
                raise Diverged(_explain(method, *trouble, advanced.carry), result("diverged"))
            run.carry = advanced.carry
            for j, number in enumerate(these):
                run.round += number
                run.counts.update(advanced.counts[j])
                at = started + (now - started) * (j + 1) / len(these)
                run.record({n: float(v[j]) for n, v in advanced.history.items()}, earlier + at - began)
            run.seconds = earlier + now - began
            bar.update(run.round, {n: v[-1] for n, v in run.history.items() if n not in BOOKKEEPING})
            evaluations = next_length(evaluations, now - started)
            if saving is not None and engine.agree(
                now - saved_at >= saving.every_seconds
                or (saving.every_rounds is not None and run.round - saved_round >= saving.every_rounds)
            ):
                save()
                saved_round, saved_at = run.round, time.perf_counter()
            progressed = Progressed(run.round, rounds, run.history, run.carry.state, run.ledger())
            stops = [callback(progressed) for callback in callbacks]
            if engine.agree(any(stops)):
                status = "stopped"
                break
            if engine.agree(interrupted()):
                status = "interrupted"
                break
    run.seconds = earlier + time.perf_counter() - began
    save()
    return result(status)


def check_arguments(
    problem: Any,
    method: Any,
    data: Any,
    rounds: int,
    seed: int,
    participation: float | int,
    metrics: Any,
    eval_every: int,
    weights: str,
    default_metrics: bool,
) -> Setup:
    """What `solve` and `sweep` are given, checked before anything is computed."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem must be a problem object such as fs.Minimization(loss), but is {problem!r}."
        )
    if isinstance(method, type) or not isinstance(method, Method):
        raise TypeError(f"method must be a method object such as fs.FedAvg(gamma=0.1), but is {method!r}.")
    if not isinstance(data, FederatedData):
        raise TypeError("data must be FederatedData; build it with fs.FederatedData.from_clients([…]).")
    if not isinstance(problem, method.solves):
        fitting = sorted(name for name, cls in METHODS.items() if isinstance(problem, cls.solves))
        raise TypeError(
            f"{type(method).__name__} solves {', '.join(c.__name__ for c in method.solves)}, "
            f"not {type(problem).__name__}. For that there are: {', '.join(fitting) or 'no methods yet'}."
        )
    for name, value, low in (("rounds", rounds, 0), ("eval_every", eval_every, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise ValueError(f"{name} must be a whole number ≥ {low}, but is {value!r}.")
    if weights not in ("uniform", "size"):
        raise ValueError(f"weights must be 'uniform' or 'size', but is {weights!r}.")
    participants = _participants(participation, data.clients)
    if participants < data.clients and method.full_participation is not None:
        raise ValueError(f"{type(method).__name__} needs participation=1.0: {method.full_participation}")
    metrics = dict(metrics or {})
    for name, metric in metrics.items():
        if not callable(metric):
            raise TypeError(
                f"The metric {name!r} must be a function of (x, y) or of the state, but is {metric!r}."
            )
        if name in BOOKKEEPING:
            raise ValueError(f"The metric name {name!r} is taken by the run's own history.")
    method.check(problem, data.clients)
    return Setup(problem, data.clients, participants, weights, tuple(metrics.items()), default_metrics)


def _participants(participation: float | int, clients: int) -> int:
    if isinstance(participation, bool) or not isinstance(participation, int | float | np.number):
        raise TypeError(
            f"participation must be a fraction in (0, 1] or a number of clients, but is {participation!r}."
        )
    if isinstance(participation, int | np.integer):
        if not 1 <= participation <= clients:
            raise ValueError(f"participation={participation} clients is not between 1 and {clients}.")
        return int(participation)
    if not 0 < participation <= 1:
        raise ValueError(f"participation must be a fraction in (0, 1], but is {participation}.")
    return max(1, round(participation * clients))


def check_point(problem: Problem, data: FederatedData, x: PyTree, y: PyTree) -> PyTree:
    """Check the starting point against the problem's functions (shapes only); returns where y starts."""

    def sample(stacked: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), stacked)

    if tree.dimension(x) == 0:
        raise ValueError("x0 has no numbers; give the point to start from.")
    train = sample(data.train)
    problem.check_sets(x)
    problem.check(x, y, train, train if data.valid is None else sample(data.valid))
    server = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data.server)
    problem.check_server(x, server)
    return problem.second(x, y, train)


def initial_carry(problem: Problem, method: Method, x0: PyTree, y0: PyTree, clients: int) -> Carry:
    """State and memory before the first round, as strongly typed host arrays."""
    y0 = method.second(problem, y0, clients)
    state = jax.tree.map(np.asarray, method.init(problem, x0, y0))
    memory = jax.tree.map(np.asarray, method.memory(problem, x0, y0))
    return Carry(state, jax.tree.map(lambda leaf: np.broadcast_to(leaf, (clients, *leaf.shape)), memory))


def plan_of(done: int, rounds: int, eval_every: int, first: bool) -> list[int]:
    """Rounds before each evaluation still to come; the start (0 rounds) and the last round are among them."""
    stops = sorted({*range(done - done % eval_every + eval_every, rounds, eval_every), rounds} - {done})
    stops = [stop for stop in stops if stop > done]
    return (
        [0] * first + [b - a for a, b in zip([done, *stops[:-1]], stops, strict=True)]
        if stops
        else [0] * first
    )


def _until_saving(plan: list[int], saving: Checkpoint | None, since: int) -> int:
    """How many of the planned evaluations to run before a checkpoint is due, at least one."""
    if saving is None or saving.every_rounds is None:
        return len(plan)
    within = int(np.searchsorted(since + np.cumsum(plan), saving.every_rounds)) + 1
    return min(within, len(plan))


def next_length(evaluations: int, seconds: float) -> int:
    """How many evaluations to run before the next look, aiming at `PAUSE` seconds."""
    if seconds > PAUSE:
        return max(1, int(evaluations * PAUSE / seconds))
    return min(EVALUATIONS, 2 * evaluations)


def _first_bad(setup: Setup, advanced: Any, first: int, these: list[int]) -> tuple[int, str] | None:
    """The round and the quantity of the first trouble in a chunk."""
    user = {name for name, _ in setup.metrics}
    troubles = []
    if advanced.bad_round >= 0:
        troubles.append((advanced.bad_round, "state"))
    ends = first + np.cumsum(these)
    for name, values in advanced.history.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if name not in user and bad.size:
            troubles.append((int(ends[bad[0]]) - 1, f"metric {name!r}"))
    return min(troubles, default=None)


def _explain(method: Method, round_number: int, quantity: str, carry: Carry) -> str:
    if quantity == "state":
        leaves = tree.nonfinite_leaves(carry.state)
        quantity = f"state ({', '.join(leaves)})" if leaves else "state"
    steps = {n: v for n, v in method.describe().items() if isinstance(v, float)}
    return (
        f"{type(method).__name__} diverged: the {quantity} is not finite after round {round_number}. "
        "Lower the step size "
        f"({', '.join(f'{n}={v:g}' for n, v in steps.items())}), scale the data, or look closer with "
        "engine='debug'. "
        "The exception's .result holds the last finite point."
    )


def _save(saving: Checkpoint, host: Carry, run: Run, config: dict[str, Any]) -> None:
    facts = {"config": config, "round": run.round, "counts": run.counts, "seconds": run.seconds}
    history = {f"history/{name}": np.asarray(values, np.float64) for name, values in run.history.items()}
    arrays = {**flatten("state", host.state), **flatten("memory", host.memory), **history}
    save_arrays(saving.file, arrays, facts)


def _load(saving: Checkpoint, like: Carry, config: dict[str, Any], rounds: int) -> Run:
    arrays, facts = load_arrays(saving.file)
    other = {k: (facts["config"].get(k), v) for k, v in config.items() if facts["config"].get(k) != v}
    if other:
        changes = "; ".join(f"{k}: {a!r} there, {b!r} here" for k, (a, b) in other.items())
        raise CheckpointError(
            f"{saving.file} belongs to another run ({changes}). Resume with the same arguments."
        )
    if facts["round"] > rounds:
        raise CheckpointError(f"{saving.file} is already at round {facts['round']}, past rounds={rounds}.")
    carry = Carry(
        unflatten("state", like.state, arrays, saving.file),
        unflatten("memory", like.memory, arrays, saving.file),
    )
    history = {n.removeprefix("history/"): a.tolist() for n, a in arrays.items() if n.startswith("history/")}
    return Run(carry, facts["round"], history, Counter(facts["counts"]), facts["seconds"])


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop at the next look; a second one raises at once."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
