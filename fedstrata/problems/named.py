"""Problems by name, each built from a model, data and a few options, for experiments in TOML files.

ℓ is the model's loss, w its parameters, u and v a sample's features and label; E_i is the mean over client
i's samples, and 1/m Σ the mean over clients.

    minimisation    min_w 1/m Σ E_i ℓ(w)
    regularisation  min_x 1/m Σ E_i ℓ(w(x)) on validation samples,
                    w(x) = argmin 1/m Σ (E_i ℓ(w) + exp(x_i)/2 ‖w‖²)
    hypercleaning   see `fedstrata.hypercleaning`: a weight σ(x_j) of each training sample
    loss_tuning     see `fedstrata.loss_tuning`: a scale and a shift of each class's score
    robust          min_w risk of the losses ℓ(w) of all samples, see `fedstrata.dro`
    client_robust   min_w λ log 1/m Σ exp(E_i ℓ(w)/λ), which tends to the worst client's loss as λ → 0
    selection       of the minimisers of 1/m Σ E_i ℓ(w), the sparsest, the smallest, or the best on validation
    personalised    min_w E ℓ(w) on the server's samples + μ/2 · 1/m Σ ‖w − y_i(w)‖²,
                    y_i(w) = argmin E_i ℓ(y) + λ/2 ‖y − w‖²
    strategic       min_w 1/m Σ E_i ℓ(w) at features u + y(w), y(w) = argmax score(w, u + y) − c/2 ‖y‖²
    standardised    min_w 1/m Σ E_i ℓ(w) at features (u − z¹)/√z², with z¹ = 1/m Σ E_i u and
                    z² = 1/m Σ E_i (u − z¹)², all three simultaneously

The keyword arguments of each function are the problem's options. The same options give the same functions, so
that compiled programs are reused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.hyperparameters import POSITIVE
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.labels import count_classes
from fedstrata.models.model import Metric, Model, squares
from fedstrata.problems import dro, prox
from fedstrata.problems.classes import (
    MPEC,
    Bilevel,
    Composition,
    Minimax,
    Minimization,
    MultiSequence,
    Personalized,
    Selection,
)
from fedstrata.problems.hyper import balance, hypercleaning, loss_tuning

Sampled = Callable[[PyTree, Any], Any]  # a function of the model's parameters and one sample
Place = Callable[[Sampled], Callable[..., Any]]  # makes it a function of x, or x and y, and the sample
Form = Literal["composition", "minimax"]


class SolveArguments(NamedTuple):
    """The arguments of `fedstrata.solve` except the method.

    ``place`` locates the model's parameters in the result, and ``own`` a client's own, if elsewhere;
    ``metrics`` are the problem's own metrics.
    """

    problem: Problem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    place: Place
    own: Place | None = None
    metrics: Mapping[str, Metric] = {}


class Inputs(NamedTuple):
    """The input of a problem, besides its options."""

    model: Model
    data: FederatedData
    seed: int = 0
    weights: Weights = "uniform"

    @property
    def start(self) -> PyTree:
        """The model's initial parameters for this seed."""
        return self.model.init(self.seed)


class NamedProblem(NamedTuple):
    """A problem with a name.

    Attributes:
        pose: builds the problem from `Inputs`; its keyword arguments are the options.
        kinds: its problem classes; several if the option ``form`` selects one.
        metrics: metrics to measure besides accuracy and test loss.
        needs: the required part of the samples, an option of loaders.
        models: the models that it accepts; all if empty.
    """

    pose: Callable[..., SolveArguments]
    kinds: tuple[type[Problem], ...]
    metrics: tuple[str, ...] = ()
    needs: str = ""
    models: tuple[str, ...] = ()

    def kind(self, form: str = "composition") -> type[Problem]:
        """The problem class in this form."""
        return next((kind for kind in self.kinds if kind.__name__.lower() == form), self.kinds[0])


