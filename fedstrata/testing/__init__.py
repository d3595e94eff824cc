"""Small cases and checks for tests of methods and engines, also outside the project."""

from fedstrata.testing.cases import Case, all_cases
from fedstrata.testing.conformance import check_engine, check_method
from fedstrata.testing.kit import CONFORMANCE

__all__ = ["CONFORMANCE", "Case", "all_cases", "check_engine", "check_method"]
