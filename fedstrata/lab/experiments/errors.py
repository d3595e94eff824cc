"""What is said when an experiment cannot be had."""

from __future__ import annotations

from pathlib import Path


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


def in_words(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours in its own words; others as Python has them."""
    if issubclass(category, UserWarning):
        return f"Warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
