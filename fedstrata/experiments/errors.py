"""What is said when an experiment cannot be had."""

from __future__ import annotations


class ExperimentError(ValueError):
    """An experiment cannot be found, changed or run as asked; the message says why and what to do."""
