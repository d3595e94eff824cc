"""Problems by name, for files without Python: each is posed from a model, data and a few options.

ℓ is the model's loss, w its parameters, u and v a sample's features and label; a mean over client i's
samples is E_i, and over clients 1/m Σ.

    minimisation    min_w 1/m Σ E_i ℓ(w)
    regularisation  min_x 1/m Σ E_i ℓ(w(x)) on validation samples,
                    w(x) = argmin 1/m Σ (E_i ℓ(w) + exp(x_i)/2 ‖w‖²)
    hypercleaning   as `fedstrata.hypercleaning`: a trust σ(x_j) in each training sample
    loss_tuning     as `fedstrata.loss_tuning`: a scale and a shift of each class's score
    robust          min_w risk of the losses ℓ(w) of all samples, see `fedstrata.dro`
    client_robust   min_w λ log 1/m Σ exp(E_i ℓ(w)/λ), which tends to the worst client's loss as λ → 0
    selection       among the minimisers of 1/m Σ E_i ℓ(w), the sparsest, the smallest, or the best validated
    personalised    min_w E ℓ(w) on the server's samples + μ/2 · 1/m Σ ‖w − y_i(w)‖²,
                    y_i(w) = argmin E_i ℓ(y) + λ/2 ‖y − w‖²
    strategic       min_w 1/m Σ E_i ℓ(w) at features u + y(w), y(w) = argmax score(w, u + y) − c/2 ‖y‖²
    standardised    min_w 1/m Σ E_i ℓ(w) at features (u − z¹)/√z², with z¹ = 1/m Σ E_i u and
                    z² = 1/m Σ E_i (u − z¹)², all three at once
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data import count_classes
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.engines.metrics import PerClient, per_client
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.models import Metric, Model
from fedstrata.problems import (
    MPEC,
    Bilevel,
    Composition,
    Minimax,
    Minimization,
    MultiSequence,
    Personalized,
    Selection,
    dro,
    hypercleaning,
    loss_tuning,
    prox,
)
from fedstrata.problems.dro import Dual
from fedstrata.problems.hyper import balance
from fedstrata.support.words import suggest

RISKS = {
    name: getattr(dro, name) for name in ("kl", "chi2", "cvar", "kl_cvar", "chi2_ball", "mean_semideviation")
}
FORMS: dict[str, type[Problem]] = {"composition": Composition, "minimax": Minimax}


class SolveArguments(NamedTuple):
    """What `fedstrata.solve` is given, but for the method."""

    problem: Problem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    metrics: Mapping[str, Metric | PerClient]


class Inputs(NamedTuple):
    """What a problem is posed from, beside its options."""

    model: Model
    data: FederatedData
    seed: int
    weights: Weights


@dataclass(frozen=True)
class Entry:
    """A problem of the catalogue.

    Args:
        pose: poses it; its keyword arguments are the problem's options.
        kind: its class, or None where the option ``form`` says.
        measures: what the history has of it.
        metrics: what is measured, unless others are asked for, beside ``accuracy`` and ``test_loss``.
        needs: an option of ``[data]`` without which it cannot be posed.
        models: the models that it takes; all where there are none.
    """

    pose: Callable[..., SolveArguments]
    kind: type[Problem] | None
    measures: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    needs: Callable[[Mapping[str, Any]], str | None] = lambda options: None
    models: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Option → what it is where it is left out."""
        parameters = inspect.signature(self.pose).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def kind_of(self, options: Mapping[str, Any]) -> type[Problem]:
        """The class of the problem with these options."""
        if self.kind is not None:
            return self.kind
        form = options.get("form", "composition")
        _one_of("form", form, FORMS)
        return FORMS[form]

    def measures_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """What the history has of the problem with these options."""
        return ("payoff",) if self.kind_of(options) is Minimax else self.measures


def _one_of(name: str, value: object, known: Mapping[str, Any] | tuple[str, ...]) -> None:
    if value not in known:
        hint = suggest(value, list(known)) if isinstance(value, str) else "."
        raise ExperimentError(f"problem.{name}: there is no {value!r}{hint} There are {', '.join(known)}.")


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ExperimentError(f"problem.{name} must be a positive number, but is {value!r}.")
    return float(value)


