"""Federated data: tables and files, stores and sources, statistics, partitioners, loaders."""

from typing import TYPE_CHECKING

from fedstrata.core.federated import DataError, FederatedData
from fedstrata.core.words import misspelt
from fedstrata.data.fetch import DataNotFound
from fedstrata.data.files import from_csv
from fedstrata.data.formats import CorruptData
from fedstrata.data.hospitals import heart
from fedstrata.data.labels import check_labels, count_classes
from fedstrata.data.loaders import (
    adult,
    breast_cancer,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    load,
    mnist,
    montevideo_bus,
    wikimaths,
)
from fedstrata.data.partition import (
    IID,
    ByKey,
    Dirichlet,
    FeatureShift,
    OneClass,
    Partitioner,
    QuantitySkew,
    Shards,
    TwoLevel,
)
from fedstrata.data.preparation import Preparation, standardize
from fedstrata.data.sources import FromDataset, FromFunction
from fedstrata.data.store import Store, open_store
from fedstrata.data.store_writing import write_store

__all__ = [
    "IID",
    "ByKey",
    "CorruptData",
    "DataError",
    "DataNotFound",
    "Dirichlet",
    "FeatureShift",
    "FederatedData",
    "FromDataset",
    "FromFunction",
    "OneClass",
    "Partitioner",
    "Preparation",
    "QuantitySkew",
    "Shards",
    "Store",
    "TwoLevel",
    "adult",
    "breast_cancer",
    "check_labels",
    "cifar10",
    "cifar100",
    "count_classes",
    "digits",
    "fashion_mnist",
    "from_csv",
    "heart",
    "load",
    "mnist",
    "montevideo_bus",
    "open_store",
    "standardize",
    "wikimaths",
    "write_store",
]

if not TYPE_CHECKING:  # to which a module with a __getattr__ has every name
    __getattr__ = misspelt(__name__)
