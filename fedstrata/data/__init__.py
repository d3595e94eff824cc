"""Federated data: stacking and padding, partitioners, loaders."""

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.partition import IID, ByKey, Dirichlet, OneClass, QuantitySkew

__all__ = ["IID", "ByKey", "DataError", "Dirichlet", "FederatedData", "OneClass", "QuantitySkew"]