# The default metrics of each class, the objective first.
SERIES: dict[type[Problem], tuple[str, ...]] = {
    Minimization: ("loss",),
    Bilevel: ("upper", "lower"),
    Composition: ("objective",),
    Minimax: ("payoff",),
    Selection: ("primary", "secondary"),
    Personalized: ("objective", "server", "coupling", "client"),
    MPEC: ("leader",),
    MultiSequence: ("P", "S"),
}


def in_x(function: Sampled) -> Sampled:
    """The model's parameters are x."""
    return lambda x, sample: function(x, sample)


def in_y(function: Sampled) -> Callable[..., Any]:
    """The model's parameters are y, or each client's own y."""
    return lambda x, y, sample: function(y, sample)


def lifted(function: Sampled) -> Sampled:
    """The model's parameters are the part x of a `Lifted` variable."""
    return lambda x, sample: function(x.x, sample)


def client_of(sample: PyTree) -> Any:
    """The number of the client that a sample belongs to."""
    return sample["client"]


def _positive(**options: float) -> None:
    for name, value in options.items():
        if POSITIVE.fault(value) is not None:
            raise ValueError(f"{name} must be a positive number, but is {value!r}.")


def _need_classes(problem: str, model: Model) -> None:
    if model.labels != "classes":
        raise ValueError(
            f"{problem} needs a classification model with cross-entropy, such as softmax or mlp."
        )


def minimisation(of: Inputs) -> SolveArguments:
    """The mean loss."""
    return SolveArguments(_minimization(of.model), of.data, of.start, None, in_x)


@functools.cache
def _minimization(model: Model) -> Minimization:
    return Minimization(model.loss)


def regularisation(
    of: Inputs, *, per: Literal["client", "all"] = "client", start: float = 0.1
) -> SolveArguments:
    """The ℓ2 weight with the lowest validation loss, per client or for all; x is its logarithm."""
    _positive(start=start)
    data = _indexed(of.data)
    x0 = jnp.full((data.clients,) if per == "client" else (), math.log(start))
    return SolveArguments(_regularised(of.model, per), data, x0, of.start, in_y, metrics={"weight": _weight})


@functools.lru_cache(maxsize=8)
def _indexed(data: FederatedData) -> FederatedData:
    return data.with_client_index()


