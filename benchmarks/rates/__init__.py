"""Measured against predicted rates: log–log slopes of the theorems' quantities, on closed-form problems.

``python -m benchmarks.rates [METHOD …]``. A theorem bounds from above, so a steeper slope than predicted is
no contradiction; a flatter one is, or the run is too short for its asymptotics. Steps are those of the
theorems (``from_theory``), with constants that suit the problem. Means are over rounds and seeds, as the
theorems draw an iterate at random.
"""
