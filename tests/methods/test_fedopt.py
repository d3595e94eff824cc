"""FedOpt: FedAvg as its simplest case, optax's own steps at the server, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.support.optimisers import first_like

rng = np.random.default_rng(0)
CLIENTS = [{"a": rng.normal(size=(n, 3)), "b": rng.normal(size=n)} for n in (6, 4, 5)]
data = fs.FederatedData.from_clients(CLIENTS)
x0 = {"w": np.array([0.5, -0.3, 0.2]), "c": np.array(0.1)}
GAMMA, H, ROUNDS = 0.1, 3, 6


def loss(x, sample):
    return 0.5 * (sample["a"] @ x["w"] + x["c"] - sample["b"]) ** 2 + 0.05 * x["w"] @ x["w"]


problem = fs.Minimization(loss)


def solve(method, problem=problem, rounds=ROUNDS, x0=x0, **more):
    return fs.solve(problem, method, data, x0, rounds=rounds, progress=False, default_metrics=False, **more)


def assert_equal(x, y, tolerance=1e-13):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


BALL = fs.Minimization(loss, project=fs.sets.Ball(0.3))
OWN = fs.Minimization(
    loss, project=lambda x, client: jax.tree.map(lambda leaf: jnp.minimum(leaf, 0.1 * client.index), x)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "options", "more"),
    [
        (problem, {"H": H, "batch_size": 2}, {"weights": "size", "participation": 2}),
        pytest.param(BALL, {"H": np.array([0, 2, 3])}, {}, marks=pytest.mark.slow),
        pytest.param(OWN, {"H": H}, {"weights": "size"}, marks=pytest.mark.slow),
    ],
    ids=["part", "set", "own-sets"],
)
def test_plain_steps_on_both_sides_are_fedavg(x64, problem, options, more):
    mine = solve(fs.FedOpt(optax.sgd(GAMMA), optax.sgd(1.0), **options), problem, **more)
    fedavg = solve(fs.FedAvg(GAMMA, **options), problem, **more)
    assert_equal(mine.x, fedavg.x)
    assert mine.ledger == fedavg.ledger


def pseudo_gradient(x):
    """x minus the mean of what H steps of gradient descent make of it, in NumPy."""
    w, c = np.zeros(3), 0.0
    for client in CLIENTS:
        u, v, n = x["w"].copy(), float(x["c"]), len(client["b"])
        for _ in range(H):
            residual = client["a"] @ u + v - client["b"]
            u, v = u - GAMMA * (client["a"].T @ residual / n + 0.1 * u), v - GAMMA * residual.mean()
        w, c = w + u / len(CLIENTS), c + v / len(CLIENTS)
    return {"w": x["w"] - w, "c": np.array(x["c"] - c)}


SERVERS = {
    "adam": optax.adam(0.05, b2=0.99, eps=1e-3),
    "yogi": optax.yogi(0.05, b2=0.99),
    "adagrad": optax.adagrad(0.05, initial_accumulator_value=1e-6, eps=0.0),
    "momentum": optax.sgd(optax.exponential_decay(1.0, 2, 0.5), momentum=0.9),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "adam" else pytest.mark.slow) for n in SERVERS]
)
def test_the_server_takes_optax_steps(x64, name):
    """Round by round; ``solve`` draws nothing here, so that r rounds are the first r of any run."""
    server, seen = SERVERS[name], []
    solve(
        fs.FedOpt(optax.sgd(GAMMA), server, H=H), callbacks=[lambda p: seen.append(jax.device_get(p.state.x))]
    )
    x = jax.tree.map(jnp.asarray, x0)
    state = server.init(x)
    for found in seen:
        assert_equal(found, x, 1e-12)
        updates, state = server.update(pseudo_gradient(jax.device_get(x)), state, x)
        x = optax.apply_updates(x, updates)


def test_adam_by_hand(x64):
    """The first step, with the paper's sign: against the pseudo-gradient, by η/(1 + τ/|Δ|) in each entry."""
    result = solve(fs.FedOpt(optax.sgd(GAMMA), SERVERS["adam"], H=H), rounds=1)
    delta = pseudo_gradient(x0)
    for name in x0:
        step = 0.05 * delta[name] / (np.abs(delta[name]) + 1e-3)
        np.testing.assert_allclose(result.x[name], x0[name] - step, rtol=1e-12)
    assert result.state.server[0].count == 1


@pytest.mark.slow
def test_a_schedule_of_the_client_begins_anew_in_every_round(x64):
    """Steps γ and then zero: one step a round, whatever H."""
    once = optax.sgd(lambda k: jnp.where(k < 1, GAMMA, 0.0))
    with pytest.warns(UserWarning, match="restarts in every round"):
        result = solve(fs.FedOpt(once, optax.sgd(1.0), H=H), rounds=3)
    assert_equal(result.x, solve(fs.FedAvg(GAMMA), rounds=3).x)


def numbers(client):
    """½(x − a)² of a client each, a = 0, 0, 0, 1, 9: the mean is 2, the median 0."""
    data = fs.FederatedData.from_clients([{"a": np.array([a])} for a in (0.0, 0.0, 0.0, 1.0, 9.0)])
    distance = fs.Minimization(lambda x, s: 0.5 * (x - s["a"]) ** 2)
    method = fs.FedOpt(client, optax.sgd(1.0))
    return fs.solve(distance, method, data, np.array(0.5), rounds=1500, progress=False, eval_every=10)


