"""Fingerprints of data, functions and points, the same in every process.

A fingerprint is a digest of content, never of an address or a path:

    arrays        dtype, shape and bytes
    functions     their code and constants, defaults, what they close over, and the globals that they name:
                  helper functions, numbers, arrays. Names of variables, line numbers and docstrings do not
                  count.
    objects       their class and what they hold
    all of JAX, NumPy, optax, FedStrata and the standard library: the name, and what it closes over

What cannot be looked into (a lock, an open file) counts by the name of its class. Whoever knows better names
an object: whatever has a string as its attribute ``fingerprint`` is known by that alone.

>>> def loss(x, sample):
...     return (x - sample["a"]) ** 2
>>> loss.fingerprint = "squares, version 1"
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.functions import (
    cells_of,
    globals_of,
    is_known,
    numbers_written,
    writes,
)
from fedstrata.support.digest import array_digest

CALLBACKS = {"pure_callback", "io_callback"}  # by which a compiled program calls one of the user's


def fingerprint(value: Any) -> str:
    """The digest of anything; see the module.

    >>> fingerprint(np.ones(3)) == fingerprint(np.ones(3))
    True
    >>> fingerprint(lambda x: 2 * x) == fingerprint(lambda x: 3 * x)
    False
    """
    return _Walk().digest(value).hex()[:24]


def sure_fingerprint(value: Any) -> str | None:
    """The same, or None where something in it was not looked into: then equality would be a guess.

    >>> import threading
    >>> sure_fingerprint((1, threading.Lock())) is None
    True
    """
    try:
        return _Walk(sure=True).digest(value).hex()[:24]
    except _Unsure:
        return None


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that its user gave."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


class _Unsure(Exception):
    """Something was not looked into."""


class _Walk:
    """Digests of objects and of what they hold; each object is looked at once."""

    def __init__(self, sure: bool = False) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}  # with the object, so that no other gets its number
        self.open: set[int] = set()
        self.sure = sure  # whether to give up where something cannot be looked into

    def digest(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool | int | str | bytes | complex | type(Ellipsis)):
            return _hash("plain", type(value).__name__, repr(value))
        if isinstance(value, float):
            return _hash("plain", "float", value.hex())
        if id(value) in self.known:
            return self.known[id(value)][1]
        if id(value) in self.open:  # a function that calls itself, an object that holds its owner
            return _hash("cycle")
        self.open.add(id(value))
        try:
            found = self._look(value)
        finally:
            self.open.discard(id(value))
        self.known[id(value)] = value, found
        return found

    def _look(self, value: Any) -> bytes:
        given = None if isinstance(value, type) else inspect.getattr_static(value, "fingerprint", None)
        if isinstance(given, property | functools.cached_property):
            given = value.fingerprint
        if isinstance(given, str):  # looked up without __getattr__, which may do anything
            return _hash("named", given)
        match value:
            case jax.Array() | np.ndarray() | np.generic():
                return self._array(value)
            case CodeType():
                return self._code(value)
            case FunctionType():
                return self._function(value)
            case MethodType():
                return self._all("method", value.__func__, value.__self__)
            case functools.partial():
                return self._all("partial", value.func, value.args, value.keywords)
            case staticmethod() | classmethod():
                return self._all(type(value).__name__, value.__func__)
            case property():
                return self._all("property", value.fget, value.fset)
            case BuiltinFunctionType() | np.ufunc() | np.dtype() | ModuleType():
                self._unsure(isinstance(value, ModuleType) and not is_known(value.__name__))
                return _hash("name", _name(value))
            case type():
                return self._class(value)
            case enum.Enum():
                return _hash("enum", _name(type(value)), value.name)
            case list() | tuple():
                return self._all("list", type(value), *value)
            case Mapping():
                items = sorted(self.digest(k) + self.digest(v) for k, v in value.items())
                return _hash("mapping", self.digest(type(value)), *items)
            case set() | frozenset():
                return _hash("set", *sorted(map(self.digest, value)))
        return self._object(value)

    def _unsure(self, here: bool) -> None:
        if self.sure and here:
            raise _Unsure

    def _all(self, kind: str, *parts: Any) -> bytes:
        return _hash(kind, *map(self.digest, parts))

    def _array(self, value: Any) -> bytes:
        if isinstance(value, jax.core.Tracer):
            self._unsure(True)
            return _hash("name", "a traced array")
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self._all("objects", array.shape, array.tolist())
        return array_digest(array)

    def _code(self, code: CodeType, doc: str | None = None) -> bytes:
        """What is executed: neither where it stands nor how its variables are called."""
        self._unsure(not CALLBACKS.isdisjoint(code.co_names))
        consts: list[Any] = list(code.co_consts)
        if doc is not None and consts and consts[0] == doc:
            consts[0] = None
        flags = code.co_flags & ~inspect.CO_NESTED  # where it stands
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags)
        return self._all(
            "code", code.co_code, code.co_names, consts, shape, getattr(code, "co_exceptiontable", b"")
        )

    def _function(self, function: FunctionType) -> bytes:
        cells = dict(cells_of(function))
        # What it does may depend on what it did, or on what was hung on it.
        self._unsure(bool(vars(function).keys() - {"__wrapped__"}) or writes(function))
        module = function.__globals__.get("__name__") or ""  # wrappers take the name of what they wrap
        if is_known(module):
            name = f"{module}.{function.__code__.co_qualname}"
            # two functions without names of their own may stand in one of ours, or in one factory
            unnamed = module.startswith("fedstrata") or "<lambda>" in name
            code = self.digest(function.__code__) if unnamed else b""
            cells |= dict(numbers_written(function))
            return _hash("known", name, code, self.digest(function.__defaults__), *self._items(cells))
        return _hash(
            "function",
            self._code(function.__code__, function.__doc__),
            self.digest(function.__defaults__),
            self.digest(function.__kwdefaults__),
            *self._items(cells),
            *self._items(dict(globals_of(function))),
        )

    def _items(self, values: Mapping[str, Any]) -> Iterator[bytes]:
        for name in sorted(values):
            yield _hash("item", name, self.digest(values[name]))

    def _class(self, cls: type) -> bytes:
        if is_known(cls.__module__):
            return _hash("name", _name(cls))
        own = {name: value for name, value in vars(cls).items() if _is_definition(name, value)}
        self._unsure(any(name not in own and not name.startswith("__") for name in vars(cls)))
        return _hash("class", cls.__qualname__, *map(self.digest, cls.__bases__), *self._items(own))

    def _object(self, value: Any) -> bytes:
        """By its class and what it holds: fields, a wrapped function, numbers, else its state."""
        cls = self.digest(type(value))
        if dataclasses.is_dataclass(value):
            return _hash("dataclass", cls, *self._items(fields_of(value)))
        if callable(getattr(value, "__wrapped__", None)):  # jitted, cached, with derivatives of its own
            rules = (getattr(value, name, None) for name in ("jvp", "fwd", "bwd"))
            return self._all("wrapped", value.__wrapped__, *(rule for rule in rules if callable(rule)))
        try:
            if hasattr(value, "detach"):  # a tensor of PyTorch's
                return _hash("tensor", array_digest(value.detach().cpu().numpy()))
            if hasattr(value, "__array__"):
                return _hash("array", cls, self.digest(np.asarray(value)))
            reduced = value.__reduce_ex__(2)
        except Exception:  # it cannot be looked into
            self._unsure(True)
            return _hash("name", cls)
        if isinstance(reduced, str):
            return _hash("name", cls, reduced)
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        return _hash("object", cls, *map(self.digest, parts))


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _name(value: Any) -> str:
    if isinstance(value, np.dtype):
        return value.str
    module = getattr(value, "__module__", None) or ""
    own = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{module}.{own}"


def _is_definition(name: str, value: Any) -> bool:
    """Whether a class's attribute says what its objects do, in place of what Python keeps with a class."""
    dunder = name.startswith("__") and name.endswith("__")
    if isinstance(value, FunctionType | staticmethod | classmethod | property):
        return True
    return not dunder and isinstance(value, bool | int | float | str | bytes | tuple | None)
