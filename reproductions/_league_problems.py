"""The league's problems: closed forms of every class, and data whose clients are natural or drawn.

Each function takes an instance's number, the seed of the draw or of what is held out, and returns its `Case`.
The problem is the same object for all instances, so that compiled programs are shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree

CLIENTS, FEATURES = 8, 6


class Case(NamedTuple):
    """An instance of a problem, ``problem, data, x0, y0`` as in `fedstrata.solve`."""

    problem: fs.Problem
    data: fs.FederatedData
    x0: PyTree
    y0: PyTree = None


Builder = Callable[[int], Case]
PROBLEMS: dict[str, Callable[[int], Case]] = {}
LIKE: dict[str, fs.Problem] = {}  # a problem of the same form, which needs no data


def listed(name: str, like: fs.Problem) -> Callable[[Builder], Builder]:
    """Put a problem in the league.

    Args:
        name: what tables call it.
        like: a problem of the same form, whose methods fit.
    """

    def put(build: Builder) -> Builder:
        PROBLEMS[name], LIKE[name] = functools.cache(build), like
        return PROBLEMS[name]

    return put


def regression(seed: int, unlike: float = 1.0, valid: bool = False) -> fs.FederatedData:
    """Clients of unequal size, whose features have unlike scales and whose coefficients differ."""
    rng = np.random.default_rng(seed)
    scales, truth = np.logspace(0, -1, FEATURES), rng.normal(size=FEATURES)

    def draw(own: np.ndarray, size: int) -> dict[str, np.ndarray]:
        a = rng.normal(size=(size, FEATURES)) * scales
        return {"a": a, "b": a @ own + 0.3 * rng.normal(size=size)}

    sizes = rng.integers(10, 31, CLIENTS)
    owns = [truth + unlike * rng.normal(size=FEATURES) for _ in sizes]
    held = [draw(own, 10) for own in owns] if valid else None
    return fs.FederatedData.from_clients([draw(o, n) for o, n in zip(owns, sizes, strict=True)], valid=held)


def squares(x: Any, s: Any) -> Any:
    """Half the squared residual, and a little curvature."""
    return (s["a"] @ x - s["b"]) ** 2 / 2 + 0.01 * x @ x


LEAST_SQUARES = fs.Minimization(squares)
START = np.zeros(FEATURES)


@listed("least squares", LEAST_SQUARES)
def _least_squares(seed: int) -> Case:
    return Case(LEAST_SQUARES, regression(seed), START)


@functools.cache
def _logistic(features: int) -> tuple[fs.Minimization, PyTree]:
    model = fs.models.logistic(features, lam=0.01)
    return fs.Minimization(model.loss), model.init(0)


def _linear(data: fs.FederatedData) -> Case:
    problem, x0 = _logistic(data.train["x"].shape[1])
    return Case(problem, data, x0)


@listed("heart", LEAST_SQUARES)
def _heart(seed: int) -> Case:
    return _linear(fs.data.heart(seed=seed))


@listed("trial", LEAST_SQUARES)
def _trial(seed: int) -> Case:
    return _linear(fs.data.indo_rct(seed=seed))


@functools.cache
def _hazard() -> tuple[fs.Minimization, PyTree]:
    model = fs.models.hazard(7, cuts=(12, 24, 36), lam=0.01)
    return fs.Minimization(model.loss), model.init(0)


@listed("dialysis", LEAST_SQUARES)
def _dialysis(seed: int) -> Case:
    problem, x0 = _hazard()
    return Case(problem, fs.data.dialysis(seed=seed), x0)


def _score(x: Any, s: Any) -> Any:
    return (s["x"] @ x["w"] + x["b"] - s["y"] / 10) ** 2 / 2 + 0.01 * x["w"] @ x["w"]


SCHOOLS = fs.Minimization(_score)


@listed("schools", SCHOOLS)
def _schools(seed: int) -> Case:
    data = fs.data.schools(seed=seed)
    return Case(SCHOOLS, data, {"w": np.zeros(data.train["x"].shape[1]), "b": np.zeros(())})


@functools.cache
def _softmax(features: int) -> tuple[fs.Minimization, PyTree]:
    model = fs.models.softmax(features, 10, lam=0.01)
    return fs.Minimization(model.loss), model.init(0)


@listed("digits", LEAST_SQUARES)
def _digits(seed: int) -> Case:
    problem, x0 = _softmax(64)
    return Case(problem, fs.data.digits(clients=10, partition=fs.Dirichlet(0.3), seed=seed), x0)


def _part(data: fs.FederatedData, most: int) -> fs.FederatedData:
    """At most so many samples of each client."""
    clients = [data.client(i) for i in range(data.clients)]
    return fs.FederatedData.from_clients([{k: v[:most] for k, v in own.items()} for own in clients])


@listed("mnist", LEAST_SQUARES)
def _mnist(seed: int) -> Case:
    problem, x0 = _softmax(784)
    return Case(problem, _part(fs.data.mnist(clients=20, partition=fs.Dirichlet(0.3), seed=seed), 200), x0)


# Two levels


BILEVEL = fs.quadratic_bilevel(clients=1).problem
MINIMAX = fs.quadratic_minimax(clients=1).problem


@listed("quadratic bilevel", BILEVEL)
def _bilevel(seed: int) -> Case:
    toy = fs.quadratic_bilevel(clients=CLIENTS, seed=seed)
    return Case(BILEVEL, toy.data, np.zeros(5), np.zeros(8))


def _ridge_upper(x: Any, y: Any, s: Any) -> Any:
    return jax.nn.softplus((1 - 2 * s["y"]) * (s["x"] @ y["w"] + y["b"])) + 1e-3 * x @ x


def _ridge_lower(x: Any, y: Any, s: Any) -> Any:
    loss = jax.nn.softplus((1 - 2 * s["y"]) * (s["x"] @ y["w"] + y["b"]))
    return loss + jnp.exp(x - 3) @ y["w"] ** 2 / 2 + 0.005 * y["b"] ** 2


RIDGE = fs.Bilevel(_ridge_upper, _ridge_lower)


@listed("heart, penalties", RIDGE)
def _heart_penalties(seed: int) -> Case:
    data = fs.data.heart(valid_fraction=0.3, seed=seed)
    n = data.train["x"].shape[1]
    return Case(RIDGE, data, np.zeros(n), {"w": np.zeros(n), "b": np.zeros(())})


def _own_upper(x: Any, y: Any, s: Any) -> Any:
    return (s["a"] @ y - s["b"]) ** 2 / 2 + 0.01 * x @ x


def _own_lower(x: Any, y: Any, s: Any) -> Any:
    return (s["a"] @ y - s["b"]) ** 2 / 2 + ((y - x) @ (y - x)) / 4


OWN = fs.Bilevel(_own_upper, _own_lower, local=True)


@listed("own ridge regressions", OWN)
def _own_bilevel(seed: int) -> Case:
    return Case(OWN, regression(seed, valid=True), START, START)


def _joint(x: Any, y: Any, s: Any) -> Any:
    return (s["a"] @ (x + y) - s["b"]) ** 2 / 2 + y @ y / 4 + 0.01 * x @ x


JOINT = fs.Bilevel(_joint, _joint, same_samples=True, local=True)


@listed("own deviations", JOINT)
def _own_heads(seed: int) -> Case:
    return Case(JOINT, regression(seed), START, START)


@listed("quadratic minimax", MINIMAX)
def _minimax(seed: int) -> Case:
    toy = fs.quadratic_minimax(clients=CLIENTS, seed=seed)
    return Case(MINIMAX, toy.data, np.zeros(5), np.zeros(8))


def _auc(x: Any, y: Any, s: Any) -> Any:
    """The AUC's square surrogate as a minimax problem (Ying, Wen, Lyu 2016), y its threshold."""
    score, p = s["x"] @ x["w"], 0.5
    ill = s["y"] == 1
    gap = jnp.where(ill, (1 - p) * (score - x["a"]) ** 2, p * (score - x["b"]) ** 2)
    both = 2 * (1 + y[0]) * jnp.where(ill, -(1 - p) * score, p * score)
    return gap + both - p * (1 - p) * y[0] ** 2 + 0.01 * (x["w"] @ x["w"] + x["a"] ** 2 + x["b"] ** 2)


