"""Problem classes, sets and their projections, regularisers."""

from typing import TYPE_CHECKING

from fedstrata.core.problem import Problem, Projection
from fedstrata.problems import dro, fairness, prox, sets
from fedstrata.problems.classes import (
    MPEC,
    Bilevel,
    Composition,
    Minimax,
    Minimization,
    MultiSequence,
    Personalized,
    Selection,
)
from fedstrata.problems.conversions import as_bilevel, as_multisequence
from fedstrata.problems.dro import risk_averse
from fedstrata.problems.hyper import hypercleaning, hyperrepresentation, loss_tuning
from fedstrata.problems.levels import LogMeanExp
from fedstrata.support.words import misspelt

__all__ = [
    "MPEC",
    "Bilevel",
    "Composition",
    "LogMeanExp",
    "Minimax",
    "Minimization",
    "MultiSequence",
    "Personalized",
    "Problem",
    "Projection",
    "Selection",
    "as_bilevel",
    "as_multisequence",
    "dro",
    "fairness",
    "hypercleaning",
    "hyperrepresentation",
    "loss_tuning",
    "prox",
    "risk_averse",
    "sets",
]

if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
