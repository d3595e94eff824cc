"""Runs to report on: two methods, two settings, four seeds, drawn from a fixed generator."""

from collections.abc import Callable

import numpy as np
import pytest

from fedstrata.lab.report import RunRecord

LEDGER = {"rounds": 20, "exchanges": 40, "bytes_up": 1_600_000, "levels": {"main": {"exchanges": 20}}}


def _make_runs(
    seeds: int = 4, labels: tuple[str, ...] = ("FedAvg", "FedMSA"), H: tuple[int, ...] = (1, 5)
) -> list[RunRecord]:
    rng = np.random.default_rng(0)
    runs = []
    for label in labels:
        for h in H:
            for seed in range(seeds):
                rounds = np.arange(0, 21, 2)
                loss = np.exp(-0.1 * h * rounds + rng.normal(0, 0.1, 11)) + rng.random()
                history = {
                    "round": rounds,
                    "loss": loss,
                    "accuracy": (1 / (1 + loss)).astype(np.float32),
                    "bytes_up": rounds * 80_000,
                    "seconds": np.cumsum(rng.random(11)),
                }
                runs.append(RunRecord(label, {"H": h}, seed, history, LEDGER, float(rng.random()), label))
    return runs


@pytest.fixture(scope="session")
def make_runs() -> Callable[..., list[RunRecord]]:
    return _make_runs


@pytest.fixture
def runs() -> list[RunRecord]:
    return _make_runs()
