"""A loss that is a program: each client simulates its own warehouse, and no gradient exists.

Five warehouses want one ordering rule (reorder when the stock falls below s, fill up to S). What a rule
costs is found by playing it against recorded demand, day by day, in plain NumPy: whole units, orders that
arrive three days later, fines for lost sales. The cost jumps when a unit more or less is ordered.
`fs.black_box` makes the simulation a loss, and FedRZO needs only its values; the demand never leaves a
warehouse.
"""

import numpy as np

import fedstrata as fs

DAYS, LEAD, HOLDING, LOST, ORDER = 60, 3, 0.05, 2.0, 8.0


def simulate(x: np.ndarray, sample: dict[str, np.ndarray]) -> float:
    """The cost per day of the rule s = 10 x[0], S = s + 10 |x[1]| against one recorded demand."""
    low = round(10 * float(x[0]))
    high = low + max(1, round(10 * abs(float(x[1]))))
    stock, coming, cost = high, {}, 0.0
    for day, wanted in enumerate(sample["demand"]):
        stock += coming.pop(day, 0)
        sold = min(stock, int(wanted))
        stock -= sold
        cost += HOLDING * stock + LOST * (int(wanted) - sold)
        position = stock + sum(coming.values())
        if position < low:
            coming[day + LEAD] = high - position
            cost += ORDER
    return cost / DAYS


def demands(mean: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Twenty recorded demands of a warehouse."""
    return {"demand": rng.poisson(mean, size=(20, DAYS)).astype(np.float32)}


rng = np.random.default_rng(0)
data = fs.FederatedData.from_clients([demands(mean, rng) for mean in (3.0, 4.0, 5.0, 6.0, 7.0)])
problem = fs.Minimization(fs.black_box(simulate))
method = fs.FedRZO(gamma=0.05, eta=0.5, H=2, batch_size=4, two_sided=True, directions=2)
result = fs.solve(problem, method, data, np.array([0.5, 1.0]), rounds=60, seed=0, eval_every=20)


def cost(x: np.ndarray) -> float:
    """The mean over warehouses and demands."""
    return float(np.mean([simulate(x, {"demand": d}) for i in range(5) for d in data.client(i)["demand"]]))


grid = min((cost(np.array([s, q])), s, q) for s in np.arange(1, 4, 0.25) for q in np.arange(2, 10, 0.5))
x = np.asarray(result.x)
print(f"start: {cost(np.array([0.5, 1.0])):.3f} per day")
print(f"found: {cost(x):.3f} per day with s = {10 * x[0]:.0f} and S = s + {10 * abs(x[1]):.0f}")
best = f"s = {10 * grid[1]:.0f}, S = s + {10 * grid[2]:.0f}"
print(f"best of a grid, which sees all the demand: {grid[0]:.3f} with {best}")
print(f"{result.ledger.function_values:,} simulations, {result.ledger.bytes_up:,} bytes from the warehouses")
