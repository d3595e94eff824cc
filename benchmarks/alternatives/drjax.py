"""DrJAX: broadcast, map, mean as primitives of JAX, and the rounds in a scan as by hand."""

from __future__ import annotations

from typing import Any

import absl.logging
import drjax
import jax
import jax.numpy as jnp

from ..timing import Run
from . import Case
from .by_hand import cohort, local_steps


def mapped(case: Case) -> Run:
    absl.logging.set_verbosity(
        absl.logging.ERROR
    )  # it warns that there is no mesh, which one device needs not

    @jax.jit
    @drjax.program(placements={"clients": case.participants})
    def program(params: Any, x: Any, y: Any) -> Any:
        def one_round(params: Any, key: Any) -> tuple[Any, None]:
            key_cohort, key_clients = jax.random.split(key)
            chosen, keys = cohort(case, key_cohort), jax.random.split(key_clients, case.participants)
            ends = drjax.map_fn(
                lambda params, key, i: local_steps(case, params, key, x, y, i),
                (drjax.broadcast(params), keys, chosen),
            )
            return drjax.reduce_mean(ends), None

        return jax.lax.scan(one_round, params, jax.random.split(jax.random.key(case.seed), case.rounds))[0]

    params, x, y = jax.tree.map(jnp.asarray, (case.start(), case.x, case.y))
    return lambda: jax.block_until_ready(program(params, x, y))
