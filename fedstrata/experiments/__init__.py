"""The papers' tables and figures as definitions that the command line runs.

A definition is a file of `papers` with an ``EXPERIMENT``; `registry` finds it by its name, which is the
experiment's with ``_`` for ``-``. The modules here are what definitions are made with, and what runs them.
"""

from typing import TYPE_CHECKING

from fedstrata.core.lazy import lazy

if TYPE_CHECKING:  # for type checkers, and for `lazy`, which imports a name when it is used
    from fedstrata.experiments.base import Experiment as Experiment
    from fedstrata.experiments.base import Setting as Setting
    from fedstrata.experiments.base import Task as Task
    from fedstrata.experiments.errors import ExperimentError as ExperimentError
    from fedstrata.report import Claim as Claim
    from fedstrata.report import Column as Column
    from fedstrata.report import PaperClaims as PaperClaims
    from fedstrata.report import PlotSpec as PlotSpec
    from fedstrata.report import Reference as Reference
    from fedstrata.report import RunRecord as RunRecord
    from fedstrata.report import Statement as Statement
    from fedstrata.report import TableSpec as TableSpec
else:
    __getattr__, __dir__ = lazy(__name__)
