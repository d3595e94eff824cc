"""Estimators of directions: gradients, two-point estimates, hypergradients, compositions, VI solvers."""