AUC = fs.Minimax(_auc)


@listed("heart, AUC", AUC)
def _heart_auc(seed: int) -> Case:
    data = fs.data.heart(seed=seed)
    x0 = {"w": np.zeros(data.train["x"].shape[1]), "a": np.zeros(()), "b": np.zeros(())}
    return Case(AUC, data, x0, np.zeros(1))


# Others


def _residual(x: Any, s: Any) -> Any:
    return (s["a"] @ x - s["b"]) ** 2 / 2


def _length(x: Any) -> Any:
    return x @ x / 2


SELECTION = fs.Selection(_residual, _length)


@listed("least norm", SELECTION)
def _selection(seed: int) -> Case:
    toy = fs.underdetermined(clients=5, n=30, samples=4, seed=seed)
    return Case(SELECTION, toy.data, toy.x0)


KL = fs.dro.kl(squares, 1.0)
SEMIDEVIATION = fs.dro.mean_semideviation(squares, 0.5, 1e-2)


@listed("KL risk", KL)
def _kl(seed: int) -> Case:
    return Case(KL, regression(seed, 0.3), START)


@listed("semideviation", SEMIDEVIATION)
def _semideviation(seed: int) -> Case:
    return Case(SEMIDEVIATION, regression(seed, 0.3), START)


def _income(x: Any, s: Any) -> Any:
    return jax.nn.softplus((1 - 2 * s["y"]) * _adult_score(x, s)) + 0.005 * x["w"] @ x["w"]


