"""The wire format: a versioned header of plain values, and arrays. No pickle, no code, bounded in size.

    4 bytes    b"FSN" and the version of the protocol
    4 bytes    length of the header, little-endian
    header     JSON: one object of plain values; "arrays" gives each array as [code of its dtype, *shape]
    arrays     little-endian bytes, each array at a multiple of 8

A message is checked before it is used: an array is a view of the message, never more than its bytes, and any
fault raises `WireError`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

VERSION = 4
MAGIC = b"FSN" + bytes([VERSION])
LIMIT = 2**28  # bytes of a message, by default
HEADER_LIMIT = 2**16
DEEPEST = 5  # levels of nesting in a header

Header = dict[str, Any]
Arrays = list[np.ndarray]
Buffer = bytes | memoryview

_NAMES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip
_SHORT = {"bf2": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_OTHERS = {code: np.dtype(dtype) for code, dtype in _SHORT.items()}
DTYPES = {name: np.dtype(name) for name in _NAMES} | {dtype.name: dtype for dtype in _OTHERS.values()}
CODES = {np.dtype(name).str[1:]: np.dtype(name) for name in _NAMES} | _OTHERS  # f4, i8, b1, …
_CODE_OF = {dtype: code for code, dtype in CODES.items()}


class WireError(ValueError):
    """A message that cannot be read: damaged, too large, of another version, or not FedStrata's."""


def pack(header: Header, arrays: Arrays, limit: int = LIMIT) -> bytes:
    """A message as bytes.

    Raises:
        WireError: see `parts`.
    """
    return b"".join(parts(header, arrays, limit))


def parts(header: Header, arrays: Arrays, limit: int = LIMIT) -> list[Buffer]:
    """A message's bytes before they are joined: arrays are not copied.

    Raises:
        WireError: if it would be larger than ``limit``, or an array has a dtype that does not travel.
    """
    arrays = [np.require(array, requirements="C") for array in arrays]
    if strange := [str(array.dtype) for array in arrays if array.dtype not in _CODE_OF]:
        raise WireError(f"An array of dtype {strange[0]} cannot be sent; supported are {', '.join(DTYPES)}.")
    form = [[_CODE_OF[array.dtype], *array.shape] for array in arrays]
    head = json.dumps({**header, "arrays": form}, separators=(",", ":"), allow_nan=False).encode()
    head += b" " * (-len(head) % 8)  # so that arrays begin at multiples of eight: views need no copies
    size = 8 + len(head) + sum(_padded(array.nbytes) for array in arrays)
    if size > limit or len(head) > HEADER_LIMIT:
        raise WireError(
            f"The message has {size} bytes (header {len(head)}), but the limit is {limit} "
            f"({HEADER_LIMIT}). Raise the limit at every party, or send less."
        )
    found: list[Buffer] = [MAGIC + struct.pack("<I", len(head)) + head]
    for array in arrays:
        found += [array.reshape(-1).view(np.uint8).data, bytes(-array.nbytes % 8)]
    return found


def unpack(message: bytes, limit: int = LIMIT) -> tuple[Header, Arrays]:
    """The inverse of `pack`; the arrays are read-only views of ``message``.

    Raises:
        WireError: for anything that `pack` would not have written.
    """
    if len(message) > limit:
        raise WireError(f"The message has {len(message)} bytes, but the limit is {limit}.")
    if len(message) < 8 or message[:3] != MAGIC[:3]:
        raise WireError("The bytes are not a message of FedStrata.")
    if message[3] != VERSION:
        raise WireError(f"The message has protocol version {message[3]}, but this is version {VERSION}.")
    (length,) = struct.unpack_from("<I", message, 4)
    # Checked before it is used: a peer may send any length.
    if length > HEADER_LIMIT or 8 + length > len(message):
        raise WireError("The message is shorter than its header says, or the header is too long.")
    try:
        header = json.loads(message[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise WireError("The header is not JSON.") from error
    if not isinstance(header, dict) or not _plain(header, DEEPEST):
        raise WireError("The header must be an object of plain values.")
    return header, _arrays(header.pop("arrays", None), message, 8 + length)


def said(words: object) -> str:
    """A peer's words on one line of a log: they cannot look like another line, or colour one."""
    return "".join(c if c.isprintable() else "�" for c in str(words)[:500])


def value(header: Header, name: str, kind: type) -> Any:
    """An entry of a header, which must exist and be of this kind.

    Raises:
        WireError: if it is not.
    """
    found = header.get(name)
    if not _is(found, kind):
        raise WireError(f"The header's entry {name!r} is missing, or not of type {kind.__name__}.")
    return found


def values(header: Header, name: str, kinds: Sequence[type]) -> list[Any]:
    """An entry of a header that is a list of this many values, of these kinds.

    Raises:
        WireError: if it is not.
    """
    found = value(header, name, list)
    if len(found) != len(kinds) or not all(map(_is, found, kinds)):
        words = ", ".join(kind.__name__ for kind in kinds)
        raise WireError(f"The header's entry {name!r} is not a list of {words}.")
    return list(found)


def numbers(header: Header, name: str) -> list[int]:
    """An entry of a header that is a list of a few whole numbers, at least one.

    Raises:
        WireError: if it is not.
    """
    found = value(header, name, list)
    if not 1 <= len(found) <= 8 or not all(type(n) is int and 0 <= n < 2**63 for n in found):
        raise WireError(f"The header's entry {name!r} is not a list of a few numbers.")
    return list(found)


def _is(entry: Any, kind: type) -> bool:
    return isinstance(entry, kind) and (kind is bool or not isinstance(entry, bool))


def _arrays(form: Any, message: bytes, at: int) -> Arrays:
    if not isinstance(form, list):
        raise WireError("The header does not describe the arrays.")
    arrays = []
    for entry in form:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise WireError("The header describes an array incorrectly.")
        code, *shape = entry
        if code not in CODES or len(shape) > 32:
            raise WireError("The dtype or the shape of an array is not allowed.")
        if not all(type(n) is int and 0 <= n <= len(message) for n in shape):
            raise WireError("The shape of an array is not allowed.")
        dtype, count = CODES[code], math.prod(shape)
        if at + count * dtype.itemsize > len(message):
            raise WireError("The message is shorter than its header says.")
        raw = np.frombuffer(message, np.uint8, count * dtype.itemsize, at)
        try:
            arrays.append(raw.view(dtype).reshape(shape))
        except ValueError as error:  # a shape with a zero and more entries than an index can have
            raise WireError("The shape of an array is not allowed.") from error
        if dtype.kind == "b" and (raw > 1).any():
            raise WireError("An array of booleans has entries other than 0 and 1.")
        at += _padded(count * dtype.itemsize)
    if at != len(message):
        raise WireError("The message is longer than its header says.")
    return arrays


def _padded(size: int) -> int:
    return size + -size % 8


def _plain(entry: Any, depth: int) -> bool:
    if isinstance(entry, dict | list):
        inner = entry.values() if isinstance(entry, dict) else entry
        return depth > 0 and all(_plain(one, depth - 1) for one in inner)
    if isinstance(entry, float):
        return math.isfinite(entry)
    return True
