"""Check the arguments of a run before anything is computed, and prepare its start on the host."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.channel import Buffered, Channels, Dropouts, Poisson
from fedstrata.channels.privacy import Budget
from fedstrata.core import tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.fed import Setup
from fedstrata.core.hyperparameters import Whole
from fedstrata.core.method import METHODS, Method, Moment
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.engines.engine import Carry
from fedstrata.engines.identity import configuration, host_functions, programs_of, settings_of
from fedstrata.engines.metrics import Metric, UserMetric, metric_of
from fedstrata.solving.channelling import with_channels
from fedstrata.solving.result import BOOKKEEPING
from fedstrata.support.digest import current, tree_digest
from fedstrata.support.points import as_floats, nonfinite_leaves
from fedstrata.support.precision import Precision
from fedstrata.support.shown import short

MOST_FITTING = 64  # problems and shapes that are remembered
FEW_CLIENTS = 3  # whose samples functions are checked on
MOST_ROUNDS = 2**31 - 2  # a round's number is a 32-bit integer, the last of which stands for "before round 0"
MOST_SEEDS = 2**32 - 1


@dataclass(frozen=True)
class Posed:
    """One or several runs with checked arguments, ready to begin.

    Attributes:
        setup: the fixed part of the run, for any engine.
        methods: each lane's method, which knows the number of rounds.
        seeds: of each lane.
        method: the method that the engine takes: with its channels, or the lanes' methods stacked.
        seed: likewise.
        datasets: the clients' samples, of all lanes or of each.
        carry: state and memory before the first round.
        rounds, eval_every: the number of rounds, and the rounds between two evaluations.
        x0, y0: where it starts.
        hosted: the metrics that the host evaluates.
        spending: the privacy that rounds cost clients or samples, if there is noise and an accountant.
        channels: what happens to uploads on their way, as plain values.
    """

    setup: Setup
    methods: list[Method]
    seeds: list[int]
    method: Method
    seed: Any
    datasets: list[FederatedData]
    carry: Carry
    rounds: int
    eval_every: int
    x0: PyTree
    y0: PyTree
    hosted: dict[str, UserMetric]
    spending: Budget | None = None
    channels: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> FederatedData:
        """The clients' samples; with several data sets the first, whose form all share."""
        return self.datasets[0]

    def data_of(self, lane: int) -> FederatedData:
        """The clients' samples in a lane."""
        return self.datasets[lane % len(self.datasets)]

    @cached_property
    def texts(self) -> list[Method]:
        """Each lane's method as the engine runs it: with its channels, if there are any."""
        alone = not np.ndim(self.seed)
        return [self.method] if alone else [tree.row(self.method, b) for b in range(len(self.methods))]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The run's identity as plain values: a checkpoint is resumed only by a run with the same one."""
        setup, alone, text, carry = self.setup, len(self.methods) == 1, self.texts[0], self.carry
        if np.ndim(self.seed):  # a sweep's have an axis of lanes, be it of one
            carry = tree.row(carry, 0)
        programs = programs_of(setup, text, carry, self.datasets[0])
        settings = {**configuration(), **settings_of("problem", setup.problem)}
        for b, method in enumerate(self.methods):
            settings |= settings_of("method" if alone else f"methods[{b}]", method)
        return {
            **settings,
            **{name: f"program {digest}" for name, digest in programs.items()},
            **{f"frozen[{n}]": f"contents {one.digest}" for n, one in enumerate(setup.problem.held)},
            "metrics": [name for name, _ in setup.metrics],
            **host_functions({f"metrics[{name!r}]": metric for name, metric in self.hosted.items()}),
            "data": " ".join(["contents", *dict.fromkeys(data.fingerprint for data in self.datasets)]),
            "x0": f"contents {tree_digest(self.x0)}",
            "y0": f"contents {tree_digest(self.y0)}",
            "seed": self.seeds[0] if alone else self.seeds,
            "clients": setup.clients,
            "participants": setup.participants,
            **({} if setup.rate is None else {"participation": f"Poisson({setup.rate})"}),
            **self.channels,
            "weights": setup.weights,
            "eval_every": self.eval_every,
            "default_metrics": setup.measure_problem,
            **({} if setup.precision == "float32" else {"precision": setup.precision}),
        }

    @cached_property
    def until(self) -> int:
        """The number of rounds to run: fewer if the privacy budget is spent before."""
        if self.spending is None or self.spending.budget is None:
            return self.rounds
        return self.spending.rounds_within(self.spending.budget, self.rounds)

    @property
    def common(self) -> dict[str, Any]:
        """The part of the identity that the parties of a network compare: all but the samples."""
        return {key: value for key, value in self.identity.items() if key != "data"}


