"""Bounds and noise for single samples: nothing passes by, no noise comes twice, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.channels import examples as module
from fedstrata.channels.privacy import gaussian_epsilon
from fedstrata.channels.spots import spot, spots
from fedstrata.core import counting
from fedstrata.core.method import METHODS
from fedstrata.engines.engine import Carry
from fedstrata.engines.network import Network, RoundFailed
from fedstrata.engines.network.allowance import Allowance
from fedstrata.engines.network.site import Site
from fedstrata.engines.rounds import before_rounds, one_round
from fedstrata.engines.simulated import Simulated
from fedstrata.estimators.gradients import gradient
from fedstrata.solving.pose import pose
from fedstrata.support.private_jax import dce_jaxpr
from fedstrata.testing.cases import all_cases
from fedstrata.testing.cases.compositional import loss
from fedstrata.testing.kit import Point, Small, kit_method

CASES = {case.name: case for case in all_cases() if "private_samples" in vars(type(case.method))}
PRIVATE = fs.Channel(examples=fs.Examples(clip=1.0, noise=1.0, values=2.0), delta=1e-3)
rng = np.random.default_rng(0)
QUIET = {"default_metrics": False, "progress": False, "certify": False}


def linear(*sizes, d=3):
    """Clients whose loss is linear: every sample's gradient is itself, wherever x is."""
    rows = [rng.normal(size=(n, d)) for n in sizes]
    return (
        fs.Minimization(lambda x, s: x @ s["a"]),
        fs.FederatedData.from_clients([{"a": r} for r in rows]),
        rows,
    )


# ---- nothing passes by


def read(case, monkeypatch):
    """Which arrays of the data a round depends on, where all that is bounded is replaced by zeros."""
    options = {"rounds": 1, "y0": case.y0, **case.solve, "channel": fs.Channel(examples=fs.Examples(1.0))}
    posed = pose(case.problem, case.method, case.data, case.x0, **options)
    monkeypatch.setattr(module, "_bounded", lambda op, bound, s: jax.tree.map(jnp.zeros_like, op(s)))
    make_fed, key, placed = Simulated().make_fed(), jax.random.key(0), case.data.placed()

    def text(method, state, memory, data, r):
        carry = Carry(state, memory)
        if method.starts():
            carry = before_rounds(make_fed, posed.setup, method, carry, key, data)
        return one_round(make_fed, posed.setup, method, carry, key, data, r)

    rest = posed.method, *posed.carry
    jaxpr = jax.make_jaxpr(text)(*rest, placed, jnp.int32(0)).jaxpr
    used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][len(jax.tree.leaves(rest)) :]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(placed)]
    return {name.split(".")[-1] for name, its in zip(names, used, strict=False) if its}


# FedDRO and SOBA on the kinds of problems whose levels have arithmetic means
row = CASES["feddro"]
CASES["feddro"] = replace(row, problem=fs.dro.chi2(loss, 2.0))
CASES["dsfeddro"] = replace(CASES["dsfeddro"], problem=fs.dro.chi2(loss, 2.0))
CASES["soba"] = replace(CASES["fedmsa"], method=fs.SOBA(0.1, 0.1, batch_size=2))
ELSEWHERE = {"fedstorm-composition"}  # asks for linear maps, which have no bound
QUICK = ("scaffold", "fedmsa", "fedrzo", "feddro")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES if n not in ELSEWHERE],
)
def test_a_round_depends_on_samples_through_bounded_means_alone(name, monkeypatch):
    """But for their numbers."""
    assert read(CASES[name], monkeypatch) <= {"sizes"}


def test_every_method_that_may_has_a_row():
    tried = {type(case.method) for name, case in CASES.items() if name not in ELSEWHERE}
    named = {cls for cls in METHODS.values() if "private_samples" in vars(cls)}
    assert tried == {cls for cls in named if cls.__module__.startswith("fedstrata.methods")}


