"""Check users' samples: arrays that fit together, or an error that names the client and the array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from fedstrata.core.types import PyTree

_OURS = {dict, tuple, list, np.ndarray}  # a client's samples, nearly always


class DataError(ValueError):
    """The data cannot be used as given; the message says which client, which array and what to do."""


class CorruptData(DataError):
    """A data file is damaged, truncated or of another format; the message names it."""


def by_name(samples: PyTree) -> dict[str, Any]:
    """Arrays by name; empty if the samples are not a dict."""
    return samples if isinstance(samples, dict) else {}


def array_of(leaf: Any, name: str) -> np.ndarray:
    """Convert a leaf to a plain array with a sample axis, or raise."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose mask would be lost. Fill or drop masked entries.")
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # a PyTorch tensor, wherever it is
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(getattr(leaf, "dtype", "")) else leaf
    if hasattr(leaf, "toarray"):
        raise DataError(f"{name} is a sparse matrix. Give it as an array, matrix.toarray().")
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise DataError(f"{name} has rows of different lengths: {error}") from error
    if array.dtype.kind in "OSUMm":
        raise DataError(f"{name} is not a plain array (dtype {array.dtype}). Convert it to numbers first.")
    if array.ndim == 0:
        raise DataError(f"{name} is a scalar. Arrays have the samples on their first axis: use shape (1, …).")
    return array


def finite(array: np.ndarray) -> bool:
    """Whether all entries are finite; the sum shows it without a second array."""
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum(dtype=array.dtype))) or bool(np.isfinite(array).all())


def length_of(data: PyTree, who: str) -> int:
    """The common length of the sample axis; errors for empty, ragged or non-finite arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise DataError(f"{who} has no arrays. Give each client a pytree of arrays, e.g. {{'x': …, 'y': …}}.")
    lengths = {}
    for path, leaf in leaves:
        name = f"{who}{jax.tree_util.keystr(path)}"
        array = array_of(leaf, name)
        if not finite(array):
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise DataError(
                f"{name} has a NaN or an infinity, first in sample {row}. Drop such samples, or put means in "
                "the place of missing values: fs.data.standardize(clients, impute='mean')."
            )
        lengths[name] = array.shape[0]
    if len(set(lengths.values())) > 1:
        raise DataError(f"Arrays differ in their number of samples: {lengths}.")
    length = next(iter(lengths.values()))
    if length == 0:
        raise DataError(
            f"{who} is empty. Drop clients without samples, or use a partition with a minimum size."
        )
    return length


def held(data: PyTree, who: str) -> PyTree:
    """Read-only arrays: a copy of them may be on a device already."""

    def one(path: Any, leaf: Any) -> np.ndarray:
        array = array_of(leaf, f"{who}{jax.tree_util.keystr(path)}")
        array = array.view()
        array.flags.writeable = False
        return array

    return jax.tree_util.tree_map_with_path(one, data)


def sizes_of(sizes: Any, samples: int, name: str) -> np.ndarray:
    """Check the clients' sizes, which must add up to the samples."""
    found = np.asarray(sizes)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found < 1).any():
        raise DataError(f"The sizes of {name} must be a list of whole numbers ≥ 1, but are {sizes!r}.")
    if found.sum() != samples:
        raise DataError(
            f"The sizes of {name} add up to {found.sum()}, but its arrays have {samples} samples. "
            "They hold all clients' samples, one client after the other."
        )
    return found.astype(np.int32)


def flattened(clients: Sequence[PyTree], what: str) -> tuple[PyTree, np.ndarray]:
    """All clients' samples one after the other, and their sizes.

    Whole columns are checked at once: a hundred thousand clients take a fraction of a second. Only if
    something is wrong is each client checked by itself, to name it.
    """
    if pooled := by_name(clients):
        hint = "Pooled arrays are split by fs.FederatedData.from_arrays({'x': …, 'y': …}, clients=…)."
        if all(map(by_name, pooled.values())):
            hint = "Give list(clients.values())."
        raise DataError(
            f"Give a list with one pytree of arrays per client; this is one dict, {list(pooled)[:5]}. {hint}"
        )
    if _is_dataset(clients):
        raise DataError(
            f"Give a list with one pytree of arrays per {what}; this is one {type(clients).__name__}. Pooled "
            "samples are split by fs.FederatedData.from_arrays(samples, clients=…)."
        )
    if not isinstance(clients, Iterable):
        raise DataError(f"Give a list with one pytree of arrays per {what}, but it is {clients!r}.")
    clients = list(clients)
    if not clients:
        raise DataError(f"The list of {what}s is empty. Give a list with one pytree of arrays per client.")
    # Another library's container must not be iterated sample by sample, so it is converted first.
    clients = [c if type(c) in _OURS else unwrapped(c, f"{what} {i}") for i, c in enumerate(clients)]
    if (found := _joined(clients, what)) is None:
        clients = [unwrapped(client, f"{what} {i}") for i, client in enumerate(clients)]
        found = _joined(clients, what) or _blame(clients, what)
    return found