def pose(
    problem: Problem,
    method: Method,
    data: FederatedData,
    x0: PyTree,
    *,
    y0: PyTree = None,
    rounds: int,
    seed: int = 0,
    participation: float | int | Poisson | Buffered = 1.0,
    metrics: Mapping[str, Metric] | None = None,
    eval_every: int = 1,
    weights: Weights = "uniform",
    default_metrics: bool = True,
    channel: Channels | None = None,
    dropouts: Dropouts | None = None,
    precision: Precision = "float32",
) -> Posed:
    """Check the arguments of `fedstrata.solve` and make of them what an engine takes."""
    check_kinds(problem, data)
    _check_kind(problem, method)
    rounds = whole("rounds", rounds, 0, MOST_ROUNDS)
    eval_every, seed = whole("eval_every", eval_every, 1), whole("seed", seed, 0, MOST_SEEDS)
    problem.check_weights(weights)
    participants = participants_of(participation, data.clients)
    if weights == "size" and participants < data.clients and data.sizes.sum(dtype=np.int64) >= 2**31:
        raise ValueError(
            "weights='size' draws clients by whole numbers of 32 bits, and there are 2³¹ samples or more. "
            "Use weights='uniform', or participation=1.0."
        )
    asked = _metrics(metrics, data)
    hosted = {name: metric for name, metric in asked.items() if metric.hosted}
    compiled = tuple((name, metric) for name, metric in asked.items() if name not in hosted)
    now = current(problem, compiled, _schedules(method), type(method))
    setup = Setup(problem, data.clients, participants, weights, compiled, bool(default_metrics), current=now)
    if isinstance(participation, Poisson):
        if weights == "size":
            raise ValueError(
                "fs.Poisson draws every client with the same probability, and weights='size' draws them by "
                "their sizes: use weights='uniform'."
            )
        setup = replace(setup, rate=participation.q)
    setup = replace(setup, precision=_checked_precision(precision, method))
    method = check_method(setup, method, rounds)
    with _on_host():
        x0, y0 = _point(problem.start_x(x0), "x0"), _point(y0, "y0")
        if y0 is not None and not problem.has_y and type(method).start_y is Method.start_y:
            raise ValueError(f"{type(problem).__name__} has one variable: leave y0 out.")
        y0 = check_point(problem, data, x0, y0)
    for name, metric in compiled:
        metric.check(name, data, x0, y0)
    _warn_of_validation(problem, data)
    for caution in method.cautions(Moment(problem, rounds, x0)):
        warnings.warn(caution, stacklevel=4)
    carry = initial_carry(problem, method, x0, y0, data.clients)
    if setup.measure_problem:
        _check_output(problem, method, carry, y0, data.clients)
    posed = Posed(setup, [method], [seed], method, seed, [data], carry, rounds, eval_every, x0, y0, hosted)
    late = isinstance(participation, Buffered)
    if channel is None and dropouts is None and setup.rate is None and not late:
        return posed
    return with_channels(posed, channel, dropouts, late)


def _checked_precision(precision: Precision, method: Method) -> Precision:
    """Return the precision if it exists and the method supports it."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {get_args(Precision)}, but is {precision!r}.")
    divides = vars(method).get("products") == "differences"  # of a hypergradient
    why = "divides small differences of gradients (products='differences')" if divides else method.exact
    if precision == "bfloat16" and why is not None:
        raise ValueError(
            f"{type(method).__name__} {why}, and in bfloat16 products have eight bits: what remains is "
            "rounding. Use precision='float32'."
        )
    return precision


def _check_output(problem: Problem, method: Method, carry: Carry, y0: PyTree, clients: int) -> None:
    """Raise if each client has its own y, but default metrics need a shared one."""
    shared = any(level.variable == "y" and level.solved_by == "all" for level in problem.levels)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(method.output(*carry)[1])]
    if shared and shapes and shapes == [(clients, *np.shape(leaf)) for leaf in jax.tree.leaves(y0)]:
        name, kind = type(method).__name__, type(problem).__name__
        raise TypeError(
            f"{name} gives every client its own y, but the clients of this {kind} share one. Declare that "
            "each has its own (local=True if the class takes it, or a subclass with personal = True), or "
            "give default_metrics=False."
        )


def _schedules(method: Method) -> list[Any]:
    """The functions among the hyper-parameters."""
    return [getattr(value, "func", value) for value in vars(method).values() if callable(value)]


def check_kinds(problem: Problem, data: FederatedData) -> None:
    """Raise if these are other things, as in the wrong order."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem must be a problem object such as fs.Minimization(loss), but is {problem!r}."
        )
    if not isinstance(data, FederatedData):
        raise TypeError(f"data must be FederatedData, but is {_kind(data)}.")


