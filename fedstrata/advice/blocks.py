"""The block sizes of measurements: as many samples and clients at once as a bound on the memory allows.

The forward pass of one sample is traced. Values that depend on the sample are kept for each sample that is
evaluated at once, and a few times by derivatives. If all samples fit, they are evaluated in one `vmap`; else
in tiles, whose forward passes are repeated for derivatives.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from fedstrata.core.client import Client, opened
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, PyTree
from fedstrata.data.storage import Placed, free_bytes

ROOM = 2**28  # bytes of a measurement's temporaries on a device that does not report its free memory
DERIVATIVES = 8  # arrays of the size of each one of a forward pass, in a product with a Hessian
SURELY = 2**16  # total size of samples and arguments up to which nothing is checked


class Cost(NamedTuple):
    """The operations of the forward pass at one sample, and the bytes of values that depend on the sample."""

    operations: int
    bytes: int


def room() -> int:
    """The bytes for a measurement: a quarter of the device's free memory."""
    return max((free_bytes() or 0) // 4, ROOM)


def cost_of(function: Function, sample: PyTree, *args: PyTree) -> Cost:
    """The cost of a function at a sample; only the sample's shape matters."""
    jaxpr = jax.make_jaxpr(lambda sample: Term.of(function)(*args, opened(sample)))(sample).jaxpr
    of_sample, size = set(jaxpr.invars), 0
    for eqn in jaxpr.eqns:
        if any(not hasattr(v, "val") and v in of_sample for v in eqn.invars):
            of_sample.update(eqn.outvars)
            size += _counted(eqn, _bytes)
    return Cost(sum(_counted(eqn, _operations) for eqn in jaxpr.eqns), size)


def at_once(function: Function, data: Placed, part: str, *args: PyTree, bytes_each: int = 0) -> int | None:
    """The number of samples of all clients that are evaluated at once; None is all.

    Args:
        function: a function of the arguments and a sample.
        data: the samples.
        part: ``"train"`` or ``"valid"``.
        args: the arguments before the sample; only shapes matter.
        bytes_each: the bytes that are kept for a sample besides.
    """
    term, leaves = Term.of(function), data.part(part).leaves
    rows, numbers = _rows(data, part), sum(map(_size, jax.tree.leaves(args)))
    if term.reads == "nothing" or rows * (numbers + sum(map(_size, jax.tree.leaves(leaves))) / rows) < SURELY:
        return None
    if term.reads == "batch":
        return None
    sample = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), leaves)
    tile = max(room() // (DERIVATIVES * (cost_of(term, sample, *args).bytes + bytes_each) + 1), 1)
    return None if tile >= rows else tile


def block_of(data: Placed, part: str, tile: int | None, bytes_each: int = 0) -> int | None:
    """The number of clients that are evaluated at once, if each keeps these bytes besides; None is all."""
    most = data.clients if tile is None else tile // _capacity(data, part)
    block = max(min(most, room() // max(bytes_each, 1)), 1)
    return None if block >= data.clients else block


def _rows(data: Placed, part: str) -> int:
    """The samples that a pass over the clients evaluates, padding included."""
    return max(data.clients * _capacity(data, part), jax.tree.leaves(data.part(part).leaves)[0].shape[0])


def _capacity(data: Placed, part: str) -> int:
    return max(data.largest.valid if part == "valid" and data.validation else data.largest.train, 1)


def mean_of(client: Client, function: Function, *args: PyTree, part: str, tile: int | None) -> Any:
    """The mean over a client's samples, in blocks."""
    oracle = vars(client)[part].full_mean(function)
    return oracle.term.over(oracle.samples, oracle.weights, *args, at_once=tile)


def client_means(
    data: Placed, function: Function, *args: PyTree, part: str = "train", each: PyTree = None
) -> Array:
    """The mean over each client's samples, stacked; ``each`` is each client's own last argument."""
    rest = () if each is None else (each,)
    tile = at_once(function, data, part, *args, *jax.tree.map(lambda leaf: leaf[0], rest))

    def value(client: Client, *rest: PyTree) -> Any:
        return mean_of(client, function, *args, *rest, part=part, tile=tile)

    return data.each_client(value, *rest, block=block_of(data, part, tile))


def _size(leaf: Any) -> int:
    return math.prod(jax.numpy.shape(leaf))


def _bytes(eqn: Any) -> int:
    return sum(_size(v.aval) * getattr(getattr(v.aval, "dtype", None), "itemsize", 4) for v in eqn.outvars)


def _operations(eqn: Any) -> int:
    out = sum(_size(v.aval) for v in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        window = eqn.invars[1].aval.shape
        return 2 * out * math.prod(window) // window[eqn.params["dimension_numbers"].rhs_spec[0]]
    return out


def _counted(eqn: Any, measure: Any) -> int:
    """The operations of an equation, or of those that it calls, times the turns of a loop if known."""
    inner = [part for value in eqn.params.values() for part in _jaxprs(value)]
    if not inner:
        return int(measure(eqn))
    total = sum(_counted(each, measure) for jaxpr in inner for each in jaxpr.eqns)
    return total * eqn.params.get("length", 1)


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [jaxpr for each in value for jaxpr in _jaxprs(each)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
