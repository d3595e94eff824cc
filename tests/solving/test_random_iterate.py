"""The papers' random output, against iterates by hand and the uniform distribution."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs

CURVED, AIM = np.array([1.0, 3.0]), np.array([2.0, -1.0])


def test_it_is_the_clients_mean_after_any_local_step(x64):
    """Of ½ a_i (x − c_i)²: y_i − c_i is multiplied by 1 − γ a_i in every local step."""
    data = fs.FederatedData.from_clients(
        [{"a": np.array([a]), "c": np.array([c])} for a, c in zip(CURVED, AIM, strict=True)]
    )
    problem = fs.Minimization(lambda x, s: 0.5 * s["a"] * (x - s["c"]) ** 2)
    H, found = 3, set()
    for seed in range(8):
        method, rounds = fs.random_iterate(fs.FedAvg(0.1, H=H), 4, seed, local_steps=True)
        x = fs.solve(problem, method, data, 5.0, rounds=rounds, progress=False).x
        k = int(np.random.default_rng(seed).integers(12))
        y = np.full(2, 5.0)
        for step in range(k):
            y = AIM + (1 - 0.1 * CURVED) * (y - AIM)
            y = np.full(2, y.mean()) if (step + 1) % H == 0 else y
        np.testing.assert_allclose(x, y.mean(), rtol=1e-12)
        found.add(k % H)
    assert found == {0, 1, 2}


@pytest.mark.parametrize("local_steps", [False, True])
def test_every_iterate_is_as_likely(local_steps):
    counts = np.zeros(20)
    for seed in range(2000):
        method, rounds = fs.random_iterate(fs.FedRZO(0.1, 0.1, H=4), 5, seed, local_steps=local_steps)
        rest = 4 if method.H == 4 else int(method.H(rounds - 1))
        counts[4 * rounds - (4 - rest)] += 1
    kinds = counts[:: 1 if local_steps else 4]
    assert counts.sum() == kinds.sum()
    expected = 2000 / len(kinds)
    assert ((kinds - expected) ** 2 / expected).sum() < 45  # χ² with at most 19 degrees: p < 0.001


def test_mistakes():
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        fs.random_iterate(fs.FedAvg(0.1), 0)
    with pytest.raises(ValueError, match="needs a number of local steps H"):
        fs.random_iterate(fs.FedAvg(0.1, H=np.array([1, 2])), 3, local_steps=True)