def _check_kind(problem: Problem, method: Method) -> None:
    if isinstance(method, type) or not isinstance(method, Method):
        raise TypeError(f"method must be a method object such as fs.FedAvg(gamma=0.1), but is {method!r}.")
    if not method.solves:
        raise TypeError(
            f"{type(method).__name__} does not declare what it solves: give its class "
            "solves = (fs.Minimization,), for instance."
        )
    if not isinstance(problem, method.solves):
        fitting = sorted(name for name, cls in METHODS.items() if isinstance(problem, cls.solves))
        raise TypeError(
            f"{type(method).__name__} solves {', '.join(c.__name__ for c in method.solves)}, "
            f"not {type(problem).__name__}. These methods do: {', '.join(fitting) or 'none yet'}."
        )


def _kind(data: Any) -> str:
    """A description of an argument that is not `FederatedData`, and how to convert it."""
    by_clients = "fs.FederatedData.from_clients([{'x': …, 'y': …}, …]), with the arrays of each client"
    if hasattr(data, "columns"):
        return "a data frame: fs.FederatedData.from_dataframe(df, by='hospital', label='ill') converts it"
    match data:
        case list() | tuple():
            return f"a {type(data).__name__}: build it with {by_clients}"
        case dict():
            return (
                "a dict: fs.FederatedData.from_arrays(arrays, clients, partition) divides arrays over "
                f"clients; if they are divided already, {by_clients}"
            )
    return f"{short(data)}: build it with {by_clients}"


def whole(name: str, value: int, low: int, high: int | None = None) -> int:
    """Return a whole number in a range, or raise."""
    if Whole(low).fault(value) is not None or np.ndim(value) > 0 or (high is not None and value > high):
        limits = f"≥ {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be a whole number {limits}, but is {value!r}.")
    return int(value)


def participants_of(participation: Any, clients: int) -> int:
    """The number of clients that take part, from a fraction or a number."""
    match participation:
        case Poisson():
            return participation.room(clients)
        case Buffered():
            return participants_of(participation.size, clients)
        case int() | np.integer() if participation is not True and participation is not False:
            if not 1 <= participation <= clients:
                raise ValueError(f"participation={participation} clients is not between 1 and {clients}.")
            return int(participation)
        case float() | np.floating():
            if not 0 < participation <= 1:
                raise ValueError(f"participation must be a fraction in (0, 1], but is {participation}.")
            return max(1, round(participation * clients))
    raise TypeError(
        "participation must be a fraction in (0, 1], a number, fs.Poisson(q) or fs.Buffered(size), but is "
        f"{participation!r}."
    )


def expected_participants(participation: Any, clients: int) -> int:
    """The number of clients that usually take part; not all of them, where each is drawn by itself."""
    if isinstance(participation, Poisson) and participation.q < 1:
        return max(1, min(round(participation.q * clients), clients - 1))
    return participants_of(participation, clients)


def _metrics(metrics: Mapping[str, Any] | None, data: FederatedData) -> dict[str, UserMetric]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a dict with a function under each name, {{'distance': lambda x, y: …}}, but is "
            f"{short(metrics)}."
        )
    if taken := [name for name in metrics or {} if name in BOOKKEEPING]:
        raise ValueError(f"The metric name {taken[0]!r} is taken by the run's own history.")
    return {name: metric_of(name, metric).of(name, data) for name, metric in (metrics or {}).items()}


def checked_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Return the callbacks as a tuple; a single one is accepted."""
    several = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in several:
        if isinstance(callback, type):
            raise TypeError(f"callbacks has the class {callback.__name__}: make one, {callback.__name__}(…).")
        if not callable(callback):
            raise TypeError(
                f"callbacks must be functions of what a run has so far, but has {short(callback)}."
            )
    return several


def _warn_of_validation(problem: Problem, data: FederatedData) -> None:
    if data.valid is None and problem.validated is not None:
        name = type(problem).__name__
        warnings.warn(
            f"The data has no validation part: {name}.{problem.validated} is evaluated on the training "
            "samples that the other level is fitted to, and its metric is not a validation loss. Hold "
            "samples out (valid_fraction=… of loaders and from_arrays, valid=… of from_clients), or, where "
            f"both levels are to see the same samples, say so: fs.{name}(…, same_samples=True).",
            stacklevel=5,
        )


def _point(point: PyTree, name: str) -> PyTree:
    point = as_floats(point, name)
    if bad := nonfinite_leaves(point):
        where = "" if bad == ["(value)"] else f" in {', '.join(bad)}"
        raise ValueError(f"{name} is not finite{where}.")
    return point


def check_point(problem: Problem, data: FederatedData, x: PyTree, y: PyTree) -> PyTree:
    """Check the starting point against the problem's functions (shapes only); returns where y starts."""
    if tree.dimension(x) == 0:
        raise ValueError("x0 has no numbers; give the point to start from.")
    train = data.sample_of()
    valid, server = train if data.valid is None else data.sample_of("valid"), data.sample_of("server")
    leaves, structure = jax.tree.flatten((x, y, train, valid, server))
    seen = problem, structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    if not _known(seen):
        check_sets(problem, x, y, train)
        problem.check(x, y, train, valid)
        problem.check_server(x, server)
        _known(seen, True)
    return problem.start_y(x, y, train)


