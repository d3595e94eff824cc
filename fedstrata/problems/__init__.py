"""What is to be solved: problem classes, sets and projections, regularisers, test problems."""

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
from fedstrata.problems.cournot import cournot_game
from fedstrata.problems.dro import risk_averse
from fedstrata.problems.hyper import hypercleaning, hyperrepresentation, loss_tuning
from fedstrata.problems.interpolation import underdetermined
from fedstrata.problems.levels import LogMeanExp
from fedstrata.problems.quadratic import quadratic_bilevel, quadratic_minimax
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
    "cournot_game",
    "dro",
    "fairness",
    "hypercleaning",
    "hyperrepresentation",
    "loss_tuning",
    "prox",
    "quadratic_bilevel",
    "quadratic_minimax",
    "risk_averse",
    "sets",
    "underdetermined",
]

if not TYPE_CHECKING:  # to which a module with a __getattr__ has every name
    __getattr__ = misspelt(__name__)
