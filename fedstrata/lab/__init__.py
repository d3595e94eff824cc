"""The laboratory: the command line, experiments, reports and data sets (``pip install 'fedstrata[lab]'``).

These names define an experiment, a file with an ``EXPERIMENT``. The papers' experiments are in the
repository's folder ``reproductions``.
"""

from typing import TYPE_CHECKING

from fedstrata.support.lazy import lazy

if TYPE_CHECKING:  # for type checkers, and for `lazy`, which imports a name when it is used
    from fedstrata.lab.experiments.base import Experiment as Experiment
    from fedstrata.lab.experiments.base import Setting as Setting
    from fedstrata.lab.experiments.base import Task as Task
    from fedstrata.lab.experiments.errors import ExperimentError as ExperimentError
    from fedstrata.lab.report import Claim as Claim
    from fedstrata.lab.report import Column as Column
    from fedstrata.lab.report import PaperClaims as PaperClaims
    from fedstrata.lab.report import PlotSpec as PlotSpec
    from fedstrata.lab.report import Reference as Reference
    from fedstrata.lab.report import RunRecord as RunRecord
    from fedstrata.lab.report import Statement as Statement
    from fedstrata.lab.report import TableSpec as TableSpec
else:
    __getattr__, __dir__ = lazy(__name__)
