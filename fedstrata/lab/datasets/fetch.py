"""Where data files are looked for: the user's folder, else a cache filled from the canonical source."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstrata.data.samples import CorruptData
from fedstrata.lab.datasets import formats
from fedstrata.support.lazy import extra

ENVIRONMENT = "FEDSTRATA_DATA"

_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_TEMPORAL = (
    "https://raw.githubusercontent.com/benedekrozemberczki/pytorch_geometric_temporal/"
    "fe555bc30ee197755c4b58a89407033a5f383415/dataset/"
)
_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


class DataNotFound(FileNotFoundError):
    """A data set is not on this machine and could not be fetched; the message says what to put where."""


class RemoteFile(NamedTuple):
    """Where a file comes from, and its published checksum (None where its publisher gives none)."""

    url: str
    checksum: str | None


class FileForm(NamedTuple):
    """One of the forms in which a data set may lie in a folder; the first with all its files is read."""

    files: tuple[str, ...]
    read: Callable[..., dict[str, np.ndarray]]
    remotes: tuple[RemoteFile, ...] = ()


# Natural federations that are not downloaded and do not come with the package: their collections are GPL.
TABLES = (
    ("dialysis", "dialysis.csv.gz", "012642dbae140f028ba9d2e617ecde74e925a6531a2ef5d955cd43fe4d687e21"),
    ("schools", "chem97.csv.gz", "b1e7e626fe1a2d24629eb40f0a85b159653118905c9905898d9f3e6db9cf6b70"),
    ("indo_rct", "indo_rct.csv.gz", "15fc26579dcace6eba721abd0c10e21bc59d9b3b96f54e3d2bad6017e5cce742"),
)

_MNIST = RemoteFile(
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    "sha256:731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
)
_SUMS = (
    "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "md5:25c81989df183df01b3e8a0aad5dffbe",
    "md5:bef4ecab320f06d8554ea6380940ec79",
    "md5:bb300cfdad3c16e7a12a480ee83cd310",
)
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-"
_CIFAR10 = RemoteFile(f"{_CIFAR}10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530")
_CIFAR100 = RemoteFile(f"{_CIFAR}100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8")
_ADULT = (
    RemoteFile(
        f"{_UCI}adult.data", "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"
    ),
    RemoteFile(
        f"{_UCI}adult.test", "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"
    ),
)
_BUS = RemoteFile(
    f"{_TEMPORAL}montevideo_bus.json",
    "sha256:37d9c6286d474077b5c05173c1570c4da42c387013116daa8862c7a6cab86a75",
)
_WIKI = RemoteFile(f"{_TEMPORAL}wikivital_mathematics.json", None)  # fixed by the commit in its address
_GRIDS = ("cifar10_labels.npz", "cifar10_test.webp", *(f"cifar10_train{i}.webp" for i in range(1, 6)))

FORMS: dict[str, tuple[FileForm, ...]] = {
    "mnist": (
        FileForm(("mnist.npz",), formats.read_image_npz, (_MNIST,)),
        FileForm(tuple(f"mnist/{name}" for name in _IDX), formats.read_idx),
    ),
    "fashion_mnist": (
        FileForm(("fashion_mnist.npz",), formats.read_image_npz),
        FileForm(
            tuple(f"fashion_mnist/{name}" for name in _IDX),
            formats.read_idx,
            tuple(RemoteFile(_FASHION + name, digest) for name, digest in zip(_IDX, _SUMS, strict=True)),
        ),
    ),
    "cifar10": (
        FileForm(_GRIDS, formats.read_cifar_grids),
        FileForm(("cifar-10-binary.tar.gz",), formats.read_cifar_binary, (_CIFAR10,)),
    ),
    "cifar100": (FileForm(("cifar-100-binary.tar.gz",), formats.read_cifar100_binary, (_CIFAR100,)),),
    "adult": (
        FileForm(("adult.csv.gz",), formats.read_adult_csv),
        FileForm(("adult.data", "adult.test"), formats.read_adult_uci, _ADULT),
    ),
    "montevideo_bus": (
        FileForm(("montevideo_bus.npz",), formats.read_bus_npz),
        FileForm(("montevideo_bus.json",), formats.read_bus_json, (_BUS,)),
    ),
    "wikimaths": (FileForm(("wikivital_mathematics.json",), formats.read_wikimaths_json, (_WIKI,)),),
    **{name: (FileForm((file,), partial(formats.read_table, digest)),) for name, file, digest in TABLES},
}


def read(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, np.ndarray]:
    """Finds the files of a data set and reads them.

    If `data_dir` is given, only that folder is searched. Otherwise the folder that the environment variable
    FEDSTRATA_DATA names, then the cache, into which a missing file is downloaded from its canonical source.

    Args:
        name: A key of `FORMS`.
        data_dir: The folder to look in.

    Returns:
        Named arrays.

    Raises:
        DataNotFound: If the files are nowhere.
        CorruptData: If a file is damaged or not what it should be.
    """
    folder = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT) or None
    if folder is not None:
        for form in FORMS[name]:
            paths = [Path(folder) / file for file in form.files]
            if all(path.is_file() for path in paths):
                return form.read(*paths)
        if data_dir is not None:
            raise DataNotFound(_not_found(name, f"It is not in {Path(data_dir).absolute()}."))
    if not any(form.remotes for form in FORMS[name]):
        raise DataNotFound(_not_found(name, "It cannot be downloaded."))
    form = next(form for form in FORMS[name] if form.remotes)
    return form.read(*(_download(name, *pair) for pair in zip(form.files, form.remotes, strict=True)))


def _download(name: str, file: str, remote: RemoteFile) -> Path:
    with extra("lab", "A data set from elsewhere"):
        import pooch

    cache = Path(pooch.os_cache("fedstrata"))
    target = cache / file
    try:
        found = pooch.retrieve(remote.url, remote.checksum, fname=target.name, path=target.parent)
    except ValueError as error:  # pooch's answer to a wrong checksum
        raise CorruptData(f"What {remote.url} sends is not the published {target.name}: {error}") from error
    except OSError as error:  # no network, no such page, no room, no permission
        reason = f"It is not in the cache ({cache}), and {remote.url} could not be fetched: {error}"
        raise DataNotFound(_not_found(name, reason)) from error
    return Path(found)


def _not_found(name: str, reason: str) -> str:
    choices = "\n".join(f"  - {', '.join(form.files)}" for form in FORMS[name])
    words = (
        f"The data set {name!r} was not found. {reason}\n"
        f"Put one of these into a folder, and give the folder as data_dir or in {ENVIRONMENT}:\n{choices}\n"
    )
    origin = next((form for form in FORMS[name] if form.remotes), None)
    if origin is None:
        return f"{words}docs/data.md says where it comes from."
    sources = "\n".join(f"  {remote.url}" for remote in origin.remotes)
    return f"{words}The form {', '.join(origin.files)} comes from\n{sources}"
