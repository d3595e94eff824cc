"""FedStrata: federated hierarchical optimisation.

>>> import fedstrata as fs
"""

from fedstrata import data, engines, methods, problems
from fedstrata.applicable import applicable
from fedstrata.black_box import black_box
from fedstrata.checkpoint import Checkpoint, CheckpointError
from fedstrata.client import per_batch
from fedstrata.data import IID, ByKey, DataError, Dirichlet, FederatedData, OneClass, QuantitySkew
from fedstrata.diagnose import Diagnosis, diagnose
from fedstrata.engines import ClientError
from fedstrata.ledger import Ledger
from fedstrata.methods import *  # noqa: F403
from fedstrata.methods import __all__ as _methods
from fedstrata.problems import *  # noqa: F403
from fedstrata.problems import __all__ as _problems
from fedstrata.result import Result
from fedstrata.solve import Diverged, EarlyStop, solve
from fedstrata.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "IID", "ByKey", "Checkpoint", "CheckpointError", "ClientError", "DataError", "Diagnosis", "Dirichlet",
    "Diverged", "EarlyStop", "FederatedData", "Ledger", "OneClass", "QuantitySkew", "Result", "applicable",
    "black_box", "data", "diagnose", "engines", "methods", "per_batch", "problems", "solve", "sweep",
    *_methods, *_problems,
]  # fmt: skip