def check_sets(problem: Problem, x: PyTree, y: PyTree, sample: PyTree) -> None:
    """Raise if a projection changes the structure or shapes of a point."""

    def projected(point: PyTree, x: PyTree, sample: PyTree) -> PyTree:
        alone = Samples(jax.tree.map(lambda leaf: leaf[None], sample), 1)
        client = Client(jnp.zeros((), jnp.int32), alone, alone, fraction=jnp.ones(()))
        if letter == "x":
            return project(point, client)
        return project(point, x, client if problem.personal else sample)

    for name, project in problem.sets.items():
        letter, given, most = ("y", y, 3) if name == "project_y" else ("x", x, 2)
        if project.trivial or given is None:
            continue
        what, shape = f"{type(problem).__name__}.{name}", _shapes(given)
        try:
            returned = _shapes(jax.eval_shape(projected, given, x, sample))
        except ValueError:  # a set's own words
            if project.arity < most:
                raise
            continue
        except Exception as error:
            if project.arity == most:  # a client's set may need what only a run has
                continue
            raise TypeError(
                f"{what} cannot project a point like {letter}0, of shape {shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if returned != shape:
            raise TypeError(
                f"{what} must return a point like {letter}, of shape {shape}, but returns {returned}."
            )


def _shapes(point: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: list(jnp.shape(leaf)), point)


def check_values(posed: Posed) -> str | None:
    """Check the problem's functions against each other at the start, on a few clients' first samples.

    Returns a warning, or None.
    """
    problem, data = posed.setup.problem, posed.data
    if type(problem).check_values is Problem.check_values or data.source is not None:
        return None
    few = [data.client(i) for i in range(min(FEW_CLIENTS, data.clients))]
    with _on_host():
        samples = [jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), own) for own in few]
        return problem.check_values(posed.x0, samples)


_fitting: OrderedDict[Any, None] = OrderedDict()


def _known(seen: Any, now: bool = False) -> bool:
    """Whether these shapes were checked before; tracing the functions takes most of a small call's time."""
    try:
        if now:
            _fitting[seen] = None
            while len(_fitting) > MOST_FITTING:
                _fitting.popitem(last=False)
        return seen in _fitting
    except TypeError:  # a set with arrays has no hash
        return False


def check_method(setup: Setup, method: Method, rounds: int) -> Method:
    """Check that the method fits the problem and the federation; returns it with its horizon."""
    partial = setup.rate is not None or setup.participants < setup.clients
    if partial and method.full_participation is not None:
        raise ValueError(f"{type(method).__name__} needs participation=1.0: {method.full_participation}")
    if lacking := method.lacks(setup.problem):
        fitting = sorted(name for name, cls in METHODS.items() if cls.fits(setup.problem))
        raise TypeError(
            f"{type(method).__name__} differentiates {', '.join(lacking)}, which has values only "
            "(fs.black_box). "
            f"Methods that need only values of it: {', '.join(fitting) or 'none for this class of problems'}."
        )
    method.check(setup.problem, setup.clients)
    method.check_schedules(rounds)
    return method.plan(rounds)


def _on_host() -> AbstractContextManager[Any]:
    """Create small arrays on the host: on a GPU, each would cost a wait."""
    if jax.default_backend() == "cpu":
        return nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names the GPU alone
        return nullcontext()


def initial_carry(problem: Problem, method: Method, x0: PyTree, y0: PyTree, clients: int) -> Carry:
    """State and memory before the first round, as strongly typed host arrays."""
    with _on_host():
        y0 = method.start_y(problem, y0, clients)
        state = jax.tree.map(np.asarray, method.init(problem, x0, y0))
        memory = jax.tree.map(np.asarray, method.memory(problem, x0, y0))
    return Carry(state, jax.tree.map(lambda leaf: np.broadcast_to(leaf, (clients, *leaf.shape)), memory))
