"""FedJAX: `for_each_client` with a compiled step, to which the host hands the batches.

Its own FedAvg shuffles a client's samples; here batches are drawn with replacement, as in the other programs.
Its own mean over clients (version 0.0.17) needs a JAX older than FedStrata does; it is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from ..timing import Run
from . import Case
from .by_hand import batch_loss


def for_each_client(case: Case) -> Run:
    def client_step(params: Any, batch: Any) -> Any:
        grad = jax.grad(batch_loss)(params, batch["x"], batch["y"])
        return jax.tree.map(lambda p, g: p - case.gamma * g, params, grad)

    train = fedjax.for_each_client(lambda params, rng: params, client_step)

    def batches(i: int, rng: Any) -> Iterator[Any]:
        for _ in range(case.steps):
            rows = rng.integers(0, case.samples, case.batch)
            yield {"x": case.x[i, rows], "y": case.y[i, rows]}

    def run() -> Any:
        rng = np.random.default_rng(case.seed)
        params = jax.tree.map(jnp.asarray, case.start())
        for _ in range(case.rounds):
            chosen = rng.choice(case.clients, case.participants, replace=False)
            clients = [(i, batches(i, rng), ()) for i in chosen]
            ends = [end for _, end in train(params, clients)]
            params = jax.tree.map(lambda *leaves: sum(leaves) / case.participants, *ends)
        return jax.block_until_ready(params)

    return run
