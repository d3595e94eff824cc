"""Loaders: a name, a number of clients and a partitioner make a federated data set.

Every loader returns a `FederatedData` whose samples are `{"x": features, "y": label}`, with the published
test part (or a held-out one) as the pooled `test` data. `load` gives the same data sets as plain arrays. The
files are looked for in `data_dir`, else in the folder FEDSTRATA_DATA, else downloaded once; digits and
breast_cancer come with scikit-learn and heart with this package (`fedstrata.lab.datasets.hospitals`).
"""

import os
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.labels import check_labels
from fedstrata.data.partition import IID, Partitioner
from fedstrata.lab.datasets import hospitals
from fedstrata.lab.datasets.fetch import FORMS, read
from fedstrata.support.lazy import extra

Arrays = dict[str, np.ndarray]

_IID = IID()
_BUNDLED = ("digits", "breast_cancer")


class Options(TypedDict, total=False):
    """Keyword arguments that all loaders take.

    Attributes:
        data_dir: The folder with the data files; only it is searched.
        valid_fraction: The part of each client's samples that becomes its validation set. Default 0.
        server_fraction: The part of all training samples that the server keeps. Default 0.
        limit: For quick runs: at most so many training and so many test samples, at random. Default all.
        dtype: The floating dtype of the features. Default float32.
    """

    data_dir: str | os.PathLike[str] | None
    valid_fraction: float
    server_fraction: float
    limit: int | None
    dtype: Any


class ImageOptions(Options, total=False):
    """Keyword arguments of the loaders of images, beside those of `Options`.

    Attributes:
        flat: Whether an image is a vector (default) or has the shape height × width × channels.
        normalize: `(mean, std)`, numbers or one per channel: pixels in [0, 1] become (x − mean)/std.
    """

    flat: bool
    normalize: tuple[Any, Any] | None


class SeriesOptions(Options, total=False):
    """Keyword arguments of the loaders of visit counts, beside those of `Options`.

    Attributes:
        test_fraction: The part of the nodes that is held out. Default 0.5, as in the paper.
        standardize: Whether every time has mean 0 and deviation 1 over the training nodes. Default True.
    """

    test_fraction: float
    standardize: bool


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Arrays:
    """A data set as plain arrays, as published: byte images, counts; only Adult's table is encoded.

    | name | arrays |
    |---|---|
    | digits, breast_cancer | `x`, `y` |
    | mnist, fashion_mnist, cifar10, cifar100 | `x_train`, `y_train`, `x_test`, `y_test` |
    | heart | `x` (NaN where a value is missing), `y`, `num`, `site`, `feature_names` |
    | dialysis, schools, indo_rct | the columns of the table, by name |
    | adult | the same, `group_train`, `sex_train`, `group_test`, `sex_test`, `feature_names` |
    | montevideo_bus | `visits` (stops × hours), `edges`, `weights`, `bus_stop`, `lon`, `lat` |
    | wikimaths | `visits` (pages × days), `edges`, `weights`, `page` |

    Args:
        name: The data set.
        data_dir: The folder with its files; only it is searched.

    Returns:
        Named arrays.

    Raises:
        DataError: If the name is unknown.
        DataNotFound: If its files are not there and cannot be fetched.
        CorruptData: If a file is damaged.

    >>> {name: array.shape for name, array in load("digits").items()}
    {'x': (1797, 8, 8), 'y': (1797,)}
    """
    if name == "heart":
        return hospitals.arrays()
    if name in _BUNDLED:
        with extra("lab", f"The data set {name}"):
            from sklearn import datasets  # a second of import time that most programs need not pay

        bunch = getattr(datasets, f"load_{name}")()
        features = bunch.images if name == "digits" else bunch.data
        return {"x": features, "y": bunch.target.astype(np.int32)}
    if name not in FORMS:
        raise DataError(f"Unknown data set {name!r}; there are {', '.join([*_BUNDLED, 'heart', *FORMS])}.")
    return read(name, data_dir)


