"""FedDRO under fairness constraints: equal opportunity on Adult with noisy groups (Figures 3, 5 and 6).

The page `feddro-adult` says what the paper leaves open. Steps fall to a tenth after three quarters of the
rounds; β is 1/(r+1) in the first 100 rounds r, as one minibatch has few positives of a small group.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Setting, Task
from reproductions._schedules import dropped, mean_first

GROUPS = 3


def score(x: PyTree, sample: PyTree) -> Any:
    """Positive where an income above 50,000 dollars is predicted."""
    return sample["x"] @ x["w"] + x["b"]


def loss(x: PyTree, sample: PyTree) -> Any:
    return jax.nn.softplus(jnp.where(sample["y"] == 1, -1.0, 1.0) * score(x, sample))


def accuracy(x: PyTree, y: PyTree, data: Placed) -> Any:
    return ((jax.vmap(score, in_axes=(None, 0))(x, data.test) > 0) == (data.test["y"] == 1)).mean()


@functools.lru_cache(maxsize=16)
def noisy(name: str, clients: int, seed: int, noise: float, proxies: int) -> fs.FederatedData:
    """Adult, or a table of 600 rows made up in its likeness where it is not there."""
    if name == "adult":
        data = fs.data.adult(clients, seed=seed)
    else:
        rng = np.random.default_rng(seed)
        group = rng.choice(GROUPS, 600, p=[0.7, 0.2, 0.1]).astype(np.int32)
        x = rng.normal(size=(600, 5)) + 0.8 * np.eye(GROUPS, 5)[group]
        y = (x @ [1.0, -0.5, -0.5, 1.0, 0.0] + rng.normal(size=600) > 0.5).astype(np.int32)
        rows: dict[str, np.ndarray] = {"x": x, "y": y, "group": group}
        parts = np.array_split(np.arange(400), clients)
        clients_rows = [{k: v[p] for k, v in rows.items()} for p in parts]
        data = fs.FederatedData.from_clients(clients_rows, test={k: v[400:] for k, v in rows.items()})
    return fs.fairness.noisy_groups(data, GROUPS, noise, proxies, seed)


@functools.cache
def problem(epsilon: float, rho: float, lam: float, proxies: int) -> fs.fairness.Constrained:
    return fs.fairness.equal_opportunity(score, loss, GROUPS, epsilon, rho=rho, lam=lam, proxies=proxies)


@functools.cache
def metrics(epsilon: float, proxies: int) -> dict[str, Any]:
    """Accuracies and violations: of the true groups in test data, of the proxy groups in training data."""
    one = problem(epsilon, 1.0, 1.0, proxies)

    def train_accuracy(x: PyTree, y: PyTree, data: Placed) -> Any:
        right = (jax.vmap(score, in_axes=(None, 0))(x, data.train) > 0) == (data.train["y"] == 1)
        return right.mean(dtype=jnp.result_type(float))

    def constraint(x: PyTree, y: PyTree, data: Placed) -> Any:
        each = jax.vmap(one.inner, in_axes=(None, 0))(x, data.train)
        means = jax.tree.map(lambda leaf: leaf.mean(0), each)
        return one.constraints(means).max()

    return {
        "accuracy": accuracy,
        "test_violation": fs.fairness.worst_violation(score, GROUPS, epsilon),
        "train_accuracy": train_accuracy,
        "constraint": constraint,
    }


UNCONSTRAINED = fs.Minimization(loss)


STEPS = {  # for I = 1, for larger I
    "FedDRO": (0.05, 0.01),
    "DS-FedDRO": (0.5, 0.1),
    "GCIVR": (0.05, 0.05),
    "unconstrained": (0.5, 0.5),
}


def build(s: Setting) -> Task:
    data = noisy(s.data, s.clients, s.seed, s.noise, s.proxies)
    eta, beta = dropped(STEPS[s.method][s.I > 1], s.rounds * 3 // 4), mean_first(s.beta)
    method = {
        "FedDRO": lambda: fs.FedDRO(eta, beta, I=s.I, batch_size=s.batch_size),
        "DS-FedDRO": lambda: fs.DSFedDRO(eta, beta, s.I, 1.3, 1.4, batch_size=s.batch_size),
        "GCIVR": lambda: fs.GCIVR(eta, tau=s.tau, batch_size=s.batch_size),
        "unconstrained": lambda: fs.FedAvg(eta, H=s.I, batch_size=s.batch_size),
    }[s.method]()
    constrained = s.method != "unconstrained"
    return Task(
        problem(s.epsilon, s.rho, s.lam, s.proxies) if constrained else UNCONSTRAINED, method, data,
        {"w": np.zeros(data.train["x"].shape[-1]), "b": np.zeros(())}, rounds=s.rounds,
        eval_every=max(1, s.rounds // s.evaluations), metrics=metrics(s.epsilon, s.proxies),
        options={"default_metrics": False},
    )  # fmt: skip


PARAMETERS: dict[str, Any] = {
    "data": "adult", "batch_size": 16, "epsilon": 0.05, "noise": 0.3, "proxies": 10, "rho": 2.0, "lam": 0.01,
    "beta": 0.01, "tau": 100, "rounds": 1000, "evaluations": 20,
}  # fmt: skip
COLUMNS = (
    Column("accuracy", title="test accuracy", better="high", format=".2%"),
    Column("test_violation", title="worst violation", better="low", format=".4f"),
    Column("train_accuracy", title="training accuracy", better="high", format=".2%"),
    Column("constraint", title="largest constraint in training", better="low", format=".4f"),
    Column("bytes_up", reduce="ledger", format="bytes"),
)
QUICK: dict[str, Any] = {
    "data": "made up", "rounds": 20, "evaluations": 2, "proxies": 2, "batch_size": 4, "seeds": 1,
}  # fmt: skip
