"""A lower level that another program solves: a market whose equilibrium SciPy finds.

A leader sells x, then four firms with limits sell y_1 … y_4 at the price a(ξ) exp(−(x + Σ y)/10). What they
sell is the solution of a variational inequality, found here by `scipy.optimize.root` on y = max(0,
min(limit, y − G(y))). `fs.black_box` hands it to `fs.MPEC` as the ``solution``, and FedRZOTwoStage moves x
by values alone. Each client holds its own records of the demand a(ξ).
"""

import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize_scalar, root

import fedstrata as fs

COSTS = np.array([0.3, 0.5, 0.7, 0.9], np.float32)
LIMITS = np.array([3.0, 3.0, 2.0, 2.0], np.float32)


def price(total, a):
    return a * jnp.exp(-total / 10)


def follower(x, y, sample):
    """−∂(profit)/∂y_j of every firm: cost − price − y_j price′."""
    p = price(x + y.sum(), sample["a"])
    return COSTS - p + y * p / 10


def leader(x, y, sample):
    return 0.4 * x - x * price(x + y.sum(), sample["a"])


def equilibrium(x, sample):
    """By SciPy, on the host."""

    def G(y):
        p = sample["a"] * np.exp(-(x + y.sum()) / 10)
        return COSTS - p + y * p / 10

    found = root(lambda y: y - np.clip(y - G(y), 0, LIMITS), np.ones(4), tol=1e-10)
    if not found.success:
        raise RuntimeError(f"no equilibrium at x = {x}: {found.message}")
    return found.x


rng = np.random.default_rng(0)
records = [{"a": rng.uniform(1.5 + 0.2 * i, 2.5 + 0.2 * i, size=8).astype(np.float32)} for i in range(3)]
data = fs.FederatedData.from_clients(records)
problem = fs.MPEC(
    leader,
    follower,
    project_y=fs.sets.Box(0.0, LIMITS),
    solution=fs.black_box(equilibrium, like=lambda x, sample: jnp.zeros(4)),
)
method = fs.FedRZOTwoStage(gamma=2.0, eta=0.1, H=2, lower="solution", batch_size=None, two_sided=True)
result = fs.solve(problem, method, data, 1.0, y0=np.ones(4), rounds=20, seed=0, eval_every=10)


def objective(x):
    values = [
        leader(x, jnp.asarray(equilibrium(x, {"a": a})), {"a": a}) for client in records for a in client["a"]
    ]
    return float(np.mean(values))


best = minimize_scalar(objective, bounds=(0, 10), method="bounded")
print(f"found x = {float(result.x):.4f}, loss {objective(float(result.x)):.5f}")
print(f"SciPy, with all records in one place: x = {best.x:.4f}, loss {best.fun:.5f}")
print(f"{result.ledger.function_values} values of the loss; {result.ledger.bytes_up} bytes from the clients")
