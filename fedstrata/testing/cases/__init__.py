"""One case per method: a small problem that it solves, for the tests that every method must pass.

Each family of methods has a module here with its cases, a list ``CASES``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fedstrata as fs

CLIENTS = 5


@dataclass(frozen=True)
class Case:
    """A method on a small problem with pytree variables and clients of unequal size.

    Attributes:
        name: the name of the test.
        method: the method with its hyper-parameters.
        problem: the problem, built once, so that compiled programs are shared.
        data: the data of `CLIENTS` clients.
        x0: the start, a pytree with more than one leaf.
        y0: the start of the second variable, or None.
        rounds: the number of rounds that are compared across engines.
        participation: the number of clients in the test of partial participation; None if the method needs
            all clients.
        solve: further arguments of `fs.solve`.
        warned: a regular expression of the warning that its few rounds raise; any other warning is shown.
    """

    name: str
    method: Any
    problem: Any
    data: Any
    x0: Any
    y0: Any = None
    rounds: int = 3
    participation: int | None = 3
    solve: dict[str, Any] = field(default_factory=dict)
    warned: str | None = None

    def run(self, **changes: Any) -> Any:
        """Solve it, with changed arguments of `fs.solve`."""
        arguments = {
            "rounds": self.rounds,
            "y0": self.y0,
            "seed": 1,
            "progress": False,
            **self.solve,
            **changes,
        }
        method = arguments.pop("method", self.method)
        x0 = arguments.pop("x0", self.x0)
        data = arguments.pop("data", self.data)
        with warnings.catch_warnings():
            if self.warned is not None:
                warnings.filterwarnings("ignore", self.warned, UserWarning)
            return fs.solve(self.problem, method, data, x0, **arguments)


def samples(
    seed: int, sizes: tuple[int, ...] = (4, 7, 3, 5, 6), features: int = 3
) -> list[dict[str, np.ndarray]]:
    """Regression samples ``{"a": features, "b": target}`` for clients of unequal size, well scaled."""
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(n, features)) / 2, "b": rng.normal(size=n)} for n in sizes]


def all_cases() -> list[Case]:
    """The cases of all families."""
    cases: list[Case] = []
    for module in pkgutil.iter_modules(__path__):
        cases += importlib.import_module(f"{__name__}.{module.name}").CASES
    return cases


Loss = Callable[..., Any]