def _classes(problem: str, model: Model) -> None:
    if model.labels != "classes":
        raise ExperimentError(
            f"problem.model: {problem} has the cross-entropy of classes, and this model has other labels. "
            "Take softmax or mlp."
        )


Sampled = Callable[[PyTree, Any], Any]  # a function of the model's parameters and one sample
# Where a model's parameters are: what makes of its functions those of x, or of x and y.
PLACES: dict[str, Callable[[Sampled], Callable[..., Any]]] = {
    "x": lambda function: lambda x, sample: function(x, sample),
    "y": lambda function: lambda x, y, sample: function(y, sample),
    "lifted": lambda function: lambda x, sample: function(x.x, sample),
}


@functools.cache
def _metrics(model: Model, where: str = "x", own: str = "") -> dict[str, Any]:
    """The model's metrics, where its parameters are; ``own`` says where a client's own are, if elsewhere."""

    def at(metric: Metric) -> Metric:
        if where == "x":
            return metric
        return lambda x, y, data: metric(y if where == "y" else x.x, None, data)

    whole = {name: at(metric) for name, metric in model.metrics.items()}
    return {**whole, **_by_client(model.loss, model.correct, PLACES[own or where])}


def _by_client(loss: Sampled, correct: Sampled, place: Callable[[Sampled], Any]) -> dict[str, PerClient]:
    return {
        "client_loss": per_client(place(loss)),
        "client_accuracy": per_client(place(correct), mode="max"),
        "client_test_loss": per_client(place(loss), part="test"),
        "client_test_accuracy": per_client(place(correct), part="test", mode="max"),
    }


@functools.cache
def _minimization(model: Model) -> Minimization:
    return Minimization(model.loss)


def minimisation(given: Inputs) -> SolveArguments:
    """The mean loss."""
    model = given.model
    return SolveArguments(_minimization(model), given.data, model.init(given.seed), None, _metrics(model))


@functools.lru_cache(maxsize=8)
def _indexed(data: FederatedData) -> FederatedData:
    return data.with_client_index()


def squares(x: PyTree) -> Any:
    """‖x‖² over all leaves."""
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x))


