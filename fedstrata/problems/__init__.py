"""What is to be solved: problem classes, sets and projections, regularisers, test problems."""

from fedstrata.problems import diagnostics, prox, sets
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
from fedstrata.problems.quadratic import quadratic_bilevel, quadratic_minimax

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
    "diagnostics",
    "prox",
    "quadratic_bilevel",
    "quadratic_minimax",
    "sets",
]
