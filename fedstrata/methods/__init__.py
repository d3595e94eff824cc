"""One paper's algorithm, one file."""

from fedstrata.methods.base import METHODS, Method
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.fedmspp import FedMSPP
from fedstrata.methods.fedprox import FedProx
from fedstrata.methods.fedrzo import FedRZO
from fedstrata.methods.fedzo import FedZO
from fedstrata.methods.scaffnew import Scaffnew
from fedstrata.methods.scaffold import SCAFFOLD

__all__ = ["METHODS", "SCAFFOLD", "FedAvg", "FedMSPP", "FedProx", "FedRZO", "FedZO", "Method", "Scaffnew"]