REFUSED = {
    "another mean": "feddro",
    "in a form in which single samples have no bound": "fedstorm-composition",
    "not among the methods": "fastdro",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_passes_by_is_refused(reason):
    every = {case.name: case for case in all_cases()}
    with pytest.raises((TypeError, ValueError), match=reason):
        every[REFUSED[reason]].run(channel=PRIVATE)


TAKEN = {
    "single samples' weights": lambda client, f: f.weigh(),
    "every sample's value": lambda client, f: f.each(jnp.zeros(3)),
    "has no bound|have no bound": lambda client, f: f.silent(jnp.zeros(3)),
    "the samples themselves": lambda client, f: client.data["a"],
    "without a key": lambda client, f: client.train.full_mean(f.term)(jnp.zeros(3)),
    # else one noise for all of them, counted once; and of a derivative no noise at all
    "inside a transformation of JAX": lambda client, f: jax.vmap(lambda x: gradient(f, x))(jnp.eye(3)),
    "where one call may stand for many": lambda client, f: jax.lax.scan(
        lambda x, _: (gradient(f, x), None), jnp.zeros(3), None, 2
    )[0],
    "where one call may stand": lambda client, f: jax.vmap(
        lambda x: counting.repeat(2, lambda _, x: x - gradient(f, x), x)
    )(jnp.eye(3)),
    "functions of fedstrata.estimators for derivatives": lambda client, f: jax.grad(
        lambda x: f.apply(lambda mean: mean(x), "values")
    )(jnp.zeros(3)),
}


@pytest.mark.parametrize("what", TAKEN)
def test_samples_are_given_in_bounded_means_alone(what):
    class Taking(Small):
        private_samples = True

        def take(self, problem, client, key, x):
            return jnp.sum(TAKEN[what](client, client.mean(problem.loss, key, None)))

        def round(self, problem, fed, key, r, state):
            return Point(state.x + fed.average(self.take, key, state.x))

    problem, data, _ = linear(4, 4)
    with pytest.raises(TypeError, match=what):
        fs.solve(problem, kit_method(Taking)(), data, np.zeros(3), rounds=1, channel=PRIVATE, **QUIET)


# ---- what is given


def run(problem, method, data, examples, x0=None, **options):
    x0 = np.zeros(3) if x0 is None else x0
    channel = fs.Channel(examples=examples)
    return fs.solve(problem, method, data, x0, rounds=1, channel=channel, **{**QUIET, **options})


def test_every_sample_is_bounded_by_hand():
    problem, data, rows = linear(4, 7, 5)
    found = run(problem, fs.FedAvg(gamma=1.0), data, fs.Examples(clip=1.5))
    by_hand = [np.mean(a * np.minimum(1, 1.5 / np.linalg.norm(a, axis=1))[:, None], 0) for a in rows]
    assert 0 < sum((np.linalg.norm(a, axis=1) > 1.5).sum() for a in rows) < 16
    np.testing.assert_allclose(found.x, -np.mean(by_hand, 0), rtol=1e-5)


def test_a_sample_without_a_bound_counts_for_nothing():
    b = np.array([1.0, 0, 2, 0])
    data = fs.FederatedData.from_clients([{"b": b}] * 2)
    problem = fs.Minimization(lambda x, s: x.sum() / s["b"])
    assert np.isfinite(run(problem, fs.FedAvg(gamma=1.0), data, fs.Examples(clip=1.0)).x).all()


@pytest.mark.parametrize("batch_size", [None, 3])
def test_noise_has_its_deviation(batch_size):
    """z · C/b at each of m clients: in the mean √(Σ 1/b²)/m of it."""
    d, sizes = 20_000, (4, 8, 16)
    data = fs.FederatedData.from_clients([{"a": np.zeros((n, d))} for n in sizes])
    problem = fs.Minimization(lambda x, s: x @ s["a"])
    method = fs.FedAvg(gamma=1.0, batch_size=batch_size)
    found = run(problem, method, data, fs.Examples(clip=2.0, noise=1.5), np.zeros(d))
    b = np.array(sizes if batch_size is None else [3, 3, 3])
    deviation = 1.5 * 2.0 * np.sqrt((1 / b**2).sum()) / 3
    assert np.std(found.x) == pytest.approx(deviation, rel=0.02)  # of 20,000 draws: four standard errors


def test_a_minibatch_takes_every_sample_by_itself():
    """The sum over b counts how many of n came: binomial, mean 1 and variance (1 − b/n)/b."""
    data = fs.FederatedData.from_clients([{"a": np.ones((20, 1))}] * 400)
    problem = fs.Minimization(lambda x, s: x[0] * s["a"][0])

    class Each(Small):
        private_samples = True

        def take(self, problem, client, key, x):
            return gradient(client.mean(problem.loss, key, 5), x)[0]

        def round(self, problem, fed, key, r, state):
            return Point(fed.gather(self.take, key, state.x))

        def reveals_on(self, problem):
            return "replies"

    found = run(problem, kit_method(Each)(), data, fs.Examples(clip=1.0), np.zeros(400)).x * 5
    np.testing.assert_allclose(found, np.round(found), atol=1e-4)
    assert np.mean(found) == pytest.approx(5, abs=4 * np.sqrt(3.75 / 400))
    assert np.var(found) == pytest.approx(3.75, rel=4 * np.sqrt(2 / 400))


def test_differences_of_zeroth_order_methods_are_bounded_not_values():
    """A loss of a large constant: with bounded values the constant alone would fill the bound."""
    _, data, _ = linear(4, 6)
    far = fs.Minimization(lambda x, s: x @ s["a"] + 100.0)
    method = fs.FedRZO(gamma=0.1, eta=0.01, batch_size=None, two_sided=True)
    kept = run(far, method, data, fs.Examples(clip=1.0, values=1.0))
    plain = fs.solve(far, method, data, np.zeros(3), rounds=1, **QUIET)
    np.testing.assert_allclose(kept.x, plain.x, atol=2e-3)  # of rounding: 1e-5/η · n
    cut = run(far, method, data, fs.Examples(clip=1.0, values=1e-4))
    assert np.linalg.norm(cut.x) < 0.1 * np.linalg.norm(plain.x)


# ---- no noise comes twice


def test_spots_of_a_program_are_its_own():
    """In loops of both kinds, in maps, twice in a body: as many words as calls, the same at every trace."""
    words = []

    def say(x):
        key = jax.random.key_data(spot().fold(jax.random.key(0)))
        jax.debug.callback(lambda k: words.append(tuple(np.asarray(k).tolist())), key)
        return x

    def text(times):
        with spots():
            x = say(say(0.0))
            x = counting.repeat(3, lambda t, x: say(counting.repeat(times, lambda _, x: say(x), x)), x)
            x = counting.loop(2, lambda x, key: say(x), jax.random.key(0), x)
            return counting.each(say, jnp.full(4, x)).sum()

    for _ in range(2):
        jax.jit(text)(2).block_until_ready()
    jax.effects_barrier()
    assert len(words) == 2 * (2 + 3 + 6 + 2 + 4)
    assert len(set(words)) == len(words) / 2


UNKNOWN = {  # unlike numbers of steps: no ε
    "fedavg-full", "fedopt", "ditto", "simfbo", "fessgda", "fedrep", "fedkseed", "normalized-sgda",
}  # fmt: skip
MARKS = {"fedmspp": (), "fedmsa": pytest.mark.slow, "feddro": pytest.mark.slow}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=MARKS.get(n, pytest.mark.long)) for n in CASES if n not in ELSEWHERE | UNKNOWN],
)
def test_as_many_means_are_noised_as_are_accounted_for(name, monkeypatch):
    """Each with a key of its own, in loops that make an oracle once and those that make one at each turn."""
    keys, case, real = [], CASES[name], module.noised

    def told(key, u, deviation):
        jax.debug.callback(lambda k: keys.append(tuple(np.asarray(k).tolist())), jax.random.key_data(key))
        return real(key, u, deviation)

    monkeypatch.setattr(module, "noised", told)
    case.run(channel=PRIVATE, rounds=2, **QUIET)
    jax.effects_barrier()
    options = {"rounds": 2, "y0": case.y0, **case.solve, "channel": PRIVATE}
    spent = pose(case.problem, case.method, case.data, case.x0, **options).spending
    of = [(draws, n) for its, n in ((spent.start, 1), (spent.round, 2)) for draws in its.values()]
    accounted = sum(round(mu2 * times * n) for draws, n in of for _, mu2, times in draws)
    assert len(set(keys)) == len(keys)
    if name in ("fedmsa", "fedmsa-full", "lfd"):  # its second exchange asks some clients alone
        assert 0 < len(keys) < 5 * accounted
    else:
        assert len(keys) == 5 * accounted