def digits(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[ImageOptions]
) -> FederatedData:
    """Handwritten digits of 8×8 pixels: 1,797 in ten classes, a fifth of each class held out by `seed`.

    >>> data = digits(clients=20, seed=0)
    >>> data.clients, data.train["x"].shape, data.test["x"].shape
    (20, (1437, 64), (360, 64))
    """
    parts = _held_out(load("digits", options.pop("data_dir", None)), 0.2, seed)
    return _images(parts, 16, clients, partition, seed, **options)


def mnist(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[ImageOptions]
) -> FederatedData:
    """MNIST: handwritten digits of 28×28 pixels, 60,000 for training and 10,000 for the test."""
    parts = _parts(load("mnist", options.pop("data_dir", None)))
    return _images(parts, 255, clients, partition, seed, **options)


def fashion_mnist(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[ImageOptions]
) -> FederatedData:
    """Fashion-MNIST: ten kinds of clothes in 28×28 pixels, 60,000 for training and 10,000 for the test."""
    parts = _parts(load("fashion_mnist", options.pop("data_dir", None)))
    return _images(parts, 255, clients, partition, seed, **options)


def cifar10(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[ImageOptions]
) -> FederatedData:
    """CIFAR-10: ten kinds of objects in 32×32 colour pixels, 50,000 for training and 10,000 for the test."""
    parts = _parts(load("cifar10", options.pop("data_dir", None)))
    return _images(parts, 255, clients, partition, seed, **options)


def cifar100(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[ImageOptions]
) -> FederatedData:
    """CIFAR-100: the same in a hundred classes, 500 and 100 of each."""
    parts = _parts(load("cifar100", options.pop("data_dir", None)))
    return _images(parts, 255, clients, partition, seed, classes=100, **options)


def breast_cancer(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[Options]
) -> FederatedData:
    """The Wisconsin breast cancer table: 569 samples in two classes, a fifth of each held out by `seed`.

    The 30 features are standardised by the training part.
    """
    train, test = _held_out(load("breast_cancer", options.pop("data_dir", None)), 0.2, seed)
    train["x"], test["x"] = _standardized(train["x"], test["x"])
    return check_labels(_federate(train, test, clients, partition, seed, **options), 2)


def adult(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[Options]
) -> FederatedData:
    """Adult, the census of 1994: 108 features, label 1 for an income above 50,000 dollars.

    The six numeric columns are standardised and the eight categorical ones are one-hot, unknown values (`?`)
    being a category; all by the 32,561 training rows. A sample has two more entries, which `ByKey` can split
    by: `group` (race: 0 white, 1 black, 2 other) and `sex` (1 male, 0 female).
    """
    train, test = _parts(load("adult", options.pop("data_dir", None)))
    return check_labels(_federate(train, test, clients, partition, seed, **options), 2)


def montevideo_bus(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[SeriesOptions]
) -> FederatedData:
    """Passengers at 675 bus stops of Montevideo in the 744 hours of October 2020, as a regression.

    A sample is a stop: `x` its first 743 hours, `y` the last. Half of the stops are held out by `seed`, so
    that there are more features than training samples.
    """
    arrays = load("montevideo_bus", options.pop("data_dir", None))
    return _series(arrays, clients, partition, seed, **options)


def wikimaths(
    clients: int = 10, partition: Partitioner = _IID, seed: int = 0, **options: Unpack[SeriesOptions]
) -> FederatedData:
    """Visits of Wikipedia's 1,068 vital pages on mathematics in 731 days, as a regression.

    A sample is a page: `x` its first 730 days, `y` the last. Half of the pages are held out by `seed`, so
    that there are more features than training samples.
    """
    arrays = load("wikimaths", options.pop("data_dir", None))
    return _series(arrays, clients, partition, seed, **options)


def _parts(arrays: Arrays) -> tuple[Arrays, Arrays]:
    train, test = (
        {name.removesuffix(end): array for name, array in arrays.items() if name.endswith(end)}
        for end in ("_train", "_test")
    )
    return train, test


