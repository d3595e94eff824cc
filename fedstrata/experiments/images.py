"""Images as plain arrays for experiments that build their own federated data from them."""

from __future__ import annotations

import functools
import math

import numpy as np

from fedstrata.data import load

# mean and deviation of the pixels in [0, 1]
SCALES = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530), "digits": (0.3053, 0.3761)}

Part = dict[str, np.ndarray]


@functools.cache
def images(name: str) -> tuple[Part, Part]:
    """Training and test images, flat and normalised, with labels; of digits a fifth is the test part.

    >>> train, test = images("digits")
    >>> train["x"].shape, test["x"].shape
    ((1437, 64), (360, 64))
    """
    arrays = load(name)
    if name == "digits":
        order = np.random.default_rng(0).permutation(len(arrays["y"]))
        parts = [{k: v[rows] for k, v in arrays.items()} for rows in (order[360:], order[:360])]
    else:
        parts = [{k: arrays[f"{k}_{part}"] for k in "xy"} for part in ("train", "test")]
    mean, deviation = SCALES[name]
    white = 16 if name == "digits" else 255

    def prepare(part: Part) -> Part:
        x = part["x"].reshape(len(part["y"]), -1).astype(np.float32) / white
        return {"x": (x - mean) / deviation, "y": part["y"].astype(np.int32)}

    return prepare(parts[0]), prepare(parts[1])


def long_tail(part: Part, ratio: float, rng: np.random.Generator) -> Part:
    """Classes of falling size: of class c, n_c = min(N_c, ⌊N/C · ratio^{c/(C−1)}⌋ + 1) images at random.

    >>> train = {"x": np.zeros((60_000, 1)), "y": np.arange(60_000) % 10}
    >>> np.bincount(long_tail(train, 0.01, np.random.default_rng(0))["y"])
    array([6000, 3597, 2157, 1293,  775,  465,  279,  167,  101,   61])
    """
    labels = part["y"]
    classes = int(labels.max()) + 1
    rows = []
    for c in range(classes):
        members = rng.permutation(np.flatnonzero(labels == c))
        rows.append(members[: math.floor(len(labels) / classes * ratio ** (c / (classes - 1))) + 1])
    chosen = np.concatenate(rows)
    return {name: array[chosen] for name, array in part.items()}
