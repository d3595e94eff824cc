"""What tells one run from another: fingerprints of data, functions and points, the same in every process.

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
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.digest import array_digest, tree_digest
from fedstrata.core.functions import cells_of, globals_of, is_known
from fedstrata.core.types import PyTree


def fingerprint(value: Any) -> str:
    """The digest of anything; see the module.

    >>> fingerprint(np.ones(3)) == fingerprint(np.ones(3))
    True
    >>> fingerprint(lambda x: 2 * x) == fingerprint(lambda x: 3 * x)
    False
    """
    return _Walk().digest(value).hex()[:24]


def described(value: Any) -> Any:
    """A plain value as it is, for people to read; anything else as its kind and its fingerprint."""
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"function {fingerprint(value)}"
    leaves = jax.tree.leaves(value)
    arrays = bool(leaves) and all(isinstance(leaf, np.ndarray | np.generic | jax.Array) for leaf in leaves)
    return f"{'contents' if arrays else 'object'} {fingerprint(value)}"


_WORDS = {"function": "another function", "contents": "other contents", "object": "another object"}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    found = []
    for key in dict.fromkeys([*here, *there]):
        if key not in there or key not in here:
            found.append(f"{key}: only {'here' if key in here else 'there'}")
        elif there[key] != here[key]:
            kinds = [str(value).partition(" ")[0] for value in (there[key], here[key])]
            alike = kinds[0] == kinds[1] and kinds[0] in _WORDS
            found.append(
                f"{key}: {_WORDS[kinds[0]]}" if alike else f"{key}: {there[key]!r} there, {here[key]!r} here"
            )
    return found


def readable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that holds plain values, no fingerprints."""
    return {key: value for key, value in identity.items() if str(value).partition(" ")[0] not in _WORDS}


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that its user gave."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def identity_of(
    problem: Any, methods: Sequence[Any], datasets: Sequence[Any], x0: PyTree, y0: PyTree, metrics: Any
) -> dict[str, Any]:
    """What is solved, by what, on what and from where, as plain values."""
    found: dict[str, Any] = {"problem": type(problem).__name__}
    if not is_known(type(problem).__module__):
        found["problem"] = f"object {fingerprint(type(problem))}"
    found |= {name: described(value) for name, value in fields_of(problem).items()}
    for b, method in enumerate(methods):
        name = "method" if len(methods) == 1 else f"methods[{b}]"
        found[name] = type(method).__name__
        found |= {f"{name}.{key}": described(value) for key, value in fields_of(method).items()}
    found["data"] = " ".join(["contents", *dict.fromkeys(data.fingerprint for data in datasets)])
    found |= {"x0": f"contents {tree_digest(x0)}", "y0": f"contents {tree_digest(y0)}"}
    return found | {f"metrics[{name!r}]": described(metric) for name, metric in dict(metrics).items()}


class _Walk:
    """Digests of objects and of what they hold; each object is looked at once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}  # with the object, so that no other gets its number
        self.open: set[int] = set()

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
        given = None if isinstance(value, type) else getattr(value, "fingerprint", None)
        if isinstance(given, str):
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

    def _all(self, kind: str, *parts: Any) -> bytes:
        return _hash(kind, *map(self.digest, parts))

    def _array(self, value: Any) -> bytes:
        if isinstance(value, jax.core.Tracer):
            return _hash("name", "a traced array")
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self._all("objects", array.shape, array.tolist())
        return array_digest(array)

    def _code(self, code: CodeType, doc: str | None = None) -> bytes:
        """What is executed: neither where it stands nor how its variables are called."""
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
        module = function.__globals__.get("__name__") or ""  # wrappers take the name of what they wrap
        if is_known(module):
            name = f"{module}.{function.__code__.co_qualname}"
            # two functions without names of their own may stand in one of ours
            code = self.digest(function.__code__) if module.startswith("fedstrata") else b""
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