def _joined(clients: Sequence[PyTree], what: str) -> tuple[PyTree, np.ndarray] | None:
    """Like `flattened`, or None if something does not fit. Dtypes are promoted to a common one."""
    structure: Any = jax.tree.structure(clients[0])
    try:
        columns = list(zip(*(structure.flatten_up_to(client) for client in clients), strict=True))
        arrays = [[leaf if type(leaf) is np.ndarray else array_of(leaf, what) for leaf in c] for c in columns]
        shapes = [{a.shape[1:] for a in column} for column in arrays]
        lengths = [np.fromiter((a.shape[0] for a in column), np.int64, len(column)) for column in arrays]
        plain = all(len(shape) == 1 for shape in shapes)
        plain = plain and not any(a.dtype.kind in "OSUMm" for column in arrays for a in column)
        good = plain and all((n == lengths[0]).all() for n in lengths[1:]) and bool((lengths[0] > 0).all())
        flat = [np.concatenate(column) for column in arrays] if good else []
        good = good and bool(flat) and all(map(finite, flat))
    except (DataError, ValueError, IndexError, TypeError):
        good = False
    return (jax.tree.unflatten(structure, flat), lengths[0].astype(np.int32)) if good else None


def unwrapped(client: Any, who: str) -> PyTree:
    """Convert another library's container to a pytree of arrays, or raise with the line to write."""
    if hasattr(client, "with_format") and hasattr(client, "column_names"):
        raise DataError(
            f"{who} is a Hugging Face dataset. Give its arrays: dict(ds.with_format('numpy')[:])."
        )
    if hasattr(client, "columns") and hasattr(client, "shape"):
        raise DataError(
            f"{who} is a data frame. Give the frames to fs.FederatedData.from_dataframe(frames, label=…)."
        )
    match client:
        case object(tensors=[x, y]):  # PyTorch's TensorDataset
            client = {"x": x, "y": y}
        case object(tensors=tuple() as tensors):
            raise DataError(
                f"{who} is a TensorDataset of {len(tensors)} tensors. Name them: "
                "{'x': ds.tensors[0], 'y': ds.tensors[1], …}."
            )
        case {"data": np.ndarray() as x, "target": y}:  # scikit-learn's Bunch
            client = {"x": x, "y": y}
        case {"data": _, "target": _}:
            raise DataError(f"{who} is a Bunch of data frames. Load it with as_frame=False.")
        case object(dataset=whole, indices=chosen):  # PyTorch's Subset, as of random_split
            return {name: array[np.asarray(chosen)] for name, array in unwrapped(whole, who).items()}
        case object(dataset=_, batch_sampler=_):
            raise DataError(f"{who} is a DataLoader; batches are drawn by the method. Give its dataset.")
        case _ if _is_dataset(client):
            raise DataError(
                f"{who} is a PyTorch dataset, which is read sample by sample. Stack it once: "
                "{'x': np.stack([u for u, _ in ds]), 'y': np.array([v for _, v in ds])}."
            )
    if named := by_name(client):
        return {name: array_of(v, f"{who}[{name!r}]") if _numbers(v) else v for name, v in named.items()}
    return client


def _is_dataset(value: Any) -> bool:
    """Whether it is a PyTorch or Hugging Face dataset; neither is imported for it."""
    return hasattr(value, "with_format") or any(
        cls.__module__.startswith("torch.utils.data") for cls in type(value).__mro__
    )


def _numbers(value: Any) -> bool:
    """Whether it is a list of numbers, or of lists of them."""
    match value:
        case list() if value:
            return all(isinstance(v, int | float) or _numbers(v) for v in value)
    return False


def _blame(clients: Sequence[PyTree], what: str) -> NoReturn:
    """Name the first client that does not fit, and why."""
    for i, data in enumerate(clients):
        length_of(data, f"{what} {i}")
    structure: Any = jax.tree.structure(clients[0])
    first = _signature(clients[0])
    for i, data in enumerate(clients):
        found = _signature(data)
        if found.keys() != first.keys() or jax.tree.structure(data) != structure:
            raise DataError(
                f"{what} {i} has the arrays {', '.join(found)}, {what} 0 has {', '.join(first)}. "
                "All clients must have the same arrays."
            )
        for name, (dtype, shape) in found.items():
            if shape != first[name][1]:
                other, form = first[name]
                raise DataError(
                    f"{what} {i}: {name} is {dtype} {shape}, {what} 0's is {other} {form}. "
                    "A sample must have the same dtype and shape at all clients."
                )
    raise DataError(f"The {what}s' arrays do not fit together.")


def _signature(data: PyTree) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape of one sample, by name of the array."""

    def name(path: Any) -> str:
        return repr(jax.tree_util.keystr(path, simple=True, separator=".")) if path else "the array"

    arrays = ((name(path), array_of(leaf, "")) for path, leaf in jax.tree_util.tree_leaves_with_path(data))
    return {key: (array.dtype, array.shape[1:]) for key, array in arrays}
