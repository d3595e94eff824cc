"""Least squares with fewer equations than unknowns: a selection problem with a known solution.

    h(x) = 1/m Σ_i 1/n_i Σ_s ½ (a_sᵀx − b_s)²,     f(x) = ½‖x − c‖²

argmin h is the affine set Ax = b, and its point with the least f is ``x* = c + A⁺(b − Ac)``. Started at c,
gradient descent on h finds x* without f; tests must start outside c + the row space, as `Underdetermined.x0`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array
from fedstrata.data.federated import FederatedData
from fedstrata.problems.classes import Selection


class Underdetermined(NamedTuple):
    """A problem, its data, its solution and a start.

    Attributes:
        problem: `Selection` of squared residuals and ½‖x − c‖².
        data: the data in float64, which `solve` casts; samples are ``{"a": row, "b": number}``.
        x_star: the solution.
        x0: a start with a component in the null space of A.
        A: all rows, stacked.
        b: all right-hand sides.
        c: the minimiser of f.
    """

    problem: Selection
    data: FederatedData
    x_star: np.ndarray
    x0: np.ndarray
    A: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def minimiser(self, eta: float, L_h: float = 1.0) -> np.ndarray:
        """The minimiser of ``h/L_h + ηf``."""
        H, q = self._quadratic()
        n = H.shape[0]
        return np.linalg.solve(H / L_h + eta * np.eye(n), q / L_h + eta * self.c)

    def project(self, x: Array) -> Array:
        """The projection onto argmin h."""
        return x - jnp.asarray(np.linalg.pinv(self.A)) @ (jnp.asarray(self.A) @ x - jnp.asarray(self.b))

    @property
    def L_h(self) -> float:
        """The curvature of h."""
        return float(np.linalg.eigvalsh(self._quadratic()[0])[-1])

    def _quadratic(self) -> tuple[np.ndarray, np.ndarray]:
        """H and q of ``h(x) = ½xᵀHx − qᵀx + …``."""
        rows = np.asarray(self.data.train["a"], np.float64)
        targets = np.asarray(self.data.train["b"], np.float64)
        sizes = self.data.sizes
        weights = np.repeat(1 / sizes / len(sizes), sizes)
        return (rows.T * weights) @ rows, (rows.T * weights) @ targets


def underdetermined(
    clients: int = 5, n: int = 40, samples: int = 4, curvature: float = 1.0, seed: int = 0
) -> Underdetermined:
    """Under-determined least squares with its selected solution.

    Args:
        clients: the number of clients.
        n: the number of unknowns, more than ``clients · samples``.
        samples: the number of equations of a client.
        curvature: the curvature L_h of h, to which the data is scaled.
        seed: the seed of the draw.

    >>> import numpy as np, fedstrata as fs
    >>> toy = fs.underdetermined(clients=3, n=12, samples=2)
    >>> bool(np.allclose(toy.A @ toy.x_star, toy.b)), round(toy.L_h, 6)
    (True, 1.0)
    """
    if n <= clients * samples:
        raise ValueError(
            f"{clients} · {samples} equations in {n} unknowns have one solution: give a larger n."
        )
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(clients * samples, n))
    A *= np.sqrt(curvature * clients * samples / np.linalg.eigvalsh(A @ A.T)[-1])
    c, x0 = rng.normal(size=n), 2 * rng.normal(size=n)
    b = A @ rng.normal(size=n)
    parts = [{"a": a, "b": t} for a, t in zip(np.split(A, clients), np.split(b, clients), strict=True)]

    def residual(x: Array, sample: dict[str, Array]) -> Array:
        return (sample["a"] @ x - sample["b"]) ** 2 / 2

    def distance(x: Array) -> Array:
        return ((x - jnp.asarray(c, x.dtype)) ** 2).sum() / 2

    x_star = c + np.linalg.pinv(A) @ (b - A @ c)
    data = FederatedData.from_clients(parts)
    return Underdetermined(Selection(residual, distance, same_samples=True), data, x_star, x0, A, b, c)
