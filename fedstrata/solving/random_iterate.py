"""The random output of the papers' theorems: an iterate drawn uniformly, at which a run ends.

r* uniform on {0, …, R − 1}:                   a run of r* rounds
k* uniform on {0, …, R H − 1}, local steps:    ⌊k*/H⌋ rounds, and one of the other k* mod H local steps
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.method import Method
from fedstrata.core.types import Integer


def random_iterate(
    method: Method[Any, Any], rounds: int, seed: int = 0, *, local_steps: bool = False
) -> tuple[Method[Any, Any], int]:
    """A method and a number of rounds whose result is one of the iterates of ``rounds`` rounds, at random.

    The theorems of FedRZO, ZO-HFL, FedMSA and FedDRO bound the gradient there, not at the last iterate. Run
    it with the seed and the steps of the whole run: its result is that run's iterate.

    Args:
        method: with the step sizes for all rounds.
        rounds: R.
        seed: of the draw.
        local_steps: whether the clients' mean after any of the ``H`` local steps may be drawn, as in the
            theorems of FedRZO, instead of rounds alone.

    >>> import fedstrata as fs
    >>> method, rounds = fs.random_iterate(fs.FedRZO(0.01, 0.1, H=4), rounds=100, seed=1)
    >>> method.H, 0 <= rounds < 100
    (4, True)
    """
    if rounds < 1:
        raise ValueError(f"random_iterate: rounds must be at least 1, but is {rounds!r}.")
    H: Any = vars(method).get("H", 1) if local_steps else 1
    if not isinstance(H, int | np.integer):
        raise ValueError(
            f"random_iterate: local_steps=True needs a number of local steps H, but it is {H!r}. "
            "Leave local_steps out, so that rounds alone are drawn."
        )
    whole, rest = divmod(int(np.random.default_rng(seed).integers(rounds * H)), int(H))
    if rest == 0:
        return method, whole
    changed: dict[str, Any] = {"H": jax.tree_util.Partial(_last, int(H), whole, rest)}
    return replace(method, **changed), whole + 1  # type: ignore[type-var]


def _last(H: Integer, whole: Integer, rest: Integer, r: Integer) -> jax.Array:
    return jnp.where(r < whole, H, rest)
