"""Federated data: tables and files, stores and sources, statistics, partitioners, loaders."""

from typing import TYPE_CHECKING

from fedstrata.support.lazy import lazy

if TYPE_CHECKING:  # for type checkers, and for `lazy`, which imports a name when it is used
    from fedstrata.data.federated import DataError as DataError
    from fedstrata.data.federated import FederatedData as FederatedData
    from fedstrata.data.files import from_csv as from_csv
    from fedstrata.data.hostile import flip_labels as flip_labels
    from fedstrata.data.labels import check_labels as check_labels
    from fedstrata.data.labels import count_classes as count_classes
    from fedstrata.data.partition import IID as IID
    from fedstrata.data.partition import ByKey as ByKey
    from fedstrata.data.partition import Dirichlet as Dirichlet
    from fedstrata.data.partition import FeatureShift as FeatureShift
    from fedstrata.data.partition import OneClass as OneClass
    from fedstrata.data.partition import Partitioner as Partitioner
    from fedstrata.data.partition import QuantitySkew as QuantitySkew
    from fedstrata.data.partition import Shards as Shards
    from fedstrata.data.partition import TwoLevel as TwoLevel
    from fedstrata.data.preparation import Preparation as Preparation
    from fedstrata.data.preparation import standardize as standardize
    from fedstrata.data.samples import CorruptData as CorruptData
    from fedstrata.data.sources import FromDataset as FromDataset
    from fedstrata.data.sources import FromFunction as FromFunction
    from fedstrata.data.store import Store as Store
    from fedstrata.data.store import open_store as open_store
    from fedstrata.data.store_writing import write_store as write_store
    from fedstrata.lab.datasets.fetch import DataNotFound as DataNotFound
    from fedstrata.lab.datasets.hospitals import heart as heart
    from fedstrata.lab.datasets.loaders import adult as adult
    from fedstrata.lab.datasets.loaders import breast_cancer as breast_cancer
    from fedstrata.lab.datasets.loaders import cifar10 as cifar10
    from fedstrata.lab.datasets.loaders import cifar100 as cifar100
    from fedstrata.lab.datasets.loaders import digits as digits
    from fedstrata.lab.datasets.loaders import fashion_mnist as fashion_mnist
    from fedstrata.lab.datasets.loaders import load as load
    from fedstrata.lab.datasets.loaders import mnist as mnist
    from fedstrata.lab.datasets.loaders import montevideo_bus as montevideo_bus
    from fedstrata.lab.datasets.loaders import wikimaths as wikimaths
    from fedstrata.lab.datasets.natural import dialysis as dialysis
    from fedstrata.lab.datasets.natural import indo_rct as indo_rct
    from fedstrata.lab.datasets.natural import schools as schools
else:
    __getattr__, __dir__ = lazy(__name__)
