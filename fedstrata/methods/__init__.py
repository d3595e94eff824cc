"""The methods: one file for each paper's algorithm."""

from typing import TYPE_CHECKING

from fedstrata.core.method import METHODS as METHODS
from fedstrata.core.method import Method as Method
from fedstrata.methods.ada_fedstorm import AdaFedSTORM as AdaFedSTORM
from fedstrata.methods.afl import AFL as AFL
from fedstrata.methods.apfl import APFL as APFL
from fedstrata.methods.big_sam import BiGSAM as BiGSAM
from fedstrata.methods.codasca import CODASCA as CODASCA
from fedstrata.methods.compositional_fedavg import CompositionalFedAvg as CompositionalFedAvg
from fedstrata.methods.decomfl import DeComFL as DeComFL
from fedstrata.methods.ditto import Ditto as Ditto
from fedstrata.methods.drfa import DRFA as DRFA
from fedstrata.methods.ds_feddro import DSFedDRO as DSFedDRO
from fedstrata.methods.fastdro import FastDRO as FastDRO
from fedstrata.methods.fcsgm import FCSGM as FCSGM
from fedstrata.methods.fedac import FedAC as FedAC
from fedstrata.methods.fedapd import FedAPD as FedAPD
from fedstrata.methods.fedavg import FedAvg as FedAvg
from fedstrata.methods.feddro import FedDRO as FedDRO
from fedstrata.methods.fedf2sa import FedF2SA as FedF2SA
from fedstrata.methods.fedgdro import FedGDRO as FedGDRO
from fedstrata.methods.fedkseed import FedKSeed as FedKSeed
from fedstrata.methods.fedmsa import FedMSA as FedMSA
from fedstrata.methods.fedmspp import FedMSPP as FedMSPP
from fedstrata.methods.fednest import FedNest as FedNest
from fedstrata.methods.fedopt import FedOpt as FedOpt
from fedstrata.methods.fedprox import FedProx as FedProx
from fedstrata.methods.fedrep import FedRep as FedRep
from fedstrata.methods.fedrzo import FedRZO as FedRZO
from fedstrata.methods.fedrzo_bilevel import FedRZOBilevel as FedRZOBilevel
from fedstrata.methods.fedrzo_minimax import FedRZOMinimax as FedRZOMinimax
from fedstrata.methods.fedrzo_two_stage import FedRZOTwoStage as FedRZOTwoStage
from fedstrata.methods.fedsgda_plus import FedSGDAPlus as FedSGDAPlus
from fedstrata.methods.fedstorm import FedSTORM as FedSTORM
from fedstrata.methods.fedzo import FedZO as FedZO
from fedstrata.methods.fessgda import FESSGDA as FESSGDA
from fedstrata.methods.gcivr import GCIVR as GCIVR
from fedstrata.methods.hiso import HiSo as HiSo
from fedstrata.methods.hypergradient_descent import HypergradientDescent as HypergradientDescent
from fedstrata.methods.ipir_fedavg import IPIRFedAvg as IPIRFedAvg
from fedstrata.methods.lfd import LFD as LFD
from fedstrata.methods.local_scgdm import LocalSCGDM as LocalSCGDM
from fedstrata.methods.local_sgda import LocalSGDA as LocalSGDA
from fedstrata.methods.mbsgd import MBSGD as MBSGD
from fedstrata.methods.normalized_sgda import NormalizedSGDA as NormalizedSGDA
from fedstrata.methods.pdsgd import PDSGD as PDSGD
from fedstrata.methods.per_fedavg import PerFedAvg as PerFedAvg
from fedstrata.methods.pfedme import PFedMe as PFedMe
from fedstrata.methods.qfedavg import QFedAvg as QFedAvg
from fedstrata.methods.r_apm import RAPM as RAPM
from fedstrata.methods.scaffnew import Scaffnew as Scaffnew
from fedstrata.methods.scaffold import SCAFFOLD as SCAFFOLD
from fedstrata.methods.sequential_regularization import SequentialRegularization as SequentialRegularization
from fedstrata.methods.simfbo import SimFBO as SimFBO
from fedstrata.methods.soba import SOBA as SOBA
from fedstrata.methods.str_fedavg import StRFedAvg as StRFedAvg
from fedstrata.methods.zohfl import ZOHFL as ZOHFL
from fedstrata.support.words import misspelt

if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __all__ = [name for name, method in METHODS.items() if method.__module__.startswith(f"{__name__}.")]
    __all__ += ["METHODS", "Method"]
    __getattr__ = misspelt(__name__)
