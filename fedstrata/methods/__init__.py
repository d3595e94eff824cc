"""One paper's algorithm, one file."""

from typing import TYPE_CHECKING

from fedstrata.core.method import METHODS, Method
from fedstrata.methods.afl import AFL
from fedstrata.methods.apfl import APFL
from fedstrata.methods.big_sam import BiGSAM
from fedstrata.methods.codasca import CODASCA
from fedstrata.methods.compositional_fedavg import CompositionalFedAvg
from fedstrata.methods.ditto import Ditto
from fedstrata.methods.drfa import DRFA
from fedstrata.methods.ds_feddro import DSFedDRO
from fedstrata.methods.fastdro import FastDRO
from fedstrata.methods.fcsgm import FCSGM
from fedstrata.methods.fedac import FedAC
from fedstrata.methods.fedavg import FedAvg
from fedstrata.methods.feddro import FedDRO
from fedstrata.methods.fedf2sa import FedF2SA
from fedstrata.methods.fedmsa import FedMSA
from fedstrata.methods.fedmspp import FedMSPP
from fedstrata.methods.fednest import FedNest
from fedstrata.methods.fedopt import FedOpt
from fedstrata.methods.fedprox import FedProx
from fedstrata.methods.fedrep import FedRep
from fedstrata.methods.fedrzo import FedRZO
from fedstrata.methods.fedrzo_bilevel import FedRZOBilevel
from fedstrata.methods.fedrzo_minimax import FedRZOMinimax
from fedstrata.methods.fedrzo_two_stage import FedRZOTwoStage
from fedstrata.methods.fedsgda_plus import FedSGDAPlus
from fedstrata.methods.fedstorm import FedSTORM
from fedstrata.methods.fedzo import FedZO
from fedstrata.methods.fessgda import FESSGDA
from fedstrata.methods.gcivr import GCIVR
from fedstrata.methods.hypergradient_descent import HypergradientDescent
from fedstrata.methods.ipir_fedavg import IPIRFedAvg
from fedstrata.methods.lfd import LFD
from fedstrata.methods.local_scgdm import LocalSCGDM
from fedstrata.methods.local_sgda import LocalSGDA
from fedstrata.methods.mbsgd import MBSGD
from fedstrata.methods.pdsgd import PDSGD
from fedstrata.methods.per_fedavg import PerFedAvg
from fedstrata.methods.pfedme import PFedMe
from fedstrata.methods.qfedavg import QFedAvg
from fedstrata.methods.r_apm import RAPM
from fedstrata.methods.scaffnew import Scaffnew
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.methods.sequential_regularization import SequentialRegularization
from fedstrata.methods.simfbo import SimFBO
from fedstrata.methods.soba import SOBA
from fedstrata.methods.str_fedavg import StRFedAvg
from fedstrata.methods.zohfl import ZOHFL
from fedstrata.support.words import misspelt

__all__ = [
    "AFL",
    "APFL",
    "CODASCA",
    "DRFA",
    "FCSGM",
    "FESSGDA",
    "GCIVR",
    "LFD",
    "MBSGD",
    "METHODS",
    "PDSGD",
    "RAPM",
    "SCAFFOLD",
    "SOBA",
    "ZOHFL",
    "BiGSAM",
    "CompositionalFedAvg",
    "DSFedDRO",
    "Ditto",
    "FastDRO",
    "FedAC",
    "FedAvg",
    "FedDRO",
    "FedF2SA",
    "FedMSA",
    "FedMSPP",
    "FedNest",
    "FedOpt",
    "FedProx",
    "FedRZO",
    "FedRZOBilevel",
    "FedRZOMinimax",
    "FedRZOTwoStage",
    "FedRep",
    "FedSGDAPlus",
    "FedSTORM",
    "FedZO",
    "HypergradientDescent",
    "IPIRFedAvg",
    "LocalSCGDM",
    "LocalSGDA",
    "Method",
    "PFedMe",
    "PerFedAvg",
    "QFedAvg",
    "Scaffnew",
    "SequentialRegularization",
    "SimFBO",
    "StRFedAvg",
]

if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
