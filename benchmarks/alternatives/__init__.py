"""One task, written for FedStrata and for what one might use in its place; a module for each package.

The task is FedAvg on softmax regression. In every round the clients that take part (drawn without
replacement) go from the server's parameters through the local steps, w ← w − γ ∇ of the mean cross-entropy
over a batch that is drawn with replacement; the server takes the mean of where they end. A program gets a
`Case` and gives a function without arguments that runs all rounds from zero and returns the parameters, or a
context manager around it where processes must be stopped at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..timing import Run


@dataclass(frozen=True)
class Case:
    """Data and sizes of a run: ``x`` is clients × samples × features, ``y`` holds the classes."""

    x: np.ndarray
    y: np.ndarray
    participants: int
    rounds: int
    classes: int = 10
    steps: int = 20
    batch: int = 32
    gamma: float = 0.1
    seed: int = 0

    @property
    def clients(self) -> int:
        return self.x.shape[0]

    @property
    def samples(self) -> int:
        return self.x.shape[1]

    def start(self) -> dict[str, np.ndarray]:
        """The parameters w (features × classes) and b."""
        return {
            "w": np.zeros((self.x.shape[2], self.classes), np.float32),
            "b": np.zeros(self.classes, np.float32),
        }

    def loss(self, params: Any) -> float:
        """The mean cross-entropy over all samples of all clients."""
        w, b = np.asarray(params["w"]), np.asarray(params["b"])
        total = 0.0
        for xs, ys in zip(self.x, self.y, strict=True):
            logits = xs @ w + b
            total += float(np.mean(np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(ys)), ys]))
        return total / self.clients


@dataclass(frozen=True)
class Alternative:
    """Where a program is written.

    Attributes:
        module: in this folder.
        program: the function in it.
        needs: packages that it imports.
        apart: whether it keeps processes of its own, and is therefore timed after the others are done.
    """

    module: str
    program: str
    needs: tuple[str, ...]
    apart: bool = False

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(package) for package in self.needs)

    def open(self, case: Case) -> AbstractContextManager[Run]:
        """Import it and set it up."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        made = getattr(module, self.program)(case)
        return made if isinstance(made, AbstractContextManager) else nullcontext(made)


ALTERNATIVES = {
    "fedstrata": Alternative("ours", "simulated", ("fedstrata",)),
    "JAX by hand, vmap": Alternative("by_hand", "side_by_side", ("jax",)),
    "JAX by hand, lax.map": Alternative("by_hand", "one_by_one", ("jax",)),
    "NumPy loop": Alternative("numpy_loop", "loop", ("numpy",)),
    "PyTorch loop": Alternative("pytorch", "loop", ("torch",)),
    "torch.func.vmap": Alternative("pytorch", "vmapped", ("torch",)),
    "DrJAX": Alternative("drjax", "mapped", ("drjax",)),
    "FedJAX": Alternative("fedjax", "for_each_client", ("fedjax",)),
    "pfl": Alternative("pfl", "simulated", ("pfl", "torch")),
    "Flower": Alternative("flower", "simulation", ("flwr", "ray", "torch"), apart=True),
}
