"""A small experiment whose results are known in closed form."""

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.lab import Column, Experiment, PlotSpec, TableSpec, Task

DATA = fs.FederatedData.from_clients([{"a": np.full((2, 1), a)} for a in (0.0, 2.0)])
PROBLEM = fs.Minimization(lambda x, sample: 0.5 * ((x - sample["a"]) ** 2).sum())


def build(s):
    # Gradient descent towards 1: after r rounds x = 1 − (1 − γ)^(rH).
    return Task(PROBLEM, fs.FedAvg(s.gamma, H=s.H), DATA, np.zeros(1), rounds=s.rounds, metrics={"x": first})


def first(x, y):
    return x[0]


def make(**changes):
    fields = {
        "name": "descent",
        "title": "Descent",
        "description": "A parabola.",
        "parameters": {"rounds": 2, "gamma": 0.5, "note": "text", "flag": False, "empty": None},
        "grid": {"H": [1, 2]},
        "build": build,
        "seeds": 2,
        "table": TableSpec((Column("x"),), rows=("H",)),
        "plots": (PlotSpec("loss", lines=("H",)),),
        "quick": {"rounds": 1, "seeds": 1},
    }
    return Experiment(**(fields | changes))


@pytest.fixture
def experiment():
    return make()
