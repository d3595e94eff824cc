"""The programs that a JAX user would write: rounds in a scan, clients by `vmap` or `lax.map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..timing import Run
from . import Case


def batch_loss(params: Any, xs: Any, ys: Any) -> jax.Array:
    logits = xs @ params["w"] + params["b"]
    return (jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, ys[:, None], 1)[:, 0]).mean()


def local_steps(case: Case, params: Any, key: Any, x: Any, y: Any, i: Any) -> Any:
    """A client's steps; of its data only the batches are fetched."""

    def step(params: Any, key: Any) -> tuple[Any, None]:
        rows = jax.random.randint(key, (case.batch,), 0, case.samples)
        grad = jax.grad(batch_loss)(params, x[i, rows], y[i, rows])
        return jax.tree.map(lambda p, g: p - case.gamma * g, params, grad), None

    return jax.lax.scan(step, params, jax.random.split(key, case.steps))[0]


def cohort(case: Case, key: Any) -> Any:
    if case.participants == case.clients:
        return jnp.arange(case.clients)
    return jax.random.choice(key, case.clients, (case.participants,), replace=False)


def rounds(case: Case, over: Callable[..., Any]) -> Run:
    """The program, with ``over(client, keys, chosen)`` to run all clients."""

    @jax.jit
    def program(params: Any, x: Any, y: Any) -> Any:
        def one_round(params: Any, key: Any) -> tuple[Any, None]:
            key_cohort, key_clients = jax.random.split(key)
            chosen, keys = cohort(case, key_cohort), jax.random.split(key_clients, case.participants)
            ends = over(lambda key, i: local_steps(case, params, key, x, y, i), keys, chosen)
            return jax.tree.map(lambda end: end.mean(0), ends), None

        return jax.lax.scan(one_round, params, jax.random.split(jax.random.key(case.seed), case.rounds))[0]

    params, x, y = jax.tree.map(jnp.asarray, (case.start(), case.x, case.y))
    return lambda: jax.block_until_ready(program(params, x, y))


def side_by_side(case: Case) -> Run:
    return rounds(case, lambda client, keys, chosen: jax.vmap(client)(keys, chosen))


def one_by_one(case: Case) -> Run:
    return rounds(case, lambda client, keys, chosen: jax.lax.map(lambda pair: client(*pair), (keys, chosen)))