def test_a_site_answers_another_question_with_other_noise(monkeypatch):
    """The same message has the same; with another sample, or another secret, all of it is another."""
    seen, call = [], Site.call
    monkeypatch.setattr(Site, "call", lambda self, *sent: seen.append((self, *sent)) or call(self, *sent))
    problem, data, _ = linear(4, 4, d=50)
    options = {"engine": Network(), "x0": np.zeros(50)}
    run(problem, fs.FedAvg(gamma=1.0), data, fs.Examples(clip=1e-6, noise=1e6), **options)
    site, header, arrays = seen[0]

    def sent(secret, fingerprint="a"):
        site.secret, site.fingerprint, site.last = secret, fingerprint, None
        return call(site, header, arrays)[1][0]

    first = sent(b"one")
    assert (sent(b"one") == first).all()
    for other in (sent(b"two"), sent(None), sent(b"one", "b")):
        assert not np.isclose(other, first).any()


@pytest.mark.slow
def test_a_site_keeps_a_budget_of_its_own(tmp_path, monkeypatch):
    """It is spent over runs, and what has no noise is refused: enough for three rounds here, not for four."""
    problem, data, _ = linear(4, 4)
    made, init = [], Site.__init__

    def with_allowance(self, *args, **options):
        init(self, *args, **options)
        file = tmp_path / f"{self.place.clients[0]}.json"
        self.allowance = Allowance(file, gaussian_epsilon(np.sqrt(3.5), 1e-3), 1e-3)
        made.append(self)

    monkeypatch.setattr(Site, "__init__", with_allowance)
    arguments = problem, fs.FedAvg(gamma=0.1), data, np.zeros(3)
    options = {**QUIET, "engine": "network", "channel": PRIVATE}
    fs.solve(*arguments, rounds=2, **options)
    with pytest.raises(RoundFailed, match="would exceed the site's budget"):
        fs.solve(*arguments, rounds=2, **options)
    assert made[-1].allowance.spent == {"train": {(1.0, 1.0): 3}}
    for changed in ({"default_metrics": True}, {"channel": fs.Channel(clip=1.0, noise=9.0)}):
        with pytest.raises(RoundFailed, match="without noise of its own"):
            fs.solve(*arguments, rounds=1, **{**options, **changed})
    each = fs.Channel(clip=1.0, noise=9.0, noise_at="each")
    fs.solve(*arguments, rounds=1, **{**options, "channel": each})
    assert made[-1].allowance.spent["clients"].total() == 1


