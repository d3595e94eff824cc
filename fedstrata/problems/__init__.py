"""What is to be solved: problem classes, sets and projections, regularisers, test problems."""

from fedstrata.problems.base import Problem, Projection
from fedstrata.problems.classes import Bilevel, Minimization

__all__ = ["Bilevel", "Minimization", "Problem", "Projection"]
