"""Digests of arrays and programs by content, and the objects that a Python function refers to.

The digest of a jaxpr is that of its equations in order, with the arrays it closes over. It does not depend on
the process, the hash seed, the version of Python, or on names, comments and docstrings. It depends on the
version of JAX, which traces the same function into other equations from time to time.

What a program computes through a callback (`fedstrata.black_box`, metrics on the host) has no equations. Such
a function is identified by its code, its closure, the globals that it names, and the attributes that it names
of modules that are no libraries; its bytecode is that of one version of Python. To identify a function by
name instead, set its ``fingerprint``:

>>> def simulator(x, sample):
...     return 0.0
>>> simulator.fingerprint = "wind tunnel, version 3"
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"fedstrata", "jax", "jaxlib", "numpy"}
# Names, and rules for derivatives: those that were taken are among the equations already.
NOT_COMPUTED = {"name", "debug_info", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "rule"}


def array_digest(array: np.ndarray) -> bytes:
    """The digest of an array's dtype, shape and content; its layout does not matter."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def tree_digest(tree: Any) -> str:
    """The digest of a pytree's arrays and their places in it."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode() + b"\0" + array_digest(np.asarray(leaf)))
    return digest.hexdigest()[:24]


def digest_of(value: Any) -> str:
    """The digest of a jaxpr, or of a function that is called on the host.

    >>> one, other = (jax.make_jaxpr(lambda x: a * x)(1.0) for a in (2.0, 3.0))
    >>> digest_of(one) == digest_of(jax.make_jaxpr(lambda renamed: 2.0 * renamed)(4.0))
    True
    >>> digest_of(one) == digest_of(other)
    False
    """
    return _hash(Reader().text(value))


class Reader:
    """Writes a jaxpr, or any value in one, as text without names and addresses.

    Attributes:
        primitives: the names of the primitives in what was read, inner functions included.
    """

    def __init__(self) -> None:
        self.primitives: set[str] = set()
        # with the object, so that no other gets its number
        self._known: dict[int, tuple[Any, str, set[str]]] = {}
        self._avals: dict[Any, str] = {}

    @property
    def calls_host(self) -> bool:
        """Whether it calls functions on the host, which may differ where the text is equal."""
        return any("callback" in name for name in self.primitives)

    def text(self, value: Any) -> str:
        """The text of a value; for a jaxpr, a function or an array, its digest."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
        if id(value) not in self._known:
            outside, self.primitives = self.primitives, set()
            self._known[id(value)] = value, "…", set()  # a function may call itself
            self._known[id(value)] = value, self._look(value), self.primitives
            self.primitives = outside
        _, text, inside = self._known[id(value)]
        self.primitives |= inside
        return text

    def equation(self, equation: Any, name: Callable[[Any], str]) -> str:
        """The text of an equation, given names for the variables it reads."""
        self.primitives.add(equation.primitive.name)
        read = [
            f"{self._aval(atom.aval)}{self.text(atom.val)}" if hasattr(atom, "val") else name(atom)
            for atom in equation.invars
        ]
        params = sorted((k, self.text(v)) for k, v in equation.params.items() if k not in NOT_COMPUTED)
        return f"{equation.primitive.name}({','.join(read)}){params}"

    def _look(self, value: Any) -> str:
        if type(named := getattr(value, "fingerprint", None)) is str:
            return f"named {named}"
        if hasattr(value, "eqns"):
            return (
                self._jaxpr(value.consts, value.jaxpr) if hasattr(value, "consts") else self._jaxpr((), value)
            )
        match value:
            case tuple() | list():
                return f"{type(value).__name__}({','.join(map(self.text, value))})"
            case Mapping():
                return f"{{{','.join(sorted(f'{self.text(k)}:{self.text(v)}' for k, v in value.items()))}}}"
            case frozenset() | set():
                return f"{{{','.join(sorted(map(self.text, value)))}}}"
            case ModuleType():
                return f".{value.__name__}"
            case type():
                return f"{value.__module__}.{value.__name__}"
        if hasattr(value, "__array__"):
            return _array(value)
        parts = _parts(value)
        return re.sub(r" at 0x\w+", "", repr(value)) if parts is None else _hash(self.text(parts))

    def _jaxpr(self, consts: Iterable[Any], jaxpr: Any) -> str:
        number: dict[Any, str] = {}

        def new(variable: Any) -> str:
            number[variable] = f"%{len(number)}"
            return self._aval(variable.aval)

        lines = [",".join(map(new, (*jaxpr.constvars, *jaxpr.invars)))]
        lines += map(self.text, consts)
        for equation in jaxpr.eqns:
            text = self.equation(equation, number.__getitem__)
            lines.append(f"{','.join(map(new, equation.outvars))}={text}")
        returned = (self.text(v.val) if hasattr(v, "val") else number[v] for v in jaxpr.outvars)
        return _hash(*lines, ",".join(returned))

    def _aval(self, aval: Any) -> str:
        if aval not in self._avals:
            self._avals[aval] = aval.str_short() + "~" * getattr(aval, "weak_type", False)
        return self._avals[aval]


