"""Images as plain arrays for experiments that build their own federated data from them."""

from __future__ import annotations

import functools

import numpy as np

from fedstrata.data import load

# mean and deviation of the pixels in [0, 1]
SCALES = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530), "digits": (0.3053, 0.3761)}

Arrays = dict[str, np.ndarray]


@functools.cache
def images(name: str) -> tuple[Arrays, Arrays]:
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

    def prepare(part: Arrays) -> Arrays:
        x = part["x"].reshape(len(part["y"]), -1).astype(np.float32) / white
        return {"x": (x - mean) / deviation, "y": part["y"].astype(np.int32)}

    return prepare(parts[0]), prepare(parts[1])


def falling(first: float, ratio: float, classes: int = 10) -> np.ndarray:
    """Sizes of classes that fall geometrically, ⌊first · ratio^{c/(C−1)}⌋.

    >>> falling(6000, 0.01)
    array([6000, 3596, 2156, 1292,  774,  464,  278,  166,  100,   60])
    """
    return np.floor(first * ratio ** (np.arange(classes) / (classes - 1))).astype(int)


def long_tail(part: Arrays, sizes: np.ndarray, rng: np.random.Generator) -> Arrays:
    """Of class c ``sizes[c]`` images at random, or all where there are fewer."""
    members = [rng.permutation(np.flatnonzero(part["y"] == c))[:size] for c, size in enumerate(sizes)]
    return {name: array[np.concatenate(members)] for name, array in part.items()}
