"""Import names at first use (PEP 562), and name the extra that installs a missing package.

``fedstrata --help`` needs no JAX, and a missing package is named together with the extra that has it.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from fedstrata.support.words import suggest

FEW = 1_000  # objects: Python 3.12 freezes some hundreds by itself


@contextmanager
def loading() -> Iterator[None]:
    """Switch the garbage collector off while modules are loaded, and count their objects as old.

    Otherwise the next collection of young objects traverses all of JAX, which costs the time saved.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
        if gc.get_freeze_count() < FEW:  # else someone keeps objects there
            gc.freeze()  # to the objects that are never looked at, and from there to the oldest
            gc.unfreeze()
    finally:
        if before:
            gc.enable()


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__``, which also gives its ``__all__``, and its ``__dir__``.

    Its names are those imported in the package's ``if TYPE_CHECKING:`` block, so they are written once.
    Modules imported there by ``import *`` are loaded with the first name, whichever it is, because they
    register methods and problems.

    Args:
        package: its name, ``__name__``.
    """
    source: Any = sys.modules[package].__loader__
    (block,) = (s for s in ast.parse(source.get_source(package)).body if isinstance(s, ast.If))
    taken = [(s.module, a.name) for s in block.body if isinstance(s, ast.ImportFrom) for a in s.names]
    home = {name: str(module) for module, name in taken if name != "*"}
    whole = [str(module) for module, name in taken if name == "*"]

    @loading()
    def get(name: str) -> Any:
        public = name == "__all__" or not name.startswith("_")
        shared = {n: module for module in map(import_module, whole if public else ()) for n in module.__all__}
        value: Any
        if name == "__all__":
            value = sorted({*home, *shared})
        elif name in shared:
            value = vars(shared[name])[name]
        elif name in home:
            module = import_module(home[name])
            if name in vars(module) or (home[name] != package and hasattr(module, name)):
                value = getattr(module, name)  # the other may be lazy too
            else:
                value = import_module(f"{home[name]}.{name}")
        else:
            close = suggest(name, get("__all__")) if public else "."
            raise AttributeError(f"module {package!r} has no attribute {name!r}{close}", name=name)
        setattr(sys.modules[package], name, value)  # the next look-up does not come here
        return value

    def names() -> list[str]:
        special = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*special, *get("__all__")})  # and no module that happens to be imported

    return get, names


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Name the extra to install if an import in this block fails.

    Args:
        name: the name of the extra.
        what: the feature that needs the package.

    >>> with extra("lab", "fs.data.digits"):
    ...     import sklearn_is_not_here
    Traceback (most recent call last):
    ...
    ModuleNotFoundError: fs.data.digits needs sklearn_is_not_here: pip install 'fedstrata[lab]'.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        message = f"{what} needs {package}: pip install 'fedstrata[{name}]'."
        raise ModuleNotFoundError(message, name=error.name) from error
