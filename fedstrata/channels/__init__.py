"""Channels, which transform uploads: clipping, noise, compression, robust means, dropouts."""

from fedstrata.channels.attacks import ALIE as ALIE
from fedstrata.channels.attacks import InnerProduct as InnerProduct
from fedstrata.channels.attacks import Mimic as Mimic
from fedstrata.channels.attacks import SignFlip as SignFlip
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
from fedstrata.channels.means import Mean as Mean
from fedstrata.channels.means import Median as Median
from fedstrata.channels.means import MultiKrum as MultiKrum
from fedstrata.channels.means import TrimmedMean as TrimmedMean
