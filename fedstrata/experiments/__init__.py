"""The papers' tables and figures as definitions that the command line runs.

A module of this folder that defines ``EXPERIMENT`` (or several, ``EXPERIMENTS``) is found by `registry`; the
file's name is the experiment's, with ``_`` for ``-``.
"""

from fedstrata.experiments.base import Experiment, ExperimentError, Setting, Task
from fedstrata.report import Claim, Column, PaperClaims, PlotSpec, Reference, Run, Statement, TableSpec

__all__ = [
    "Claim",
    "Column",
    "Experiment",
    "ExperimentError",
    "PaperClaims",
    "PlotSpec",
    "Reference",
    "Run",
    "Setting",
    "Statement",
    "TableSpec",
    "Task",
]
