"""What privacy costs: accuracy against ε, of whole clients (digits) and of single samples (the others).

ε is the accountant's for the run's noise. Step sizes and bounds were chosen once, on other splits, and
are not accounted.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.lab import Column, Experiment, Setting, TableSpec, Task

CUTS = tuple(range(6, 49, 6))  # months


def logistic(x: Any, s: Any) -> Any:
    return jax.nn.softplus(-(2.0 * s["y"] - 1) * (s["x"] @ x[:-1] + x[-1]))


def softmax(x: Any, s: Any) -> Any:
    return -jax.nn.log_softmax(jnp.ravel(s["x"]) @ x["w"] + x["b"])[s["y"]]


REGULARISED = fs.Bilevel(  # how strongly, by the validation patients
    upper=lambda x, y, s: logistic(y, s),
    lower=lambda x, y, s: logistic(y, s) + 0.5 * jnp.exp(x) * y @ y,
)
PLAIN, ROBUST = fs.Minimization(logistic), fs.dro.chi2(logistic, 5.0)


@functools.lru_cache(maxsize=32)
def samples(name: str, seed: int) -> fs.FederatedData:
    """The data of a part of the study, by the seed."""
    seed += 10  # others than those on which steps were chosen
    if name == "digits":
        return fs.data.digits(clients=100, partition=fs.Dirichlet(1.0), seed=seed)
    if name == "heart":
        return fs.data.heart(valid_fraction=0.2, test_fraction=0.2, seed=seed)
    if name == "adult":
        return fs.data.adult(clients=10, seed=seed)
    return fs.data.standardize(fs.data.dialysis(test_fraction=0.2, seed=seed))


@functools.cache
def survival(features: int) -> fs.models.Model:
    """Hazards in intervals of half a year."""
    return fs.models.hazard(features, CUTS)


def chosen(s: Setting) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Problem, method, x0, y0 and what bounds uploads or samples."""
    x = samples(s.data, s.seed).train["x"]
    d = math.prod(x.shape[1:])
    method: Any
    match s.data, s.method:
        case "digits", "FedAvg":
            return fs.Minimization(softmax), fs.FedAvg(gamma=0.5, H=5), _softmax(d), None, {"clip": 0.5}
        case "digits", "FedRZO, shared scalars":
            method = fs.FedRZO(
                gamma=0.5, eta=0.1, batch_size=None, two_sided=True, directions=20, orthogonal=True,
                messages="scalars", shared_directions=True,
            )  # fmt: skip
            return fs.Minimization(softmax), method, _softmax(d), None, {"clip": 3.0}
        case "heart", "FedMSA":
            bounds = {"examples": fs.Examples(clip=1.0)}
            return REGULARISED, fs.FedMSA(alpha=0.1, beta=1.0), np.array(-3.0), np.zeros(d + 1), bounds
        case "heart", "FedDRO":
            bounds = {"examples": fs.Examples(clip=1.0, values=2.0)}
            return ROBUST, fs.FedDRO(1.0, 0.9), np.zeros(d + 1), None, bounds
        case "heart", _:
            return PLAIN, fs.FedAvg(gamma=2.0), np.zeros(d + 1), None, {"examples": fs.Examples(clip=0.5)}
        case "adult", _:
            sampled = fs.FedAvg(gamma=0.5, H=2, batch_size=100)
            return PLAIN, sampled, np.zeros(d + 1), None, {"examples": fs.Examples(clip=1.0)}
    model = survival(d)
    start = {"theta": np.full(len(CUTS), -2.5), "w": np.zeros(d)}
    return fs.Minimization(model.loss), fs.FedAvg(gamma=1.0), start, None, {"examples": fs.Examples(clip=2.0)}


def _softmax(d: int) -> Any:
    return {"w": np.zeros((d, 10)), "b": np.zeros(10)}


def judged(s: Setting, x: Any, y: Any) -> float:
    """Accuracy on held-out samples; in the survival model their loss."""
    test = samples(s.data, s.seed).test
    if s.data == "dialysis":
        loss = survival(test["x"].shape[-1]).loss
        return float(jax.vmap(lambda sample: loss(x, sample))(test).mean())
    if s.data == "digits":
        return float(
            (jnp.argmax(test["x"].reshape(len(test["y"]), -1) @ x["w"] + x["b"], -1) == test["y"]).mean()
        )
    w = jax.tree.leaves(y if s.method == "FedMSA" else x)[0]
    return float(((test["x"] @ w[:-1] + w[-1] > 0) == test["y"]).mean())


def build(s: Setting) -> Task:
    data, rounds = samples(s.data, s.seed), s.rounds * (2 if s.data == "digits" else 1)
    problem, method, x0, y0, bounds = chosen(s)
    delta = 1e-5 if s.data == "adult" else 1e-3
    options: dict[str, Any] = {"default_metrics": False}
    participation = fs.Poisson(0.3) if s.data == "digits" else 1.0
    if s.data == "dialysis":
        options["weights"] = "size"
    if s.epsilon == "∞":
        channel = fs.Channel(**bounds)
    else:
        channel = fs.plan_privacy(
            problem, method, data, x0, epsilon=s.epsilon, delta=delta, rounds=rounds, y0=y0,
            participation=participation, **bounds,
        )  # fmt: skip
    return Task(
        problem, method, data, x0, y0, rounds, eval_every=rounds, participation=participation,
        derive=lambda result: {"held_out": judged(s, result.x, result.y)},
        options={**options, "channel": channel}, label=s.method, silent=True,
    )  # fmt: skip


LEVELS = [0.5, 1.0, 2.0, 8.0, "∞"]

EXPERIMENT = Experiment(
    name="dp-tradeoff",
    title="What privacy costs: accuracy against ε",
    paper="not in a paper; McMahan et al. 2018, Abadi et al. 2016 for the mechanisms",
    description=(
        "Accuracy on held-out samples where whole clients are hidden (digits, a hundred clients), and where "
        "single samples are (four hospitals, ten census offices, 67 dialysis centres), by the ε of the run."
    ),
    problem="min 1/m Σ f_i(x), a bilevel problem and a robust one, with noise",
    parameters={"rounds": 30},
    grid=[
        {"data": ["digits"], "method": ["FedAvg", "FedRZO, shared scalars"], "epsilon": LEVELS},
        {"data": ["heart"], "method": ["FedAvg", "FedMSA", "FedDRO"], "epsilon": LEVELS},
        {"data": ["adult", "dialysis"], "method": ["FedAvg"], "epsilon": LEVELS},
    ],
    build=build,
    seeds=4,
    table=TableSpec(
        (Column("held_out", format=".3f"),), rows=("data", "label"), across="epsilon", paper=False,
    ),
    needs=("heart", "adult", "dialysis"),
    quick={"data": ["heart"], "method": ["FedAvg"], "epsilon": [1.0, "∞"], "seeds": 1},
    quick_seconds=8,
    full_time="6 minutes on one core",
)  # fmt: skip
