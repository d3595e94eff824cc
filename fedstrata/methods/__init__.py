"""One paper's algorithm, one file."""

from fedstrata.methods.base import METHODS, Method
from fedstrata.methods.fedac import FedAC
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedmspp import FedMSPP
from fedstrata.methods.fedprox import FedProx
from fedstrata.methods.fedrzo import FedRZO
from fedstrata.methods.fedrzo_bilevel import FedRZOBilevel
from fedstrata.methods.fedrzo_minimax import FedRZOMinimax
from fedstrata.methods.fedzo import FedZO
from fedstrata.methods.lfd import LFD
from fedstrata.methods.scaffnew import Scaffnew
from fedstrata.methods.scaffold import SCAFFOLD

__all__ = [
    "LFD",
    "METHODS",
    "SCAFFOLD",
    "FedAC",
    "FedAvg",
    "FedMSPP",
    "FedProx",
    "FedRZO",
    "FedRZOBilevel",
    "FedRZOMinimax",
    "FedZO",
    "Method",
    "Scaffnew",
]