def _adult_score(x: Any, s: Any) -> Any:
    return s["x"] @ x["w"] + x["b"]


FAIR = fs.fairness.equal_opportunity(_adult_score, _income, groups=3, epsilon=0.05, rho=1.0, lam=0.1)


@listed("Adult, equal opportunity", FAIR)
def _adult(seed: int) -> Case:
    data = fs.data.adult(8, seed=seed)
    return Case(FAIR, data, {"w": np.zeros(data.train["x"].shape[1]), "b": np.zeros(())})


SEQUENCES = fs.MultiSequence(
    lambda x, Z, s: s["A"] @ x + s["B"] @ Z[0] - s["e"], (lambda x, z, s: s["C"] @ x + s["D"] @ z - s["f"],)
)


@listed("linear sequences", SEQUENCES)
def _sequences(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    shapes = {"A": (4, 4), "B": (4, 3), "C": (3, 4), "D": (3, 3), "e": (4,), "f": (3,)}
    arrays = {name: 0.3 * rng.normal(size=(CLIENTS, 2, *shape)) for name, shape in shapes.items()}
    arrays["A"] += 2 * np.eye(4)
    arrays["D"] += 1.5 * np.eye(3)
    clients = [{k: v[i] for k, v in arrays.items()} for i in range(CLIENTS)]
    return Case(SEQUENCES, fs.FederatedData.from_clients(clients), np.full(4, 1.5), (np.zeros(3),))


PERSONAL = fs.Personalized(
    squares,
    lambda x, y: ((x - y) @ (x - y)) / 2,
    lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 / 2 + ((x - y) @ (x - y)) / 2,
)


@listed("personal regressions", PERSONAL)
def _personal(seed: int) -> Case:
    own, server = regression(seed), regression(seed + 1000).client(0)
    clients = [own.client(i) for i in range(own.clients)]
    data = fs.FederatedData.from_clients(clients, server=server)
    return Case(PERSONAL, data, np.ones(FEATURES), START)


_game = fs.cournot_game(followers=6, clients=5, samples=20).problem
GAME = fs.MPEC(_game.leader, _game.follower, _game.project_x, _game.project_y)  # without its known solution


@listed("Cournot game", GAME)
def _cournot(seed: int) -> Case:
    rng = np.random.default_rng(seed)  # draws the demand; costs and capacities are the problem's
    data = fs.FederatedData.from_clients([{"a": rng.uniform(7.5, 12.5, 20)} for _ in range(5)])
    return Case(GAME, data, np.zeros(()), np.zeros(6))
