"""FedStrata: the simulated engine's program for some rounds, without metrics."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.engines.engine import Carry, Job

from ..timing import Run
from . import Case


def loss(params: Any, sample: Any) -> jax.Array:
    logits = sample["x"] @ params["w"] + params["b"]
    return jax.nn.logsumexp(logits) - logits[sample["y"]]


problem = fs.Minimization(loss)


def simulated(case: Case) -> Run:
    data = fs.FederatedData.from_clients([{"x": x, "y": y} for x, y in zip(case.x, case.y, strict=True)])
    method = fs.FedAvg(gamma=case.gamma, H=case.steps, batch_size=case.batch)
    engine = fs.engines.Simulated()
    placed = engine.place(data)
    setup = Setup(problem, case.clients, case.participants, measure_problem=False)
    carry = engine.place_carry(Carry(method.init(problem, case.start(), None), None))
    rounds = np.array([case.rounds])

    def run() -> Any:
        return jax.block_until_ready(
            engine.advance(Job(setup, method, case.seed, placed), carry, 0, rounds).carry.state.x
        )

    return run
