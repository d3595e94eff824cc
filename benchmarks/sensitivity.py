"""How far rounding carries: the same run from starts that differ in their last digits.

    python -m benchmarks.sensitivity

A small network on digits of which five classes are rare and a tenth of all labels are wrong, the KL-robust
objective, minibatches. One seed; the start's numbers are multiplied by 1 + 10⁻⁷ u, u normal, which is what
another order of the same sums does on a GPU. The step falls to a tenth after three quarters of the rounds.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs

STARTS, ROUNDS, BATCH, ETA, BETA = 6, 1500, 16, 0.05, 0.2


def rare_and_noisy(seed: int = 1) -> dict[str, np.ndarray]:
    """Fifteen of each of the digits 0 to 4, all others; a tenth of the labels drawn anew."""
    digits, rng = fs.data.load("digits"), np.random.default_rng(seed)
    y = np.asarray(digits["y"])
    keep = np.concatenate([np.flatnonzero(y == c)[: 15 if c < 5 else None] for c in range(10)])
    x, y = np.asarray(digits["x"], np.float32).reshape(len(y), -1)[keep], y[keep].copy()
    wrong = rng.random(len(y)) < 0.1
    y[wrong] = rng.integers(0, 10, wrong.sum())
    return {"x": x, "y": y}


def nearby(model: fs.models.Model, number: int) -> object:
    """A start of the model, but for its last digits; as it is for number 0."""
    rng, width = np.random.default_rng(number), 1e-7 * (number > 0)

    def moved(leaf: np.ndarray) -> np.ndarray:
        return (leaf * (1 + width * rng.standard_normal(leaf.shape))).astype(np.float32)

    return jax.tree.map(moved, jax.tree.map(np.asarray, model.init(0)))


def main() -> None:
    """Print the table."""
    arrays, model = rare_and_noisy(), fs.models.mlp(64, 10)
    data = fs.FederatedData.from_arrays(arrays, clients=8, partition=fs.Dirichlet(0.5), seed=0)
    robust, average = fs.dro.kl(model.loss, 1.0), fs.Minimization(model.loss)

    def eta(r: jax.Array) -> jax.Array:
        return jnp.where(r < ROUNDS * 3 // 4, ETA, ETA / 10)

    rows = {
        "FedAvg, average loss": (average, fs.FedAvg(eta, batch_size=BATCH)),
        "MBSGD": (robust, fs.MBSGD(eta, batch_size=BATCH)),
        "FedDRO": (robust, fs.FedDRO(eta, BETA, batch_size=BATCH)),
        "DSFedDRO, γ = 1, 1": (robust, fs.DSFedDRO(eta, BETA, batch_size=BATCH)),
        "DSFedDRO, γ = 1.3, 1.4": (robust, fs.DSFedDRO(eta, BETA, 1, 1.3, 1.4, batch_size=BATCH)),
    }
    print(f"{'':24}training accuracy at the end, %; largest value of the objective in the second half")
    for name, (problem, method) in rows.items():
        accuracies, peak = [], 0.0
        for number in range(STARTS):
            start = nearby(model, number)
            result = fs.solve(problem, method, data, start, rounds=ROUNDS, eval_every=10, progress=False)
            accuracies.append(100 * float((model.predict(result.x, arrays["x"]) == arrays["y"]).mean()))
            value = np.asarray(result.history["loss" if problem is average else "objective"])
            peak = max(peak, float(value[len(value) // 2 :].max()))
        print(f"{name:24}{'  '.join(f'{a:.1f}' for a in accuracies)};  {peak:.3g}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    main()
