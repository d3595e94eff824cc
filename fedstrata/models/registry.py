"""Models by name, with sizes read from the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.labels import check_labels, count_classes
from fedstrata.data.samples import by_name
from fedstrata.models.images import cnn, resnet, resnet20
from fedstrata.models.losses import Loss
from fedstrata.models.model import Model
from fedstrata.models.networks import mlp, relu_network
from fedstrata.models.regression import linear, logistic, softmax
from fedstrata.support.words import suggest

MODELS: dict[str, Callable[..., Model]] = {
    "linear": linear,
    "softmax": softmax,
    "logistic": logistic,
    "mlp": mlp,
    "relu_network": relu_network,
    "cnn": cnn,
    "resnet": resnet,
    "resnet20": resnet20,
}
SIZES = ("features", "channels", "outputs", "classes")  # read from the data


def options(name: str) -> list[str]:
    """The names of a model's options, without the sizes that are read from the data.

    >>> options("softmax"), options("mlp")
    (['lam'], ['hidden', 'lam', 'loss', 'activation'])
    """
    return [key for key in inspect.signature(_constructor(name)).parameters if key not in SIZES]


def for_data(name: str, data: FederatedData, **given: Any) -> Model:
    """Make the model of this name for samples ``{"x": …, "y": …}``: reads sizes from them, checks labels.

    Args:
        name: one of `MODELS`.
        data: the samples.
        given: the model's options, see `options`, and sizes that should differ from those of the data.

    Raises:
        ValueError: for an unknown name or option.
        DataError: for labels that the loss does not accept.

    >>> import fedstrata as fs
    >>> data = fs.data.digits(clients=2)
    >>> model = for_data("mlp", data, hidden=32)
    >>> model.init(0)["hidden"]["W"].shape, model.init(0)["output"]["W"].shape
    ((64, 32), (32, 10))
    """
    constructor = _constructor(name)
    parameters = inspect.signature(constructor).parameters
    for key in given:
        if key not in parameters:
            raise ValueError(
                f"{name} has no option {key!r}{suggest(key, list(parameters))} Its options are "
                f"{', '.join(parameters)}."
            )
    # A file has lists where Python has tuples.
    given = {key: tuple(value) if type(value) is list else value for key, value in given.items()}
    data.need_memory("A model's size")
    if not {"x", "y"} <= by_name(data.train).keys():
        names = ", ".join(map(repr, by_name(data.train))) or type(data.train).__name__
        raise DataError(f"Models take samples {{'x': …, 'y': …}}, but these have {names}.")
    sizes: dict[str, Any] = {}
    if "features" in parameters:
        sizes["features"] = data.train["x"][0].size
    if "channels" in parameters:
        sizes |= _image(name, data.train["x"].shape[1:], given.get("shape"))
    if (key := "classes" if name == "softmax" else "outputs") in parameters:
        sizes[key] = given.get(key) or _outputs(data, _loss(parameters, given))
    if name == "logistic":
        _outputs(data, Loss.of("logistic"))
    return constructor(**{**sizes, **given})


def _constructor(name: str) -> Callable[..., Model]:
    if name not in MODELS:
        raise ValueError(
            f"Unknown model {name!r}{suggest(name, list(MODELS))} Give one of {', '.join(MODELS)}."
        )
    return MODELS[name]


def _loss(parameters: Any, given: dict[str, Any]) -> Loss:
    return Loss.of(given.get("loss", parameters["loss"].default if "loss" in parameters else "cross_entropy"))


def _outputs(data: FederatedData, loss: Loss) -> int:
    """The number of scores that the labels need."""
    if loss.labels == "classes":
        if (found := np.asarray(data.train["y"]).dtype).kind not in "iub":
            raise DataError(f"Labels of classes must be integers, but 'y' is {found}: give y.astype(int).")
        if (classes := count_classes(data)) > 1 and not (np.asarray(data.train["y"]) == 0).any():
            raise DataError(
                f"No training sample has the label 0, and the largest is {classes - 1}. Number the classes "
                "from 0, or give the number of scores (classes= or outputs=) if the first has no sample."
            )
        return max(2, classes)
    if loss.labels == "two":
        check_labels(data, 2)
        return 1
    labels = np.asarray(data.train["y"])
    if labels.ndim > 2:
        raise DataError(f"Labels are numbers or vectors, but these have shape {labels.shape[1:]}.")
    return labels.shape[1] if labels.ndim == 2 else 1


def _image(name: str, image: tuple[int, ...], shape: tuple[int, ...] | None) -> dict[str, Any]:
    if shape is not None:
        return {"channels": shape[-1]}
    if len(image) == 3:
        return {"channels": image[-1]}
    if len(image) == 2:
        return {"channels": 1, "shape": (*image, 1)}
    raise DataError(
        f"{name} takes images (height, width, channels), but 'x' has samples of shape {image}: load them "
        f"with flat=False, or give shape=(height, width, channels)."
    )