# ---- what it costs


def costs(method, data, problem, rounds=10, **options):
    options = {"rounds": rounds, "channel": PRIVATE, **options}
    return pose(problem, method, data, np.zeros(3), **options).spending


def test_full_batches_are_one_gaussian():
    """Of μ² = the number of means over z²; training and validation samples apart."""
    problem, data, _ = linear(20, 30)
    spent = costs(fs.FedAvg(gamma=0.1, H=2), data, problem)
    assert spent.epsilon(10) == pytest.approx(gaussian_epsilon(np.sqrt(20), 1e-3), rel=1e-6)
    case = CASES["fedmsa-full"]
    bilevel = pose(
        case.problem, case.method, case.data, case.x0, y0=case.y0, rounds=1, channel=PRIVATE
    ).spending
    assert bilevel.of_part("train", 4) <= bilevel.epsilon(4)


def test_minibatches_are_those_of_the_smallest_client():
    """100 rounds of one mean over a tenth, z = 1, δ = 1e-3: 4.78, as for clients."""
    pytest.importorskip("dp_accounting")
    problem, data, _ = linear(40, 100)
    spent = costs(fs.FedAvg(gamma=0.1, batch_size=4), data, problem, 100)
    assert spent.epsilon(100) == pytest.approx(4.78, abs=0.02)
    assert spent.epsilon(100) < costs(fs.FedAvg(gamma=0.1, H=2, batch_size=4), data, problem).epsilon(100)