def test_an_adaptive_client_ends_at_a_median_and_the_certificate_says_so():
    biased = numbers(optax.adam(0.01))
    assert float(biased.x) == pytest.approx(0, abs=0.02)
    assert biased.certificate.verdict == "biased by drift"
    assert "client=optax.sgd(…)" in biased.certificate.advice
    assert float(numbers(optax.sgd(0.01, momentum=0.9)).x) == pytest.approx(2, abs=1e-4)


@pytest.mark.slow
def test_an_adaptive_server_stays_in_the_set(x64):
    result = solve(fs.FedOpt(optax.sgd(GAMMA), optax.adam(1.0), H=H), BALL, rounds=3)
    assert float(optax.tree.norm(result.x)) <= 0.3 + 1e-12


OTHERS = {
    "rate": optax.adam(1e-2),
    "eps": optax.adam(0.05, b2=0.99, eps=1e-4),
    "kind": optax.yogi(0.05, b2=0.99, eps=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_optimiser_is_not_resumed(tmp_path, other):
    def method(server):
        return fs.FedOpt(optax.sgd(GAMMA), server, H=H)

    solve(method(SERVERS["adam"]), rounds=0, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match="round: another program"):
        solve(method(other), rounds=1, checkpoint=tmp_path, resume=True)
    solve(method(optax.adam(0.05, b2=0.99, eps=1e-3)), rounds=0, checkpoint=tmp_path, resume=True)


def test_optimisers_made_alike_are_one():
    """So that they can stand side by side in a sweep; also by what only their start knows."""
    assert len({first_like(o) for o in [SERVERS["adam"], *OTHERS.values()]}) == 4
    schedule, own = optax.cosine_decay_schedule, optax.sgd(lambda step: 0.1)
    makers = [
        functools.partial(optax.adagrad, 0.1),
        lambda number: optax.inject_hyperparams(optax.adam)(number),
        lambda number: optax.chain(optax.clip(1.0), optax.sgd(schedule(number, 10))),
    ]
    for make in makers:
        assert first_like(make(0.1)) is first_like(make(0.1))
        assert first_like(make(0.1)) is not first_like(make(0.2))
    assert first_like(own) is own


def test_what_it_says_of_itself():
    method = fs.FedOpt(optax.sgd(0.1, momentum=0.9), optax.adagrad(0.01, 0.5), H=3)
    described = method.describe()
    assert "decay=0.9" in described["client"]
    assert "step_size=-0.1" in described["client"]
    assert "initial_accumulator_value=0.5" in described["server"]
    assert "0x" not in str(described)
    assert fs.applicable(problem)["FedOpt"].reveals == "averages"


@pytest.mark.parametrize("wrong", [0.1, optax.adam, None])
def test_no_optimiser(wrong):
    with pytest.raises(TypeError, match="server must be an optax optimiser such as"):
        fs.FedOpt(client=optax.sgd(0.1), server=wrong)


def test_a_step_size_that_is_an_optimiser_is_answered_with_the_name():
    with pytest.raises(TypeError, match=r"gamma must be a positive number.*scale_by_adam.*fs\.FedOpt\("):
        fs.FedAvg(gamma=optax.adam(1e-2))


def test_optimisers_that_ask_for_more_are_refused():
    with pytest.raises(TypeError, match=r"server= cannot take a step(?s:.*)need more"):
        solve(fs.FedOpt(optax.sgd(0.1), optax.polyak_sgd()))
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with pytest.raises(TypeError, match="client= cannot take a step"):
        solve(fs.FedOpt(plateau, optax.sgd(1.0)))
    endless = optax.GradientTransformation(lambda x: jnp.inf, lambda g, s, x=None: (g, s))
    with pytest.raises(ValueError, match="not finite"):
        solve(fs.FedOpt(optax.sgd(0.1), endless))


def test_a_sweep_over_optimisers_is_refused():
    def method(rate):
        return fs.FedOpt(optax.sgd(GAMMA), optax.sgd(rate))

    with pytest.raises(ValueError, match="optimisers"):
        fs.sweep(problem, [method(0.5), method(1.0)], data, x0, rounds=2)


def test_an_optimiser_made_anew_is_the_same_program():
    def method(rate):
        return fs.FedOpt(optax.sgd(GAMMA), optax.chain(optax.clip(1.0), optax.adam(rate)))

    assert jax.tree.structure(method(0.5)) == jax.tree.structure(method(0.5))
    assert jax.tree.structure(method(0.5)) != jax.tree.structure(method(0.6))


@pytest.mark.slow
def test_a_sweep_over_seeds():
    method = fs.FedOpt(optax.sgd(GAMMA), optax.sgd(1.0), H=2, batch_size=1)
    results = fs.sweep(problem, method, data, x0, seeds=(0, 1), rounds=2, progress=False)
    assert_equal(results[1].x, solve(fs.FedAvg(GAMMA, H=2, batch_size=1), rounds=2, seed=1).x, 1e-5)
