"""Rounds of which only the cohorts' samples are on the device: a window.

The rounds are the simulated engine's; clients' rows are found by their numbers. A round that asks anybody
else says so when it is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from fedstrata.core.fed import Exchange, Fed, Setup
from fedstrata.core.types import Array, Integer, Key, PyTree, Weights
from fedstrata.data.storage import Placed
from fedstrata.engines.rounds import cohorts_of
from fedstrata.engines.simulated import Simulated, SimulatedFed


class AsksOthers(Exception):
    """A round asks clients outside of its cohort; the message names the phase."""


class CohortFed(SimulatedFed):
    """The verbs in a program that has the samples of its rounds' cohorts alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._here = [self._chosen]

    def sample(self, key: Key, count: int) -> Array:
        """See `Fed.sample`: these are here, as they are of the cohort."""
        drawn = super().sample(key, count)
        self._here.append(drawn)
        return drawn

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """See `Fed.exchange`; whoever may not be here is refused when the program is traced."""
        if exchange.of is None or not any(exchange.of is these for these in self._here):
            raise AsksOthers(getattr(exchange.phase, "__name__", "a phase"))
        return super().exchange(exchange)


@dataclass(frozen=True)
class Cohorts(Simulated):
    """The simulated engine where only cohorts are placed."""

    def make_fed(self) -> Callable[..., Fed]:
        """See `Simulated.make_fed`."""
        return partial(CohortFed, self)


@cache
def drawn_cohorts(clients: int, participants: int, weights: Weights) -> Callable[..., Array]:
    """The cohorts of some rounds, from the seed."""
    setup = Setup(None, clients, participants, weights)  # type: ignore[arg-type]

    def of(seed: Integer, rounds: Array, data: Any) -> Array | None:
        return cohorts_of(setup, jax.random.key(seed), data, rounds)

    return jax.jit(of)


@dataclass
class Window:
    """The clients of some rounds, on the device."""

    start: int
    stop: int
    clients: np.ndarray
    placed: Placed
    memory: PyTree = None  # where it is on the device
