"""Packages that an extra installs: imported when they are needed, with an error that says how to get them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Imports inside may fail: the error then says which extra has the package.

    Args:
        name: the extra's.
        what: needs the package.

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
