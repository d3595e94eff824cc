"""FedStrata: federated hierarchical optimisation.

>>> import fedstrata as fs
"""

from typing import TYPE_CHECKING

from fedstrata.support.lazy import lazy

__version__ = "0.2.0"

if TYPE_CHECKING:  # for type checkers, and for `lazy`, which imports a name when it is used
    from fedstrata import channels as channels
    from fedstrata import data as data
    from fedstrata import engines as engines
    from fedstrata import methods as methods
    from fedstrata import models as models
    from fedstrata import problems as problems
    from fedstrata import testing as testing
    from fedstrata.advice import diagnostics as diagnostics
    from fedstrata.advice.applicable import applicable as applicable
    from fedstrata.advice.baselines import Baselines as Baselines
    from fedstrata.advice.baselines import baselines as baselines
    from fedstrata.advice.certify import certify as certify
    from fedstrata.advice.compare import Comparison as Comparison
    from fedstrata.advice.compare import compare as compare
    from fedstrata.advice.constants import Constants as Constants
    from fedstrata.advice.constants import constants as constants
    from fedstrata.advice.diagnose import Diagnosis as Diagnosis
    from fedstrata.advice.diagnose import diagnose as diagnose
    from fedstrata.advice.plan import Plan as Plan
    from fedstrata.advice.plan import plan as plan
    from fedstrata.advice.recommend import recommend as recommend
    from fedstrata.advice.tune import Tuned as Tuned
    from fedstrata.advice.tune import tune as tune
    from fedstrata.channels.channel import Buffered as Buffered
    from fedstrata.channels.channel import Channel as Channel
    from fedstrata.channels.channel import Dropouts as Dropouts
    from fedstrata.channels.channel import Poisson as Poisson
    from fedstrata.channels.clipping import Adaptive as Adaptive
    from fedstrata.channels.compression import QSGD as QSGD
    from fedstrata.channels.compression import Cast as Cast
    from fedstrata.channels.compression import RandK as RandK
    from fedstrata.channels.compression import Sign as Sign
    from fedstrata.channels.compression import TopK as TopK
    from fedstrata.channels.examples import Examples as Examples
    from fedstrata.channels.means import CenteredClipping as CenteredClipping
    from fedstrata.channels.means import GeometricMedian as GeometricMedian
    from fedstrata.channels.means import Krum as Krum
    from fedstrata.channels.means import Median as Median
    from fedstrata.channels.means import MultiKrum as MultiKrum
    from fedstrata.channels.means import TrimmedMean as TrimmedMean
    from fedstrata.channels.sent import Sent as Sent
    from fedstrata.core.counting import Ledger as Ledger
    from fedstrata.core.term import per_batch as per_batch
    from fedstrata.core.term import stochastic as stochastic
    from fedstrata.core.term import with_frozen as with_frozen
    from fedstrata.data.federated import DataError as DataError
    from fedstrata.data.federated import FederatedData as FederatedData
    from fedstrata.data.partition import IID as IID
    from fedstrata.data.partition import ByKey as ByKey
    from fedstrata.data.partition import Dirichlet as Dirichlet
    from fedstrata.data.partition import FeatureShift as FeatureShift
    from fedstrata.data.partition import OneClass as OneClass
    from fedstrata.data.partition import QuantitySkew as QuantitySkew
    from fedstrata.data.partition import Shards as Shards
    from fedstrata.data.partition import TwoLevel as TwoLevel
    from fedstrata.engines.engine import ClientError as ClientError
    from fedstrata.engines.metrics import on_host as on_host
    from fedstrata.engines.metrics import per_client as per_client
    from fedstrata.methods import *  # noqa: F403
    from fedstrata.problems import *  # noqa: F403
    from fedstrata.problems.black_box import black_box as black_box
    from fedstrata.problems.from_torch import from_torch as from_torch
    from fedstrata.solving import track as track
    from fedstrata.solving.certificate import Certificate as Certificate
    from fedstrata.solving.checkpoint import Checkpoint as Checkpoint
    from fedstrata.solving.loop import solve as solve
    from fedstrata.solving.random_iterate import random_iterate as random_iterate
    from fedstrata.solving.result import Result as Result
    from fedstrata.solving.result import load as load
    from fedstrata.solving.sent import exchanges as exchanges
    from fedstrata.solving.sent import plan_privacy as plan_privacy
    from fedstrata.solving.stopping import Diverged as Diverged
    from fedstrata.solving.stopping import EarlyStop as EarlyStop
    from fedstrata.solving.stopping import Interrupted as Interrupted
    from fedstrata.solving.sweep import sweep as sweep
    from fedstrata.support.compiled import keep_compiled as keep_compiled
    from fedstrata.support.sealed import CheckpointError as CheckpointError
    from fedstrata.testing.cournot import cournot_game as cournot_game
    from fedstrata.testing.interpolation import underdetermined as underdetermined
    from fedstrata.testing.quadratic import quadratic_bilevel as quadratic_bilevel
    from fedstrata.testing.quadratic import quadratic_minimax as quadratic_minimax
else:
    __getattr__, __dir__ = lazy(__name__)
