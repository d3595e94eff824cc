"""One paper's algorithm, one file."""

from fedstrata.methods.base import METHODS, Method
from fedstrata.methods.fedavg import FedAvg

__all__ = ["METHODS", "FedAvg", "Method"]