class _Current(Reader):
    """Reads the attributes of users' classes and objects too, but not what is called on the host.

    A program calls such functions by reference, so that they see what there is when it runs.
    """

    def _look(self, value: Any) -> str:
        if getattr(value, "values_only", False) is True:
            return f"{id(value)}"
        if isinstance(value, jax.Array):
            return _once(value)
        text = super()._look(value)
        kind = value if isinstance(value, type) else type(value)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if _of_library(kind.__module__, file) or not hasattr(value, "__dict__"):
            return text
        own = {name: held for name, held in vars(value).items() if not name.startswith("__")}
        return _hash(text, self.text(own), self.text(kind.__bases__ if value is kind else kind))


_known_arrays: dict[int, tuple[weakref.ref[jax.Array], str]] = {}


def _once(array: jax.Array) -> str:
    """The digest of an array of JAX, which cannot change: it is read from the device once."""
    number = id(array)
    known, text = _known_arrays.get(number, (None, ""))
    if known is None or known() is not array:
        text = _array(array)
        _known_arrays[number] = weakref.ref(array, lambda _: _known_arrays.pop(number, None)), text
    return text


def current(*functions: Any) -> str:
    """The digest of functions and of what they refer to now; empty if it cannot be read.

    It differs if a global, a variable of a closure or an attribute has another value, although the functions
    are the same objects.
    """
    with suppress(Exception):  # objects of other libraries may refuse any look
        return _Current().text(functions)
    return ""


def _parts(value: Any) -> tuple[Any, ...] | None:
    """The parts of a host function, or of an object in a jaxpr."""
    match value:
        case MethodType():
            return value.__func__, value.__self__
        case functools.partial():
            return value.func, value.args, value.keywords
        case CodeType():
            return value.co_code, value.co_names, value.co_argcount, value.co_consts
        case FunctionType() if is_library(value):
            return value.__module__, value.__qualname__, referred_to(value)
        case FunctionType():
            consts = tuple(None if const == value.__doc__ else const for const in value.__code__.co_consts)
            code = value.__code__.replace(co_consts=consts)
            return code, value.__defaults__, value.__kwdefaults__, referred_to(value)
    if hasattr(value, "__wrapped__"):  # jax.jit, jax.custom_jvp, functools.cache
        return value.__wrapped__, *(getattr(value, rule, None) for rule in ("jvp", "fwd", "bwd"))
    if dataclasses.is_dataclass(value):
        return type(value), *_held(value)
    if callable(value) and type(value).__module__.partition(".")[0] not in LIBRARIES:
        return type(value), getattr(value, "__dict__", None), type(value).__call__
    return None


def _held(value: Any) -> list[Any]:
    """The values of a dataclass's fields."""
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]


def _array(value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    # PyTorch's parameters are arrays only once they are detached from their gradients
    array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    return f"{array.tolist()}" if array.dtype.hasobject else array_digest(array).hex()


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:24]


def is_library(function: FunctionType) -> bool:
    """Whether a function belongs to a library, so that its name and closure identify it."""
    return _of_library(function.__globals__.get("__name__"), function.__code__.co_filename)


def _of_library(module: str | None, file: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES or "site-packages" in (file or "")


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions defined inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_of(const)


def referred_to(function: FunctionType) -> list[Any]:
    """The objects that a function closes over and, for a user's function, the globals it names.

    Of a user's module, they are the attributes that the function names.
    """
    objects = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            objects.append(cell.cell_contents)
    if not is_library(function):
        names = sorted({name for code in codes_of(function.__code__) for name in code.co_names})
        objects += [function.__globals__[name] for name in names if name in function.__globals__]
        for module in [value for value in objects if isinstance(value, ModuleType)]:
            if not _of_library(module.__name__, getattr(module, "__file__", None)):
                objects += [vars(module)[name] for name in names if name in vars(module)]
    return objects


def marked(function: Any, name: str) -> bool:
    """Whether a function, or one that it calls, has the attribute ``name`` and it is True.

    Functions with their own derivatives (`jax.custom_jvp`, `jax.custom_vjp`) can be differentiated, whatever
    they call: `reached` does not look into them.
    """
    return any(getattr(value, name, False) is True for value in reached(function))


def reached(function: Any) -> Iterator[Any]:
    """A function, those that it calls, and the objects that these close over."""
    seen: dict[int, Any] = {}  # with the objects, so that no other gets their numbers
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, jax.custom_jvp | jax.custom_vjp):
            continue
        seen[id(value)] = value
        yield value
        waiting += _inner(value)


def _inner(value: Any) -> list[Any]:
    """The functions inside a function or an object that is called like one."""
    match value:
        case FunctionType():
            return referred_to(value)
        case MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case list() | tuple():
            return list(value)
        case dict():
            return list(value.values())
    if isinstance(value, type | ModuleType | jax.Array):
        return []
    if dataclasses.is_dataclass(value):
        return _held(value)
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    own = type(value).__dict__.get("__call__")
    return [own, *vars(value).values()] if own is not None and hasattr(value, "__dict__") else []
