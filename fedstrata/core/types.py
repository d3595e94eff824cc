"""Types of the contract. Their meaning is documented here; shapes are documented where values are used.

PyTree     any nesting of dicts, lists, tuples and NamedTuples with arrays at its leaves
Key        a JAX random key; one key is used once
Real       a real number, known or traced: a step size, a weight
Integer    a whole number, known or traced: a round, a client's index or size
Function   a user's function, of ``(x, …, sample)``
Phase      a client's part of an exchange: ``phase(problem, client, key, *message) -> upload``
Schedule   a hyper-parameter as a function of the round
Weights    how a mean over clients is weighted: equally, or by their numbers of training samples
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

PyTree: TypeAlias = Any
Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
Real: TypeAlias = jax.Array | float
Integer: TypeAlias = jax.Array | int
Function: TypeAlias = Callable[..., Any]
Phase: TypeAlias = Callable[..., Any]
Schedule: TypeAlias = Callable[[Integer], Any]
DType: TypeAlias = np.dtype
Weights: TypeAlias = Literal["uniform", "size"]
