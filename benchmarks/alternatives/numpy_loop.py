"""Loops in NumPy, with the gradient worked out on paper."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..timing import Run
from . import Case


def loop(case: Case) -> Run:
    def run() -> Any:
        rng = np.random.default_rng(case.seed)
        params = case.start()
        for _ in range(case.rounds):
            total = {name: np.zeros_like(p) for name, p in params.items()}
            for i in rng.choice(case.clients, case.participants, replace=False):
                w, b = params["w"].copy(), params["b"].copy()
                for _ in range(case.steps):
                    rows = rng.integers(0, case.samples, case.batch)
                    xs, ys = case.x[i, rows], case.y[i, rows]
                    logits = xs @ w + b
                    p = np.exp(logits - logits.max(1, keepdims=True))
                    p /= p.sum(1, keepdims=True)
                    p[np.arange(case.batch), ys] -= 1
                    w -= case.gamma / case.batch * xs.T @ p
                    b -= case.gamma / case.batch * p.sum(0)
                total["w"] += w / case.participants
                total["b"] += b / case.participants
            params = total
        return params

    return run
