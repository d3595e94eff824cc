"""The ledger: what travelled and what was computed, exact, from counts made while tracing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from fedstrata.tally import Tally

ORACLES = {"values": "function_values", "gradients": "gradients", "products": "hessian_products"}
TRAFFIC = ("exchanges", "floats_up", "floats_down", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Ledger:
    """Totals of a run.

    Attributes:
        rounds: averagings of the main variable.
        lower_rounds: exchanges of lower-level solvers.
        exchanges: messages down and up with the participating clients, of every level.
        floats_up, floats_down: numbers sent, summed over the clients.
        bytes_up, bytes_down: the same in bytes. Random seeds are shared beforehand and do not count.
        function_values, gradients, hessian_products: oracle calls, each for one sample.
        levels: the traffic again, by level ("main", "lower", "step").
    """

    rounds: int = 0
    exchanges: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    function_values: int = 0
    gradients: int = 0
    hessian_products: int = 0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def oracle_calls(self) -> int:
        """All oracle calls together."""
        return self.function_values + self.gradients + self.hessian_products

    @property
    def lower_rounds(self) -> int:
        """Exchanges of lower-level solvers."""
        return self.levels.get("lower", {}).get("exchanges", 0)

    @classmethod
    def from_counts(cls, rounds: int, counts: Counter[str]) -> Ledger:
        """Sort counts by name (``"main/bytes_up"``, ``"gradients"``) into a ledger."""
        levels: dict[str, dict[str, int]] = {}
        totals: Counter[str] = Counter()
        for name, amount in counts.items():
            level, _, entry = name.rpartition("/")
            if level:
                levels.setdefault(level, dict.fromkeys(TRAFFIC, 0))[entry] = amount
                totals[entry] += amount
            else:
                totals[ORACLES[entry]] += amount
        return cls(rounds=rounds, levels=levels, **totals)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the derived entries."""
        return {**asdict(self), "oracle_calls": self.oracle_calls, "lower_rounds": self.lower_rounds}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ledger:
        """The inverse of `to_dict`."""
        return cls(**{k: v for k, v in values.items() if k not in ("oracle_calls", "lower_rounds")})


def settle(tally: Tally, times: int, factors: Iterable[Any]) -> Counter[str]:
    """The counts of ``times`` repetitions, whose factors summed over them are given as (high, low) words."""
    total: Counter[str] = Counter()
    for name, amount in tally.fixed.items():
        total[name] += amount * times
    for (counts, _), factor in zip(tally.scaled, factors, strict=True):
        high, low = (int(word) for word in np.asarray(factor))
        for name, amount in counts.items():
            total[name] += amount * ((high << 32) + low)
    return +total  # without zeros


def traffic(level: str, message: Any, upload: Any, clients: int) -> Counter[str]:
    """The counts of one exchange with ``clients`` clients (shapes only)."""
    counts = Counter({f"{level}/exchanges": 1})
    for way, tree in (("down", message), ("up", upload)):
        leaves = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree)]
        counts[f"{level}/floats_{way}"] = clients * sum(leaf.size for leaf in leaves)
        counts[f"{level}/bytes_{way}"] = clients * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return counts
