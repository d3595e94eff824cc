"""What is to be solved: problem classes, sets and projections, regularisers, test problems."""

from fedstrata.problems import prox, sets
from fedstrata.problems.base import Problem, Projection
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

__all__ = [
    "MPEC",
    "Bilevel",
    "Composition",
    "Minimax",
    "Minimization",
    "MultiSequence",
    "Personalized",
    "Problem",
    "Projection",
    "Selection",
    "prox",
    "sets",
]
