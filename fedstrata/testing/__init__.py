"""Small cases for tests of methods and engines, also outside of the project, and what must hold there."""

from fedstrata.testing.cases import Case, all_cases
from fedstrata.testing.conformance import check_engine, check_method
from fedstrata.testing.kit import CONFORMANCE

__all__ = ["CONFORMANCE", "Case", "all_cases", "check_engine", "check_method"]
