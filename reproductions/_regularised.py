"""Learning how strongly to regularise a logistic model, solved exactly: a matter of one dimension.

Every client has its own ℓ2 weight, but the trained model depends on their mean alone.
"""

import jax
import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit

import fedstrata as fs
from fedstrata.models.networks import sign


class Exact:
    """F(λ): the clients' mean validation loss of the model trained to its optimum with mean weight λ.

    Args:
        data: with validation data.
        low, high: where the best λ is looked for.

    Attributes:
        weight: the best λ.
        best: F there.
    """

    def __init__(self, data: fs.FederatedData, low: float, high: float) -> None:
        U, self.v, self.w = _pooled(data, "train")
        V, self.signs, self.valid_w = _pooled(data, "valid")
        span, _ = np.linalg.qr(U.T)  # y lies in the span of the training inputs: y = span @ z
        self.U, self.V = U @ span, V @ span
        bounds = np.log(low), np.log(high)
        found = minimize_scalar(lambda t: self(np.exp(t)), bounds=bounds, method="bounded")
        self.weight, self.best = float(np.exp(found.x)), float(found.fun)

    def __call__(self, lam: float) -> float:
        """By Newton's method for z."""
        z = np.zeros(self.U.shape[1])
        for _ in range(50):
            p = expit(-self.v * (self.U @ z))
            gradient = lam * z - self.U.T @ (self.w * self.v * p)
            hessian = lam * np.eye(z.size) + (self.U.T * (self.w * p * (1 - p))) @ self.U
            step = np.linalg.solve(hessian, gradient)
            z -= step
            if np.abs(step).max() < 1e-11:
                break
        return float(self.valid_w @ np.logaddexp(0, -self.signs * (self.V @ z)))


def _pooled(data: fs.FederatedData, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All inputs, signs and weights: every client counts alike, and so do its samples."""
    clients = [data.client(i, part) for i in range(data.clients)]
    samples = jax.tree.map(lambda *leaves: np.concatenate(leaves), *clients)
    sizes = np.array([len(own["y"]) for own in clients])
    weights = np.repeat(1 / (data.clients * sizes), sizes)
    return np.asarray(samples["x"], float), np.asarray(sign(samples["y"]), float), weights
