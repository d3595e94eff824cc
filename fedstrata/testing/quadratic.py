"""Quadratic problems with closed-form solutions, for tests and for trying out methods.

Bilevel, with z = (x, y), A_i and M_i positive definite:

    h_i(x, y) = ½ yᵀ A_i y − yᵀ (B_i x + c_i)
    f_i(x, y) = ½ zᵀ M_i z − b_iᵀ z

With A, B, c, M, b the means over the clients, the lower level has the solution ``y(x) = A⁻¹(Bx + c) = Sx +
s``. Let T = (I; S) and t = (0; s), so that (x, y(x)) = Tx + t; then ``∇f(x) = Tᵀ(M(Tx + t) − b)`` is linear
in x and zero at x*.

Minimax: the payoff is f_i with M_i = (P_i, Q_i; Q_iᵀ, −R_i), P_i and R_i positive definite; y(x) and ∇f(x)
follow from the same formulas with A = R, B = Qᵀ and c minus the second part of b.

Smoothing a quadratic over a ball adds a constant, so ∇f^η(x) = ∇f(x).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array
from fedstrata.data.federated import FederatedData
from fedstrata.problems.classes import Bilevel, Minimax


class Quadratic(NamedTuple):
    """A problem, its data and its solution; it also has y(x) and ∇f(x).

    Attributes:
        problem: `Bilevel` or `Minimax`; the clients' matrices reach its functions through the sample.
        data: float64; `solve` casts it.
        x_star: the solution.
        y_star: ``y(x_star)``.
    """

    problem: Any  # Bilevel or Minimax
    data: FederatedData
    x_star: np.ndarray
    y_star: np.ndarray

    def _mean(self, name: str) -> np.ndarray:
        return np.asarray(self.data.train[name], np.float64).mean(0)

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """S and s of ``y(x) = Sx + s``."""
        A = self._mean("A")
        return np.linalg.solve(A, self._mean("B")), np.linalg.solve(A, self._mean("c"))

    def _reduced(self) -> tuple[np.ndarray, np.ndarray]:
        """H and q of ``∇f(x) = Hx + q``."""
        S, s = self._affine()
        T, t = np.concatenate([np.eye(S.shape[1]), S]), np.concatenate([np.zeros(S.shape[1]), s])
        M, b = self._mean("M"), self._mean("b")
        return T.T @ M @ T, T.T @ (M @ t - b)

    def solution(self, x: Array) -> Array:
        """The exact lower-level solution ``y(x)``."""
        S, s = self._affine()
        return jnp.asarray(S) @ x + jnp.asarray(s)

    def gradient(self, x: Array) -> Array:
        """The exact ``∇f(x)`` of the implicit objective, which is ``∇f^η(x)`` for every η."""
        H, q = self._reduced()
        return jnp.asarray(H) @ x + jnp.asarray(q)

    @property
    def curvature(self) -> tuple[float, float]:
        """``(μ_h, L_h)``: bounds of the eigenvalues of every client's A_i."""
        eigenvalues = np.linalg.eigvalsh(np.asarray(self.data.train["A"], np.float64))
        return float(eigenvalues.min()), float(eigenvalues.max())


def quadratic_bilevel(
    clients: int = 10,
    n: int = 5,
    p: int = 8,
    heterogeneity: float = 1.0,
    seed: int = 0,
    *,
    samples: int = 1,
    noise: float = 0.0,
) -> Quadratic:
    """A heterogeneous quadratic bilevel problem with its solution.

    Args:
        clients: the number of clients.
        n: the dimension of x.
        p: the dimension of y.
        heterogeneity: how much the clients' matrices and vectors differ; 0 makes them equal.
        seed: the seed of the draw.
        samples: the number of samples of a client.
        noise: the standard deviation of the linear terms of a client's samples, which are centred, so that
            the solution does not depend on it.

    Returns:
        ``(problem, data, x_star, y_star)``; it also has ``solution(x)``, ``gradient(x)`` and ``curvature``.

    >>> import fedstrata as fs
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=4)
    >>> x_star.shape, y_star.shape
    ((2,), (4,))
    """
    draw = _Draw(clients, heterogeneity, samples, noise, seed)
    arrays = {
        "A": draw.definite(p),
        "B": draw.matrix(p, n),
        "c": draw.vector(p),
        "M": draw.definite(n + p),
        "b": draw.vector(n + p),
    }
    return _solved(Bilevel(upper=_value, lower=_lower, same_samples=True), draw.data(arrays))


