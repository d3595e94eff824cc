"""Heart disease in four hospitals: the text that every party of the federation holds.

The data is the UCI repository's (Janosi, Steinbrunn, Pfisterer, Detrano 1988; CC BY 4.0), one CSV file for
each of Cleveland, Budapest, Zurich/Basel and Long Beach. In the federation each file is at its own hospital.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.report import Column, PlotSpec, TableSpec

FILES = ("cleveland", "hungary", "zurich", "long-beach")
WORDS = {"male": 1, "female": 0, "yes": 1, "no": 0, "none": 1, "typical": 0, "atypical": 0, "non-anginal": 0}
# Agreed beforehand, so that all hospitals scale alike and nobody's means have to travel: centre and scale.
FEATURES = {
    "age": (53, 9.5),
    "sex": (0.8, 0.4),
    "chest_pain": (0.5, 0.5),
    "blood_pressure": (132, 19),
    "cholesterol": (247, 58),
    "max_heart_rate": (138, 26),
    "exercise_angina": (0.4, 0.5),
    "st_depression": (0.9, 1.1),
}


def read(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """A hospital's patients: eight features, and whether they are ill; what is missing is the centre."""
    with Path(file).open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))

    def scaled(row: dict[str, str], name: str) -> float:
        centre, scale = FEATURES[name]
        return (float(WORDS.get(row[name], row[name])) - centre) / scale if row[name] else 0.0

    x = np.array([[scaled(row, name) for name in FEATURES] for row in rows])
    return {"x": x, "y": np.array([int(row["ill"]) for row in rows], np.int32)}


def simulated() -> fs.FederatedData | None:
    """All four hospitals in one place, for simulations; None where their files are not."""
    files = [Path(__file__).parent / f"{name}.csv" for name in FILES]
    if not all(file.is_file() for file in files):
        return None
    return fs.FederatedData.from_clients([read(file) for file in files])


def loss(x, sample):
    """The logistic loss, with a little regularisation."""
    margin = (2 * sample["y"] - 1) * (sample["x"] @ x["w"] + x["b"])
    return jax.nn.softplus(-margin) + 0.005 * (x["w"] @ x["w"])


PROBLEM = fs.Minimization(loss)
X0 = {"w": jnp.zeros(len(FEATURES)), "b": jnp.zeros(())}


def build(s: Setting) -> Task:
    """SCAFFOLD, whose control variates stay at the hospitals."""
    method = fs.SCAFFOLD(eta_l=0.1, eta_g=1.0, K=5, batch_size=16)
    return Task(PROBLEM, method, simulated(), X0, rounds=s.rounds, eval_every=5, options={"weights": "size"})


EXPERIMENT = Experiment(
    name="hearts",
    title="Heart disease in four hospitals",
    description="Logistic regression on eight features of the patients of four hospitals.",
    parameters={"rounds": 60},
    build=build,
    seeds=1,
    table=TableSpec((Column("loss", better="low"), Column("bytes_up", "ledger", "uploaded", format="bytes"))),
    plots=(PlotSpec("loss"),),
)
