"""The command line's error messages and exit codes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


class ExperimentError(ValueError):
    """An experiment cannot be found, changed or run as asked; the message says why and what to do."""


def line_in(error: BaseException, file: Path) -> str:
    """Where in a file an error arose, as words."""
    numbers = [error.lineno] if isinstance(error, SyntaxError) else []
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == file.absolute():
            numbers.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {numbers[-1]}" if numbers else ""


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours in its own words; others as Python has them."""
    if issubclass(category, UserWarning):
        return f"Warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


@contextmanager
def messages(
    debug: bool = False, file: str = "", expected: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Errors as one message on stderr and an exit code: 2, for Ctrl-C 130, for a network that stopped 3.

    Warnings are their own words, without the place in the package that they come from.

    Args:
        debug: raise errors as they are.
        file: the user's own: whatever is wrong in it, when it is read or later, is a user's error.
        expected: further errors whose words are for users.
    """
    before, warnings.formatwarning = warnings.formatwarning, warning_text
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code, words = _told(error, file, expected)
        if not code or (debug and code == 2):
            raise
        typer.echo(words, err=True)
        raise typer.Exit(code) from None
    finally:
        warnings.formatwarning = before


def _told(error: BaseException, file: str, expected: tuple[type[Exception], ...]) -> tuple[int, str]:
    """The exit code and the message of an error; 0 for a bug of FedStrata."""
    if isinstance(error, KeyboardInterrupt):
        return 130, f"\nInterrupted{': ' if str(error) else ''}{error}"
    if isinstance(error, typer.Exit):
        return 0, ""
    from fedstrata.data import CorruptData, DataError  # with JAX, which a list does without
    from fedstrata.engines.engine import TooFewThreads, Unfinished
    from fedstrata.lab.report.records import ReportError
    from fedstrata.support.sealed import CheckpointError

    if isinstance(error, Unfinished):
        return 3, f"Stopped: {error}"
    known = (ExperimentError, ReportError, DataError, CorruptData, CheckpointError, TooFewThreads)
    at = line_in(error, Path(file)) if file else ""
    if isinstance(error, (*known, OSError, MemoryError)) or (isinstance(error, expected) and not at):
        return 2, f"Error: {str(error) or type(error).__name__}"
    return (2, f"Error: {file}{at}: {type(error).__name__}: {error}") if at else (0, "")