def quadratic_minimax(
    clients: int = 10,
    n: int = 5,
    p: int = 8,
    heterogeneity: float = 1.0,
    seed: int = 0,
    *,
    samples: int = 1,
    noise: float = 0.0,
) -> Quadratic:
    """A heterogeneous quadratic minimax problem, strongly convex and strongly concave, with its saddle point.

    The arguments and the result are those of `quadratic_bilevel`.
    """
    draw = _Draw(clients, heterogeneity, samples, noise, seed)
    P, Q, R, b = draw.definite(n), draw.matrix(n, p), draw.definite(p), draw.vector(n + p)
    transposed = np.swapaxes(Q, -1, -2)
    M = np.concatenate([np.concatenate([P, Q], -1), np.concatenate([transposed, -R], -1)], -2)
    arrays = {"A": R, "B": transposed, "c": -b[..., n:], "M": M, "b": b}
    return _solved(Minimax(payoff=_value), draw.data(arrays))


def _value(x: Array, y: Array, sample: dict[str, Array]) -> Array:
    z = jnp.concatenate([x, y])
    return z @ (sample["M"] @ z) / 2 - sample["b"] @ z


def _lower(x: Array, y: Array, sample: dict[str, Array]) -> Array:
    return y @ (sample["A"] @ y) / 2 - y @ (sample["B"] @ x + sample["c"])


def _solved(problem: Bilevel | Minimax, data: FederatedData) -> Quadratic:
    unsolved = Quadratic(problem, data, np.zeros(0), np.zeros(0))
    (H, q), (S, s) = unsolved._reduced(), unsolved._affine()
    x_star = np.linalg.solve(H, -q)
    return Quadratic(problem, data, x_star, S @ x_star + s)


class _Draw:
    """Arrays of shape (clients, samples, …): a common part, a client's own, and centred noise per sample."""

    def __init__(self, clients: int, heterogeneity: float, samples: int, noise: float, seed: int) -> None:
        for name, value in (("clients", clients), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}.")
        if min(heterogeneity, noise) < 0:
            raise ValueError(f"heterogeneity and noise must be ≥ 0, but are {heterogeneity} and {noise}.")
        self.rng = np.random.default_rng(seed)
        self.clients, self.samples = clients, samples
        self.heterogeneity, self.noise = heterogeneity, noise

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        common = self.rng.normal(size=(rows, columns))
        own = self.rng.normal(size=(self.clients, rows, columns))
        return self._spread((common + self.heterogeneity * own) / np.sqrt(columns))

    def definite(self, size: int) -> np.ndarray:
        common = self.rng.normal(size=(size, size))
        own = self.rng.normal(size=(self.clients, size, size))
        parts = common @ common.T + self.heterogeneity * own @ np.swapaxes(own, -1, -2)
        return self._spread(np.eye(size) + parts / (2 * size))

    def vector(self, size: int) -> np.ndarray:
        means = self.rng.normal(size=size) + self.heterogeneity * self.rng.normal(size=(self.clients, size))
        between = self.noise * self.rng.normal(size=(self.clients, self.samples, size))
        return means[:, None] + between - between.mean(1, keepdims=True)

    def _spread(self, per_client: np.ndarray) -> np.ndarray:
        return np.repeat(per_client[:, None], self.samples, axis=1)

    def data(self, arrays: dict[str, np.ndarray]) -> FederatedData:
        return FederatedData.from_clients([{k: v[i] for k, v in arrays.items()} for i in range(self.clients)])
