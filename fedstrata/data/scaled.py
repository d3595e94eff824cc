"""Arrays that are stored as bytes and converted when samples are drawn.

A `Scaled` takes the place of an array in a pytree of samples. Code that keeps, copies or fetches samples sees
the bytes, as `jax.tree.map` does; code that hands them to a user's function calls
`fedstrata.core.client.opened` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.client import Converted
from fedstrata.core.types import PyTree


@dataclass(frozen=True)
class Scaled(Converted):
    """An array that functions see as ``(values − mean) / deviation``, in JAX's default float.

    Attributes:
        values: the array as it is kept, e.g. in uint8.
        mean, deviation: numbers, or nested tuples that broadcast against a sample.
    """

    values: Any
    mean: Any
    deviation: Any

    def opened(self) -> Any:
        """The array as a function sees it; for shapes, its shape."""
        if isinstance(self.values, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.values.shape, jnp.result_type(float))
        xp: Any = np if isinstance(self.values, np.ndarray) else jnp
        dtype = jnp.result_type(float)
        return (self.values.astype(dtype) - xp.asarray(self.mean, dtype)) / xp.asarray(self.deviation, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype in which they are kept."""
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.opened(), dtype)


jax.tree_util.register_pytree_with_keys(
    Scaled,
    lambda s: ([(jax.tree_util.GetAttrKey("values"), s.values)], (s.mean, s.deviation)),
    lambda static, children: Scaled(next(iter(children)), *static),
)


Scales = tuple[tuple[str, Any, Any], ...]  # name, mean, deviation


def scaled(samples: PyTree, scales: Scales) -> PyTree:
    """Samples (dicts of arrays) with some arrays replaced by `Scaled` ones."""
    return {**samples, **{name: Scaled(samples[name], mean, deviation) for name, mean, deviation in scales}}
