"""Heart disease in four hospitals: the text that every party of the federation holds.

The data is the UCI repository's (Janosi, Steinbrunn, Pfisterer, Detrano 1988; CC BY 4.0), one file for each
of Cleveland, Budapest, Zurich/Basel and Long Beach. In the federation each file is at its own hospital.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.experiments.base import Experiment, Setting, Task
from fedstrata.report import Column, PlotSpec, TableSpec

FILES = ("cleveland", "hungarian", "switzerland", "va")
# Agreed beforehand, so that all hospitals scale alike and nobody's means have to travel.
CENTRE = np.array([53.0, 0.8, 3.2, 132.0, 220.0, 0.15, 0.6, 138.0, 0.4, 0.9])
SCALE = np.array([9.5, 0.4, 0.9, 19.0, 94.0, 0.4, 0.8, 26.0, 0.5, 1.1])


def read(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """A hospital's patients with complete records: ten features, and whether there is a disease."""
    rows = [line.split(",") for line in Path(file).read_text().splitlines() if line.strip()]
    table = np.array([[np.nan if v == "?" else float(v) for v in row] for row in rows])
    table = table[~np.isnan(table[:, :10]).any(1)]
    return {"x": (table[:, :10] - CENTRE) / SCALE, "y": (table[:, 13] > 0).astype(np.int32)}


def simulated() -> fs.FederatedData | None:
    """All four hospitals in one place, for simulations; None where their files are not."""
    folder = Path(os.environ.get("FEDSTRATA_DATA", ".")) / "heart"
    if not folder.is_dir():
        return None
    return fs.FederatedData.from_clients([read(folder / f"processed.{name}.data") for name in FILES])


def loss(x, sample):
    """The logistic loss, with a little regularisation."""
    margin = (2 * sample["y"] - 1) * (sample["x"] @ x["w"] + x["b"])
    return jax.nn.softplus(-margin) + 0.005 * (x["w"] @ x["w"])


PROBLEM = fs.Minimization(loss)
X0 = {"w": jnp.zeros(10), "b": jnp.zeros(())}


def build(s: Setting) -> Task:
    """SCAFFOLD, whose control variates stay at the hospitals."""
    method = fs.SCAFFOLD(eta_l=0.1, eta_g=1.0, K=5, batch_size=16)
    return Task(PROBLEM, method, simulated(), X0, rounds=s.rounds, eval_every=5, options={"weights": "size"})


EXPERIMENT = Experiment(
    name="hearts",
    title="Heart disease in four hospitals",
    description="Logistic regression on ten features of the patients of four hospitals.",
    parameters={"rounds": 60},
    build=build,
    seeds=1,
    table=TableSpec((Column("loss", better="low"), Column("bytes_up", "ledger", "uploaded", format="bytes"))),
    plots=(PlotSpec("loss"),),
)