@functools.cache
def _regularised(model: Model, per: str) -> Bilevel:
    def lower(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        log = x[sample["client"]] if per == "client" else x
        return model.loss(y, sample) + jnp.exp(log) / 2 * squares(y)

    return Bilevel(lambda x, y, sample: model.loss(y, sample), lower)


def _weight(x: PyTree, y: PyTree, data: Any) -> Any:
    """NaN if a logarithm went to −∞, because 0 would look like a weight."""
    return jnp.where(jnp.all(jnp.exp(x) > 0), jnp.exp(x).mean(), jnp.nan)


def hypercleaned(of: Inputs, *, noise: float = 0.3, lam: float = 1e-3) -> SolveArguments:
    """A weight of each training sample, when a fraction ``noise`` of the training labels is wrong."""
    _need_classes("hypercleaning", of.model)
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be a number in [0, 1), but is {noise!r}.")
    _positive(lam=lam)
    data = _noisy(of.data, float(noise), of.seed)
    x0 = jnp.zeros(len(data.train["y"]))
    return SolveArguments(_cleaned(of.model, lam), data, x0, of.start, in_y, metrics={"found": _found})


@functools.lru_cache(maxsize=8)
def _noisy(data: FederatedData, noise: float, seed: int) -> FederatedData:
    """Training samples with an index, and with some labels replaced by wrong ones."""
    rng, labels, classes = np.random.default_rng((seed, 2)), np.asarray(data.train["y"]), _classes(data)
    clean = rng.uniform(size=labels.size) >= noise
    wrong = (labels + rng.integers(1, classes, labels.size)) % classes
    index = np.arange(labels.size, dtype=np.int32)
    changed = {"y": np.where(clean, labels, wrong).astype(labels.dtype), "index": index, "clean": clean}
    return replace(data, train={**data.train, **changed})


def _classes(data: FederatedData) -> int:
    return max(2, count_classes(data))


@functools.cache
def _cleaned(model: Model, lam: float) -> Bilevel:
    return hypercleaning(model.apply, lam)


def _found(x: PyTree, y: PyTree, data: Any) -> Any:
    return jnp.mean((x > 0) == data.train["clean"])


def tuned(of: Inputs) -> SolveArguments:
    """A loss for unbalanced classes: a scale and a shift of each class's score."""
    _need_classes("loss_tuning", of.model)
    x0 = {"delta": jnp.zeros(_classes(of.data)), "shift": jnp.zeros(_classes(of.data))}
    return SolveArguments(_tuned(of.model), _balanced(of.data), x0, of.start, in_y)


@functools.lru_cache(maxsize=8)
def _balanced(data: FederatedData) -> FederatedData:
    weight = balance(np.asarray(data.valid["y"]), _classes(data)).astype(np.float32)
    return replace(data, valid={**data.valid, "weight": weight})


@functools.cache
def _tuned(model: Model) -> Bilevel:
    return loss_tuning(model.apply)


def robust(
    of: Inputs,
    *,
    risk: Literal["kl", "chi2", "cvar", "kl_cvar", "chi2_ball", "mean_semideviation"] = "kl",
    form: Form = "composition",
    lam: float | None = None,
    level: float | None = None,
    rho: float | None = None,
    delta: float | None = None,
    nonnegative: bool | None = None,
) -> SolveArguments:
    """The worst case over weights of the samples; the risk determines which of λ, ρ, … it takes."""
    every = {"lam": lam, "level": level, "rho": rho, "delta": delta, "nonnegative": nonnegative}
    given = tuple((name, value) for name, value in every.items() if value is not None)
    problem = _risk(of.model, risk, given)
    return _in_form(form, problem, of, of.data, lifted if problem.lifted else in_x)


@functools.cache
def _risk(model: Model, risk: str, options: tuple[tuple[str, Any], ...]) -> dro.DRO:
    make = getattr(dro, risk)
    try:
        inspect.signature(make).bind(model.loss, **dict(options))
    except TypeError as error:
        takes = ", ".join([*inspect.signature(make).parameters][1:])
        raise ValueError(f"risk = {risk!r}: {error}. It takes {takes}.") from error
    made: dro.DRO = make(model.loss, **dict(options))
    return made


def _in_form(form: Form, problem: Any, of: Inputs, data: FederatedData, place: Place) -> SolveArguments:
    """A robust problem as a composition or as a minimax problem."""
    if form == "composition":
        return SolveArguments(problem, data, of.start, None, place)
    dual = _dual(problem, data, of.weights)
    return SolveArguments(dual.problem, dual.data, of.start, dual.y0, in_x)


@functools.lru_cache(maxsize=16)
def _dual(problem: Any, data: FederatedData, weights: Weights) -> dro.Dual:
    made: dro.Dual = problem.minimax(data, weights)
    return made


def client_robust(of: Inputs, *, lam: float = 0.1, form: Form = "composition") -> SolveArguments:
    """The worst client's loss, smoothed by λ."""
    _positive(lam=lam)
    data = _indexed(of.data)
    return _in_form(form, _worst_client(of.model, data.clients, lam), of, data, in_x)


@functools.cache
def _worst_client(model: Model, clients: int, lam: float) -> dro.GroupDRO:
    return dro.group(model.loss, clients, lam, client_of)


def selection(
    of: Inputs, *, prefer: Literal["smallest", "sparse", "validation"] = "smallest"
) -> SolveArguments:
    """The optimum with the smallest ½‖w‖², ‖w‖₁, or validation loss."""
    return SolveArguments(_selected(of.model, prefer), of.data, of.start, None, in_x)


@functools.cache
def _selected(model: Model, prefer: str) -> Selection:
    secondary: dict[str, Any] = {
        "smallest": lambda x: squares(x) / 2,
        "sparse": prox.L1(),
        "validation": lambda x, sample: model.loss(x, sample),
    }
    return Selection(model.loss, secondary[prefer])


def personalised(of: Inputs, *, mu: float = 0.1, lam: float = 1.0) -> SolveArguments:
    """A model of the server and one of each client; μ weighs their distance at the server, λ at a client."""
    _positive(mu=mu, lam=lam)
    return SolveArguments(_personal(of.model, mu, lam), of.data, of.start, of.start, in_x, own=in_y)


@functools.cache
def _personal(model: Model, mu: float, lam: float) -> Personalized:
    def apart(x: PyTree, y: PyTree) -> Any:
        return squares(jax.tree.map(jnp.subtract, x, y))

    def client(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        return model.loss(y, sample) + lam / 2 * apart(x, y)

    return Personalized(model.loss, lambda x, y: mu / 2 * apart(x, y), client)


def strategic(of: Inputs, *, cost: float = 10.0) -> SolveArguments:
    """People change their features, at a cost c, to get the label 1; the model anticipates it."""
    if of.model.labels != "two":
        raise ValueError(
            'strategic needs a model with one score, positive for the label 1: model = "logistic", or '
            '{ name = "linear", loss = "logistic" }.'
        )
    _positive(cost=cost)
    problem, place = _strategic(of.model, cost)
    return SolveArguments(problem, of.data, of.start, jnp.zeros(of.data.train["x"].shape[1:]), place)


@functools.cache
def _strategic(model: Model, cost: float) -> tuple[MPEC, Place]:
    def moved(y: PyTree, sample: PyTree) -> PyTree:
        return {**sample, "x": sample["x"] + y}

    def slope(x: PyTree, u: PyTree) -> Any:
        return jax.grad(model.apply, argnums=1)(x, u)

    def response(x: PyTree, sample: PyTree) -> Any:
        return slope(x, sample["x"]) / cost  # exact: the score is linear in the features

    def at_response(function: Sampled) -> Sampled:
        return lambda x, sample: function(x, moved(response(x, sample), sample))

    problem = MPEC(
        leader=lambda x, y, sample: model.loss(x, moved(y, sample)),
        follower=lambda x, y, sample: cost * y - slope(x, sample["x"] + y),
        solution=response,
    )
    return problem, at_response


def standardised(of: Inputs, *, floor: float = 0.01) -> SolveArguments:
    """The features' means and variances, at least ``floor``, and the model at the standardised features."""
    _positive(floor=floor)
    problem, place = _standardised(of.model, floor)
    shape = of.data.train["x"].shape[1:]
    return SolveArguments(problem, of.data, of.start, (jnp.zeros(shape), jnp.ones(shape)), place)


@functools.cache
def _standardised(model: Model, floor: float) -> tuple[MultiSequence, Place]:
    def moved(Z: PyTree, sample: PyTree) -> PyTree:
        mean, variance = Z
        return {**sample, "x": (sample["x"] - mean) / jnp.sqrt(jnp.maximum(variance, floor))}

    def at(function: Sampled) -> Callable[..., Any]:
        return lambda x, Z, sample: function(x, moved(Z, sample))

    problem = MultiSequence(
        P=lambda x, Z, sample: jax.grad(model.loss)(x, moved(Z, sample)),
        S=(
            lambda x, mean, sample: mean - sample["x"],
            lambda mean, variance, sample: variance - (sample["x"] - mean) ** 2,
        ),
    )
    return problem, at


FORMS = (Composition, Minimax)
PROBLEMS: dict[str, NamedProblem] = {
    "minimisation": NamedProblem(minimisation, (Minimization,)),
    "regularisation": NamedProblem(regularisation, (Bilevel,), ("weight",), "valid_fraction"),
    "hypercleaning": NamedProblem(hypercleaned, (Bilevel,), ("found",), "valid_fraction"),
    "loss_tuning": NamedProblem(tuned, (Bilevel,), (), "valid_fraction"),
    "robust": NamedProblem(robust, FORMS),
    "client_robust": NamedProblem(client_robust, FORMS, ("client_loss",)),
    "selection": NamedProblem(selection, (Selection,)),
    "personalised": NamedProblem(personalised, (Personalized,), ("client_accuracy",), "server_fraction"),
    "strategic": NamedProblem(strategic, (MPEC,), models=("logistic", "linear")),
    "standardised": NamedProblem(standardised, (MultiSequence,)),
}
