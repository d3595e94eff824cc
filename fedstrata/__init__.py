"""FedStrata: federated hierarchical optimisation.

>>> import fedstrata as fs
"""

from fedstrata import data, engines, methods, problems
from fedstrata.advice import diagnostics
from fedstrata.advice.applicable import applicable
from fedstrata.advice.diagnose import Diagnosis, diagnose
from fedstrata.core.counting import Ledger
from fedstrata.core.term import per_batch
from fedstrata.data import IID, ByKey, DataError, Dirichlet, FederatedData, OneClass, QuantitySkew
from fedstrata.engines import ClientError
from fedstrata.methods import *  # noqa: F403
from fedstrata.methods import __all__ as _methods
from fedstrata.problems import *  # noqa: F403
from fedstrata.problems import __all__ as _problems
from fedstrata.problems.black_box import black_box
from fedstrata.solving.checkpoint import Checkpoint, CheckpointError
from fedstrata.solving.loop import Diverged, EarlyStop, solve
from fedstrata.solving.result import Result
from fedstrata.solving.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "IID", "ByKey", "Checkpoint", "CheckpointError", "ClientError", "DataError", "Diagnosis", "Dirichlet",
    "Diverged", "EarlyStop", "FederatedData", "Ledger", "OneClass", "QuantitySkew", "Result", "applicable",
    "black_box", "data", "diagnose", "diagnostics", "engines", "methods", "per_batch", "problems", "solve",
    "sweep",
    *_methods, *_problems,
]  # fmt: skip