def test_the_noise_for_a_budget_and_the_end_of_it():
    problem, data, _ = linear(20, 30)
    arguments = problem, fs.FedAvg(gamma=0.1), data, np.zeros(3)
    channel = fs.plan_privacy(*arguments, epsilon=1.0, delta=1e-3, rounds=25, examples=fs.Examples(clip=2.0))
    assert gaussian_epsilon(5 / channel.examples.noise, 1e-3) == pytest.approx(1.0, rel=0.02)
    with pytest.warns(UserWarning, match="enough for 25"):
        found = fs.solve(*arguments, rounds=40, eval_every=5, channel=channel, **QUIET)
    assert found.status == "stopped"
    assert found.history["round"][-1] == 25
    assert found.history["epsilon"][-1] <= 1.0


def test_a_number_of_steps_that_is_known_later_has_no_epsilon():
    problem, data, _ = linear(20, 30)
    with pytest.raises(ValueError, match="not known beforehand"):
        costs(fs.FedAvg(gamma=0.1, H=np.array([1, 2])), data, problem, channel=replace(PRIVATE, epsilon=1.0))


def world(hidden, there, delta):
    """One canary, be it a sample or a client, whose gradient alone is not zero; or it is zero too."""
    a = np.zeros((8, 2))
    a[3, 0] = there
    if hidden in ("samples", "minibatches"):
        data = fs.FederatedData.from_clients([{"a": a}, {"a": np.zeros((8, 2))}])
        noise, batch_size = (4.0, None) if hidden == "samples" else (1.0, 2)
        method = fs.FedAvg(gamma=1.0, H=4, batch_size=batch_size)
        return method, data, fs.Channel(examples=fs.Examples(clip=1.0, noise=noise), delta=delta), 1.0
    data = fs.FederatedData.from_clients([{"a": row[None]} for row in a])
    noise, drawn = (2.0, 1.0) if hidden == "clients" else (1.0, fs.Poisson(0.3))
    return fs.FedAvg(gamma=1.0), data, fs.Channel(clip=1.0, noise=noise, delta=delta), drawn


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["samples", "minibatches", "clients", "drawn clients"])
def test_a_canary_stays_below_what_epsilon_allows(hidden):
    """The best attack on 8,000 models, half of which saw it: true positives ≤ e^ε · false ones + δ.

    The attack, which knows all else, looks along the canary's gradient. Where nothing is drawn that is the
    whole Gaussian's, so that it must find much of ε as well.
    """
    pytest.importorskip("dp_accounting")
    from scipy.stats import beta

    delta, runs, rounds = 1e-2, 4000, 4
    problem, seen, eps = fs.Minimization(lambda x, s: x @ s["a"]), [], 0.0
    for there in (0, 1):
        method, data, channel, drawn = world(hidden, there, delta)
        posed = pose(problem, method, data, np.zeros(2), rounds=rounds, channel=channel, participation=drawn)
        eps, placed = posed.spending.epsilon(rounds), data.placed()

        def run(key, posed=posed, placed=placed):
            make_fed, carry = Simulated().make_fed(), posed.carry
            for r in range(rounds):
                carry = one_round(make_fed, posed.setup, posed.method, carry, key, placed, jnp.int32(r))
            return -carry.state.own.x[0]

        seen.append(np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(there), runs))))
    found = 0.0
    for level in np.linspace(-1, 3, 41) * np.std(seen[0]):
        k_false, k_true = (seen[0] > level).sum(), (seen[1] > level).sum()
        false = (
            beta.ppf(0.9995, k_false + 1, runs - k_false) if k_false < runs else 1.0
        )  # Clopper and Pearson
        true = beta.ppf(0.0005, k_true, runs - k_true + 1) if k_true else 0.0
        if true > delta:
            found = max(found, np.log((true - delta) / false))
    assert found <= eps
    if hidden in ("samples", "clients"):
        assert found > 0.3 * eps