def _held_out(arrays: Arrays, fraction: float, seed: int, stratify: bool = True) -> tuple[Arrays, Arrays]:
    with extra("lab", "A held-out part"):
        from sklearn.model_selection import train_test_split

    indices = np.arange(len(arrays["y"]))
    classes = arrays["y"] if stratify else None
    train, test = train_test_split(indices, test_size=fraction, random_state=seed, stratify=classes)
    return _take(arrays, train), _take(arrays, test)


def _take(arrays: Arrays, chosen: np.ndarray) -> Arrays:
    return {name: array[chosen] for name, array in arrays.items()}


def _standardized(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, std = train.mean(axis=0), train.std(axis=0)
    std = np.where(std > 0, std, 1.0)
    return (train - mean) / std, (test - mean) / std


def _images(
    parts: tuple[Arrays, Arrays],
    white: int,
    clients: int,
    partition: Partitioner,
    seed: int,
    *,
    flat: bool = True,
    normalize: tuple[Any, Any] | None = None,
    limit: int | None = None,
    dtype: Any = np.float32,
    classes: int = 10,
    **options: Any,
) -> FederatedData:
    dtype = _floating(dtype)
    scale = None if normalize is None else _mean_and_std(normalize, dtype)

    def prepare(part: Arrays) -> Arrays:
        x = part["x"].astype(dtype)
        x = x[..., None] if x.ndim == 3 else x
        x /= white
        if scale is not None:
            x = (x - scale[0]) / scale[1]
        return {**part, "x": x.reshape(len(x), -1) if flat else x}

    # Sampling comes first: floats take four times the room of bytes.
    train, test = (prepare(_sample(part, limit, seed)) for part in parts)
    federated = _federate(train, test, clients, partition, seed, dtype=dtype, **options)
    return check_labels(federated, classes)


def _mean_and_std(normalize: tuple[Any, Any], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    try:
        mean, std = (np.asarray(part, dtype) for part in normalize)
    except (TypeError, ValueError) as error:
        raise DataError(f"normalize must be a pair (mean, std), got {normalize!r}.") from error
    if not (std > 0).all():
        raise DataError(f"normalize needs deviations > 0, got {normalize[1]!r}.")
    return mean, std


def _series(
    arrays: Arrays,
    clients: int,
    partition: Partitioner,
    seed: int,
    *,
    test_fraction: float = 0.5,
    standardize: bool = True,
    **options: Any,
) -> FederatedData:
    if not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, got {test_fraction!r}.")
    visits = arrays["visits"].astype(np.float64)
    table = {"x": visits[:, :-1], "y": visits[:, -1]}
    train, test = _held_out(table, test_fraction, seed, stratify=False)
    if standardize:
        for name in table:
            train[name], test[name] = _standardized(train[name], test[name])
    return _federate(train, test, clients, partition, seed, **options)


def _sample(arrays: Arrays, limit: int | None, seed: int) -> Arrays:
    if limit is None:
        return arrays
    if not isinstance(limit, int | np.integer) or limit < 1:
        raise DataError(f"limit must be a whole number ≥ 1 or None, got {limit!r}.")
    # A stream of its own: the split draws from default_rng(seed).
    order = np.random.default_rng((seed, 1)).permutation(len(arrays["y"]))
    return _take(arrays, order[:limit])


def _floating(dtype: Any) -> np.dtype:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise DataError(f"dtype must be a floating type such as float32, got {dtype!r}.")
    return np.dtype(dtype)


def _federate(
    train: Arrays,
    test: Arrays,
    clients: int,
    partition: Partitioner,
    seed: int,
    *,
    limit: int | None = None,
    dtype: Any = np.float32,
    **options: Any,
) -> FederatedData:
    dtype = _floating(dtype)

    def prepare(part: Arrays) -> Arrays:
        return {
            name: array if array.dtype.kind == "i" else array.astype(dtype, copy=False)
            for name, array in _sample(part, limit, seed).items()
        }

    return FederatedData.from_arrays(
        prepare(train), clients, partition, seed=seed, test=prepare(test), **options
    )
