"""What a hyper-parameter may be is said by its annotation, and checked before anything is computed."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.hyperparameters import BatchSize, Field, LocalSteps, PerSequence, Positive

data = fs.FederatedData.from_clients([{"a": np.ones((2, 3))}] * 4)
problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())


def solve(method, problem=problem, **options):
    return fs.solve(problem, method, data, np.zeros(3), rounds=1, progress=False, **options)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            lambda: fs.FedRZO(0.1, 0.1, messages="scalar"),
            ValueError,
            "'vectors' or 'scalars', but is 'scalar'",
        ),
        (lambda: fs.FedRZO(0.1, 0.1, messages="scalar"), ValueError, r"Did you mean 'scalars'\?"),
        (lambda: fs.FedRZO(0.1, 0.1, two_sided=1), TypeError, "two_sided must be True or False, but is 1"),
        (lambda: fs.FedNest(0.1, 0.1, inverse="CG"), ValueError, "'neumann', 'series', 'cg' or 'none'"),
        (lambda: fs.SimFBO(*[0.1] * 6, products="exakt"), ValueError, "Did you mean 'exact'"),
        (lambda: fs.CompositionalFedAvg(0.1, case=3), ValueError, "case must be 1 or 2, but is 3"),
        (lambda: fs.FedAC(0.1, 0.1, variant="i"), ValueError, "'I' or 'II'"),
        (
            lambda: fs.FedRZOBilevel(0.1, 0.1, lower="lft"),
            ValueError,
            "'local_sgd', 'fedac', 'lfd', a method",
        ),
        (lambda: fs.FedRZOBilevel(0.1, 0.1, lower=3), TypeError, r"an object with solve\(problem, fed"),
        (lambda: fs.FedRZOBilevel(0.1, 0.1, lower_batch_size=0), ValueError, "full batch, 'rule' or 'same'"),
        (lambda: fs.FedRZOBilevel(0.1, 0.1, lower_rounds=np.ones(3, int)), ValueError, r"the shape \(3,\)"),
        (lambda: fs.FedRZOTwoStage(0.1, 0.1, lower=0), TypeError, r"a function \(G, project, y\) -> y"),
        (fs.FedMSA, TypeError, r"FedMSA needs alpha, beta. fs.plan\(.*'FedMSA'.* FedMSA.from_theory"),
        (lambda: fs.FedAvg("fast"), TypeError, "gamma must be a positive number or a function of the round"),
        (lambda: fs.FedAvg(np.array([0.1, 0.2])), ValueError, r"gamma must be .* but has the shape \(2,\)"),
        (lambda: fs.FedAvg([0.1, 0.2]), ValueError, r"gamma must be .* but has the shape \(2,\)"),
        (lambda: fs.FedMSA(0.1, np.ones((2, 2))), ValueError, "an array with one for each sequence"),
        (lambda: fs.FedAvg(0.1, H=lambda r: 1, batch_size=lambda r: 2), TypeError, "batch_size must be"),
        (
            lambda: fs.SequentialRegularization(lambda r: 0.1),
            TypeError,
            "eta must be a positive number or an",
        ),
    ],
)
def test_values_are_checked_when_an_object_is_built(build, error, words):
    with pytest.raises(error, match=words):
        build()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fs.FedAvg(0.1, H=np.array([1, 2, 3])), "H has 3 numbers, but there are 4 clients"),
        (fs.FedAvg(0.1, H=[1, 2, 3]), "H has 3 numbers, but there are 4 clients"),
        (fs.FedAvg(0.1, H=lambda r: jnp.ones(5)), "H has 5 numbers, but there are 4 clients"),
        (fs.FedAvg(lambda r: jnp.ones(4)), r"gamma must be .* but returns the shape \(4,\)"),
        (fs.SCAFFOLD(0.1, K=np.ones(2, int)), "K has 2 numbers, but there are 4 clients"),
    ],
)
def test_lengths_are_checked_before_anything_is_computed(method, words):
    with pytest.raises(ValueError, match=words):
        solve(method)


def test_a_lower_level_s_method_is_checked_too():
    bilevel = fs.Bilevel(lambda x, y, s: (x * y).sum(), lambda x, y, s: (y @ y) / 2, same_samples=True)
    method = fs.FedRZOBilevel(0.1, 0.1, lower=fs.FedAvg(0.1, H=np.ones(3, int)), lower_rounds=1)
    with pytest.raises(ValueError, match="FedAvg: H has 3 numbers, but there are 4 clients"):
        solve(method, bilevel, y0=np.zeros(3))


def test_a_schedule_that_asks_for_the_round_s_value_says_so():
    with pytest.raises(TypeError, match=r"gamma .* fails at a traced round.*(\n.*)*jnp.where in place of if"):
        solve(fs.FedAvg(lambda r: 0.1 if r < 3 else 0.01))


def test_numpy_and_python_numbers_are_the_same():
    """Also where they are arrays without axes; counts become plain ints, by which programs are found."""
    plain = fs.FedAvg(0.5, H=2, batch_size=1)
    for number, whole in (
        (np.float64(0.5), np.int64(2)),
        (np.array(0.5), np.array(2)),
        (jnp.array(0.5), jnp.array(2)),
    ):
        other = fs.FedAvg(number, H=whole, batch_size=np.int32(1))
        assert type(other.H) is int
        assert type(other.batch_size) is int
        assert jax.tree.structure(other) == jax.tree.structure(plain)
        assert jax.tree.leaves(other) == jax.tree.leaves(plain)


def test_a_list_is_an_array():
    method = fs.FedAvg(0.1, H=[0, 1, 2, 1])
    np.testing.assert_array_equal(method.H, [0, 1, 2, 1])
    assert jax.tree.leaves(method)[1] is method.H


def test_leaves_stay_leaves_whatever_they_hold():
    method = fs.FedRZOBilevel(0.1, 0.2, lower=fs.FedAvg(lambda r: 0.1, H=3), lower_rounds=2)
    leaves, structure = jax.tree.flatten(method)
    assert leaves == [0.1, 0.2, 0.001]  # γ, η, the residual; a schedule is none, nor is what was not given
    for placeholder in (None, "x", object()):
        again = jax.tree.unflatten(structure, [placeholder] * 3)
        assert jax.tree.structure(again, is_leaf=lambda leaf: leaf is None) == structure
    assert jax.tree.leaves(method.lower.replaced({"gamma": 0.3})) == [0.3]


def test_annotations_in_words():
    assert Field.of(Literal["a", "b"] | None).words == "'a', 'b' or None"
    assert Field.of(LocalSteps).words == (
        "a whole number ≥ 1, an array with one (≥ 0) for each client or a function of the round"
    )
    assert Field.of(PerSequence[Positive] | None).words == (
        "a positive number, an array with one for each sequence, a function of the round or None"
    )
    assert (
        Field.of(BatchSize | Literal["same"]).words == "a whole number ≥ 1, None for the full batch or 'same'"
    )
    assert Field.of(Annotated[dict, "a table"]).words == "a table"
    assert Field.of(bool).words == "True or False"


def halved(gamma, at, r):
    return jnp.where(r < at, gamma, gamma / 2)


def test_schedules_that_hold_their_numbers_apart_share_a_program():
    """On ‖x − 1‖² a step takes 1 − 2γ off the distance; a sweep takes several γ side by side."""
    gammas, at = (0.1, 0.3), 2
    methods = [fs.FedAvg(jax.tree_util.Partial(halved, gamma, at)) for gamma in gammas]
    assert len({jax.tree.structure(method) for method in methods}) == 1
    assert repr(methods[0]) == "FedAvg(gamma=halved(0.1, 2))"
    found = fs.sweep(problem, methods, data, np.zeros(3), rounds=3, progress=False)
    for gamma, result in zip(gammas, found, strict=True):
        np.testing.assert_allclose(result.x, 1 - (1 - 2 * gamma) ** 2 * (1 - gamma), rtol=1e-6)
    with pytest.raises(ValueError, match=r"gamma must be .* returns -0\.1"):
        solve(fs.FedAvg(jax.tree_util.Partial(halved, -0.1, at)))