@functools.cache
def _regularised(model: Model, per: str) -> tuple[Bilevel, dict[str, Any]]:
    def lower(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        log = x[sample["client"]] if per == "client" else x
        return model.loss(y, sample) + jnp.exp(log) / 2 * squares(y)

    def weight(x: PyTree, y: PyTree, data: Placed) -> Any:
        return jnp.exp(x).mean()

    problem = Bilevel(lambda x, y, sample: model.loss(y, sample), lower)
    return problem, {**_metrics(model, "y"), "weight": weight}


def regularisation(given: Inputs, *, per: str = "client", start: float = 0.1) -> SolveArguments:
    """An ℓ2 weight, for each client or for all, that does best on validation samples.

    Args:
        given: the model, the data.
        per: ``"client"`` or ``"all"``.
        start: the weight to begin with; x is its logarithm.
    """
    _one_of("per", per, ("client", "all"))
    data = _indexed(given.data)
    x0 = jnp.full((data.clients,) if per == "client" else (), math.log(_positive("start", start)))
    problem, metrics = _regularised(given.model, per)
    return SolveArguments(problem, data, x0, given.model.init(given.seed), metrics)


@functools.lru_cache(maxsize=8)
def _noisy(data: FederatedData, noise: float, classes: int, seed: int) -> FederatedData:
    """Training samples that know their place, and some of whose labels are replaced by other ones."""
    rng, labels = np.random.default_rng((seed, 2)), np.asarray(data.train["y"])
    clean = rng.uniform(size=labels.size) >= noise
    wrong = (labels + rng.integers(1, classes, labels.size)) % classes
    index = np.arange(labels.size, dtype=np.int32)
    changed = {"y": np.where(clean, labels, wrong).astype(labels.dtype), "index": index, "clean": clean}
    return replace(data, train={**data.train, **changed})


@functools.cache
def _cleaned(model: Model, lam: float) -> tuple[Bilevel, dict[str, Any]]:
    def found(x: PyTree, y: PyTree, data: Placed) -> Any:
        return jnp.mean((x > 0) == data.train["clean"])

    return hypercleaning(model.apply, lam), {**_metrics(model, "y"), "found": found}


def hypercleaned(given: Inputs, *, noise: float = 0.3, lam: float = 1e-3) -> SolveArguments:
    """A trust in each training sample, learnt from validation samples whose labels are right.

    Args:
        given: the model, the data.
        noise: the part of training labels that are replaced by wrong ones.
        lam: λ of the lower level.
    """
    model, data = given.model, given.data
    _classes("hypercleaning", model)
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < 1:
        raise ExperimentError(f"problem.noise must be a number in [0, 1), but is {noise!r}.")
    data = _noisy(data, float(noise), max(2, count_classes(data)), given.seed)
    problem, metrics = _cleaned(model, _positive("lam", lam))
    return SolveArguments(problem, data, jnp.zeros(len(data.train["y"])), model.init(given.seed), metrics)


@functools.lru_cache(maxsize=8)
def _balanced(data: FederatedData, classes: int) -> FederatedData:
    weight = balance(np.asarray(data.valid["y"]), classes).astype(np.float32)
    return replace(data, valid={**data.valid, "weight": weight})


@functools.cache
def _tuned(model: Model) -> Bilevel:
    return loss_tuning(model.apply)


def tuned(given: Inputs) -> SolveArguments:
    """A loss for unbalanced classes: a scale and a shift of each class's score."""
    model, data = given.model, given.data
    _classes("loss_tuning", model)
    classes = max(2, count_classes(data))
    x0 = {"delta": jnp.zeros(classes), "shift": jnp.zeros(classes)}
    metrics = _metrics(model, "y")
    return SolveArguments(_tuned(model), _balanced(data, classes), x0, model.init(given.seed), metrics)


def risk_options(risk: str) -> list[str]:
    """The options that a risk has."""
    return [name for name in inspect.signature(RISKS[risk]).parameters if name != "loss"]


@functools.cache
def _risk(model: Model, risk: str, options: tuple[tuple[str, Any], ...]) -> dro.DRO:
    given = dict(options)
    known = risk_options(risk)
    for name in given:
        if name not in known:
            raise ExperimentError(
                f"problem.{name}: the risk {risk} has no {name!r}. It has {', '.join(known)}."
            )
    for name, parameter in inspect.signature(RISKS[risk]).parameters.items():
        if name != "loss" and parameter.default is parameter.empty and name not in given:
            raise ExperimentError(f"problem.{name}: the risk {risk} needs {name!r}.")
    return RISKS[risk](model.loss, **given)


@functools.lru_cache(maxsize=16)
def _dual(problem: Any, data: FederatedData, weights: Weights) -> Dual:
    return problem.minimax(data, weights)


def _in_form(form: str, problem: Any, given: Inputs, data: FederatedData, lifted: bool) -> SolveArguments:
    """A robust problem as a composition, or as the minimax problem that it is."""
    model = given.model
    if form == "minimax":
        dual = _dual(problem, data, given.weights)
        return SolveArguments(dual.problem, dual.data, model.init(given.seed), dual.y0, _metrics(model))
    return SolveArguments(
        problem, data, model.init(given.seed), None, _metrics(model, "lifted" if lifted else "x")
    )


def robust(
    given: Inputs,
    *,
    risk: str = "kl",
    form: str = "composition",
    lam: float | None = None,
    level: float | None = None,
    rho: float | None = None,
    delta: float | None = None,
    nonnegative: bool | None = None,
) -> SolveArguments:
    """The worst case over weights of the samples.

    Args:
        given: the model, the data.
        risk: ``"kl"``, ``"chi2"``, ``"cvar"``, ``"kl_cvar"``, ``"chi2_ball"`` or ``"mean_semideviation"``.
        form: ``"composition"`` or ``"minimax"``.
        lam: λ, of kl, chi2, kl_cvar and mean_semideviation.
        level: the part of the worst samples, of cvar and kl_cvar.
        rho: ρ, of chi2_ball.
        delta: δ, of mean_semideviation.
        nonnegative: of chi2.
    """
    _one_of("risk", risk, RISKS)
    _one_of("form", form, FORMS)
    every = {"lam": lam, "level": level, "rho": rho, "delta": delta, "nonnegative": nonnegative}
    options = tuple((name, value) for name, value in every.items() if value is not None)
    problem = _risk(given.model, risk, options)
    return _in_form(form, problem, given, given.data, problem.lifted)


def client_of(sample: PyTree) -> Any:
    """The number of the client that a sample belongs to."""
    return sample["client"]


@functools.cache
def _worst_client(model: Model, clients: int, lam: float) -> dro.GroupDRO:
    return dro.group(model.loss, clients, lam, client_of)


def client_robust(given: Inputs, *, lam: float = 0.1, form: str = "composition") -> SolveArguments:
    """The worst client's loss, smoothed.

    Args:
        given: the model, the data.
        lam: λ; the smaller, the nearer to the worst client's loss.
        form: ``"composition"`` or ``"minimax"``.
    """
    _one_of("form", form, FORMS)
    data = _indexed(given.data)
    problem = _worst_client(given.model, data.clients, _positive("lam", lam))
    return _in_form(form, problem, given, data, lifted=False)


PREFERENCES = ("sparse", "smallest", "validation")


@functools.cache
def _selected(model: Model, prefer: str) -> Selection:
    if prefer == "sparse":
        return Selection(model.loss, prox.L1())
    if prefer == "smallest":
        return Selection(model.loss, lambda x: squares(x) / 2)
    return Selection(model.loss, lambda x, sample: model.loss(x, sample))


def selection(given: Inputs, *, prefer: str = "smallest") -> SolveArguments:
    """Among the optima, the preferred one.

    Args:
        given: the model, the data.
        prefer: ``"sparse"`` (‖w‖₁), ``"smallest"`` (½‖w‖²) or ``"validation"`` (the loss on such samples).
    """
    _one_of("prefer", prefer, PREFERENCES)
    model = given.model
    return SolveArguments(_selected(model, prefer), given.data, model.init(given.seed), None, _metrics(model))


@functools.cache
def _personal(model: Model, mu: float, lam: float) -> Personalized:
    def apart(x: PyTree, y: PyTree) -> Any:
        return squares(jax.tree.map(jnp.subtract, x, y))

    def client(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        return model.loss(y, sample) + lam / 2 * apart(x, y)

    return Personalized(model.loss, lambda x, y: mu / 2 * apart(x, y), client)


def personalised(given: Inputs, *, mu: float = 0.1, lam: float = 1.0) -> SolveArguments:
    """A model for each client, and the server's, which they are drawn to.

    Args:
        given: the model, the data.
        mu: μ, what their distance costs the server.
        lam: λ, what it costs a client.
    """
    model, start = given.model, given.model.init(given.seed)
    problem = _personal(model, _positive("mu", mu), _positive("lam", lam))
    return SolveArguments(problem, given.data, start, start, _metrics(model, "x", own="y"))


@functools.cache
def _strategic(model: Model, cost: float) -> tuple[MPEC, dict[str, Any]]:
    def moved(y: PyTree, sample: PyTree) -> PyTree:
        return {**sample, "x": sample["x"] + y}

    def slope(x: PyTree, u: PyTree) -> Any:
        return jax.grad(model.apply, argnums=1)(x, u)

    def response(x: PyTree, sample: PyTree) -> Any:
        return slope(x, sample["x"]) / cost  # exact: the score is linear in the features

    def at_response(function: Sampled) -> Sampled:
        return lambda x, sample: function(x, moved(response(x, sample), sample))

    def tested(function: Sampled) -> Metric:
        return lambda x, y, data: jax.vmap(at_response(function), (None, 0))(x, data.test).mean()

    problem = MPEC(
        leader=lambda x, y, sample: model.loss(x, moved(y, sample)),
        follower=lambda x, y, sample: cost * y - slope(x, sample["x"] + y),
        solution=response,
    )
    whole = {"accuracy": tested(model.correct), "test_loss": tested(model.loss)}
    return problem, {**whole, **_by_client(model.loss, model.correct, at_response)}


def strategic(given: Inputs, *, cost: float = 10.0) -> SolveArguments:
    """Everybody moves their features, at a cost, to be given the label 1; the model is to foresee it.

    Args:
        given: the model, the data.
        cost: c, of moving.
    """
    model, data = given.model, given.data
    if model.labels != "two":
        raise ExperimentError(
            'problem.model: strategic needs one score, positive for the label 1: model = "logistic", or '
            '{ name = "linear", loss = "logistic" }.'
        )
    problem, metrics = _strategic(model, _positive("cost", cost))
    start = jnp.zeros(data.train["x"].shape[1:])
    return SolveArguments(problem, data, model.init(given.seed), start, metrics)


@functools.cache
def _standardised(model: Model, floor: float) -> tuple[MultiSequence, dict[str, Any]]:
    def moved(Z: PyTree, sample: PyTree) -> PyTree:
        mean, variance = Z
        return {**sample, "x": (sample["x"] - mean) / jnp.sqrt(jnp.maximum(variance, floor))}

    def at(function: Sampled) -> Callable[..., Any]:
        return lambda x, Z, sample: function(x, moved(Z, sample))

    def tested(function: Sampled) -> Metric:
        return lambda x, Z, data: jax.vmap(at(function), (None, None, 0))(x, Z, data.test).mean()

    problem = MultiSequence(
        P=lambda x, Z, sample: jax.grad(model.loss)(x, moved(Z, sample)),
        S=(
            lambda x, mean, sample: mean - sample["x"],
            lambda mean, variance, sample: variance - (sample["x"] - mean) ** 2,
        ),
    )
    whole = {"accuracy": tested(model.correct), "test_loss": tested(model.loss)}
    return problem, {**whole, **_by_client(model.loss, model.correct, at)}


def standardised(given: Inputs, *, floor: float = 0.01) -> SolveArguments:
    """The features' means and variances over the federation, and the model at what they make of the features.

    Args:
        given: the model, the data.
        floor: the least variance that features are divided by the root of.
    """
    problem, metrics = _standardised(given.model, _positive("floor", floor))
    shape = given.data.train["x"].shape[1:]
    start = (jnp.zeros(shape), jnp.ones(shape))
    return SolveArguments(problem, given.data, given.model.init(given.seed), start, metrics)


def _valid(options: Mapping[str, Any]) -> str:
    return "valid_fraction"


def _server(options: Mapping[str, Any]) -> str:
    return "server_fraction"


def _valid_if_asked(options: Mapping[str, Any]) -> str | None:
    return "valid_fraction" if options.get("prefer") == "validation" else None


LEVELS = ("upper", "lower")
CATALOGUE: dict[str, Entry] = {
    "minimisation": Entry(minimisation, Minimization, ("loss",)),
    "regularisation": Entry(regularisation, Bilevel, LEVELS, ("weight",), _valid),
    "hypercleaning": Entry(hypercleaned, Bilevel, LEVELS, ("found",), _valid),
    "loss_tuning": Entry(tuned, Bilevel, LEVELS, (), _valid),
    "robust": Entry(robust, None, ("objective",)),
    "client_robust": Entry(client_robust, None, ("objective",), ("client_loss",)),
    "selection": Entry(selection, Selection, ("primary", "secondary"), (), _valid_if_asked),
    "personalised": Entry(
        personalised,
        Personalized,
        ("objective", "server", "coupling", "client"),
        ("client_accuracy",),
        _server,
    ),
    "strategic": Entry(strategic, MPEC, ("leader",), models=("logistic", "linear")),
    "standardised": Entry(standardised, MultiSequence, ("P", "S")),
}
