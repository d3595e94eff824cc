"""Metrics that several experiments have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core.types import Array, PyTree
from fedstrata.data.storage import Placed
from fedstrata.models import Metric

TILE = 4_096  # samples of the training data that a metric takes at once


def train_mean(function: Callable[[PyTree, Any], Any]) -> Metric:
    """The metric that averages ``function(x, sample)`` over each client's training data, then over all."""

    def metric(x: PyTree, y: PyTree, data: Placed) -> Any:
        return data.mean(function, x, shares=data.shares("uniform"), tile=TILE)

    return metric


def of_second(metric: Metric) -> Metric:
    """The metric of a model that is the second variable."""
    return lambda x, y, data: metric(y, None, data)


def mean_by_class(values: Array, labels: Array, classes: int) -> Array:
    """The mean of each class's values; zero where there is none."""
    sums, numbers = (jax.ops.segment_sum(v, labels, classes) for v in (values, jnp.ones_like(values)))
    return sums / jnp.maximum(numbers, 1)
