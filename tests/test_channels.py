"""Channels: what they are to change and nothing else, against closed forms; and what is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.channels.clipping import noised, normal
from fedstrata.channels.compression import read
from fedstrata.channels.privacy import gaussian_epsilon
from fedstrata.engines.engine import Carry
from fedstrata.engines.network import Network, Policy
from fedstrata.engines.network.site import Site
from fedstrata.engines.rounds import before_rounds, one_round
from fedstrata.engines.simulated import Simulated
from fedstrata.solving.pose import pose
from fedstrata.support.private_jax import dce_jaxpr
from fedstrata.testing.cases import all_cases
from fedstrata.testing.kit import Point, Small, kit_method

CASES = {case.name: case for case in all_cases()}
QUICK = ("scaffold", "feddro", "fedmsa", "fednest")  # memory, a loop, a draw, an open loop


def rounds_of(case, **changes):
    """The equations of the start and of a round on which the method's own state and the memory depend."""
    options = {"rounds": 1, "y0": case.y0, **case.solve, **changes}
    posed = pose(case.problem, case.method, case.data, case.x0, **options)
    make_fed, key, placed = Simulated().make_fed(), jax.random.key(0), case.data.placed()

    def text(method, state, memory, data, r):
        carry = Carry(state, memory)
        if method.starts():
            carry = before_rounds(make_fed, posed.setup, method, carry, key, data)
        after = one_round(make_fed, posed.setup, method, carry, key, data, r)
        return method.plain_state(after.state), after.memory

    jaxpr = jax.make_jaxpr(text)(posed.method, *posed.carry, placed, jnp.int32(0)).jaxpr
    equations = str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])
    # JAX 0.12 also prints how a loop's arguments were grouped, and those that were left out
    return re.sub(r"\bft_\w+=.*?(?=\s\w+=)", "", equations, flags=re.DOTALL)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_an_empty_channel_is_the_same_program(name):
    """Without what nothing depends on: so it has the same iterates, bit for bit."""
    case = CASES[name]
    assert rounds_of(case, channel=fs.Channel()) == rounds_of(case)


# ---- one round on losses that are linear in x: every client's upload is x − γ·(its slope), by hand


def linear(slopes, sizes=None):
    """Clients whose loss has these slopes; some with several equal samples."""
    sizes = np.ones(len(slopes), int) if sizes is None else sizes
    data = fs.FederatedData.from_clients(
        [{"a": np.tile(s, (n, 1))} for s, n in zip(slopes, sizes, strict=True)]
    )
    return fs.Minimization(lambda x, s: x @ s["a"]), data


def run_on(slopes, sizes=None, rounds=1, method=None, **options):
    problem, data = linear(slopes, sizes)
    x0 = np.zeros(np.shape(slopes)[1])
    method = fs.FedAvg(gamma=1.0) if method is None else method
    options = {"default_metrics": False, "progress": False, "certify": False, "rounds": rounds, **options}
    return fs.solve(problem, method, data, x0, **options)


rng = np.random.default_rng(0)
SLOPES = rng.normal(size=(6, 5))


def test_clips_differences_by_hand():
    found = run_on(SLOPES, sizes=[1, 2, 3, 1, 2, 3], weights="size", channel=fs.Channel(clip=1.5))
    size = np.linalg.norm(SLOPES, axis=1)
    assert 0 < (size > 1.5).sum() < 6
    shares = np.array([1, 2, 3, 1, 2, 3]) / 12
    np.testing.assert_allclose(found.x, -shares @ (SLOPES * np.minimum(1, 1.5 / size)[:, None]), rtol=1e-5)


def test_an_adaptive_clip_comes_to_the_quantile():
    """It moves until that part of the uploads is below it: between the third and the fourth of six norms."""
    channel = fs.Channel(clip=fs.Adaptive(start=10.0, quantile=0.5, rate=0.1))
    found = run_on(SLOPES, rounds=100, channel=channel)
    size = np.sort(np.linalg.norm(SLOPES, axis=1))
    assert size[2] * 0.95 < found.history["clip/round 0"][-1] < size[3] * 1.05


@pytest.mark.parametrize(("where", "root"), [("server", 1), ("clients", 1), ("each", 8**0.5)])
@pytest.mark.parametrize("weights", [pytest.param("uniform", marks=pytest.mark.slow), "size"])
def test_noise_has_its_deviation(where, root, weights):
    """z · C · (largest weight); or as much on each upload, which adds up to √(Σ w²) of it."""
    sizes = np.arange(1, 9)
    shares = sizes / sizes.sum() if weights == "size" else np.full(8, 1 / 8)
    channel = fs.Channel(clip=2.0, noise=1.5, noise_at=where)
    found = run_on(np.zeros((8, 20_000)), sizes=sizes, weights=weights, channel=channel)
    deviation = 3.0 * (shares.max() if root == 1 else np.sqrt((shares**2).sum()))
    assert np.std(found.x) == pytest.approx(deviation, rel=0.02)  # of 20,000 draws: four standard errors
    assert abs(np.mean(found.x)) < 4 * deviation / 20_000**0.5


def test_normal_numbers_are_normal_to_the_tails():
    """Of 3·10⁵ draws, by Kolmogorov's distance; beyond 5.4 deviations by hand, where JAX's own end."""
    from scipy.stats import kstest, norm

    found = np.asarray(normal(jax.random.key(0), 300_001, jnp.float32), float)
    assert kstest(found, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found[:150_000], found[150_000:-1])[0, 1]) < 0.011
    for words in (0, 1, 10, 1000, 2**20, 2**30):
        p = (words + 0.5) / 2**31
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedstrata.channels.clipping.threefry_2x32", lambda *_, w=words: jnp.uint32([w]))
            assert normal(jax.random.key(0), 1, jnp.float32)[0] == pytest.approx(norm.isf(p / 2), rel=5e-4)


class SameKey(Small):
    """Four exchanges in a loop, all with one key, whose uploads are zero."""

    def zero(self, problem, client, key, x):
        return jnp.zeros_like(x)

    def round(self, problem, fed, key, r, state):
        return Point(fed.repeat(4, lambda t, x: x + fed.average(self.zero, key, x), state.x))


SameKey = kit_method(SameKey)


@pytest.mark.parametrize("engine", ["simulated", pytest.param("network", marks=pytest.mark.slow)])
def test_noise_is_drawn_anew_in_every_exchange_of_a_loop(engine):
    """Four of them add up to twice the deviation; repeated, they would to four times."""
    channel = fs.Channel(clip=1.0, noise=3.0, noise_at="each")
    found = run_on(np.zeros((9, 4000)), method=SameKey(), channel=channel, engine=engine)
    assert np.std(found.x) == pytest.approx(2.0, rel=0.05)


class Some(Small):
    """A mean of zeros over ten of a round's clients."""

    def zero(self, problem, client, key, x):
        return jnp.zeros_like(x)

    def round(self, problem, fed, key, r, state):
        return Point(fed.average(self.zero, key, state.x, of=fed.sample(key, 10)))


def test_noise_of_a_mean_over_some_of_an_independent_draw():
    """Ten of 40, of which 20 are expected: each counts for 40/(10 · 20)."""
    options = {"participation": fs.Poisson(0.5), "channel": fs.Channel(clip=1.0, noise=3.0)}
    found = run_on(np.zeros((40, 4000)), method=kit_method(Some)(), **options)
    assert np.std(found.x) == pytest.approx(0.6, rel=0.05)


def test_noise_hides_a_negative_weight_as_well():
    """z · C · 3 for the weights −3, 2 and 2."""

    class Against(SameKey):
        def round(self, problem, fed, key, r, state):
            return Point(fed.average(self.zero, key, state.x, weights=jnp.array([-3.0, 2.0, 2.0])))

    channel = fs.Channel(clip=1.0, noise=4.0)
    found = run_on(np.zeros((3, 4000)), method=kit_method(Against)(), channel=channel)
    assert np.std(found.x) == pytest.approx(12.0, rel=0.05)


@pytest.mark.parametrize("where", ["server", "each"])
def test_noise_from_the_system_is_not_that_of_the_seed(where):
    """It has the same deviation, and is new in every run."""
    channel = fs.Channel(clip=1.0, noise=2.0, noise_at=where, seeded=False)
    one, other = (np.asarray(run_on(np.zeros((4, 4000)), channel=channel).x) for _ in range(2))
    seeded = np.asarray(run_on(np.zeros((4, 4000)), channel=replace(channel, seeded=True)).x)
    for a, b in itertools.combinations((one, other, seeded), 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
    assert np.std(one) == pytest.approx(np.std(seeded), rel=0.1)


@pytest.mark.slow
def test_who_is_drawn_is_as_secret_as_the_noise(monkeypatch):
    """Else ε, which counts on it, does not hold for those who know the seed; the same in every engine."""
    options = {"participation": fs.Poisson(0.3), "channel": fs.Channel(clip=9.0, noise=0.0, seeded=False)}
    one, other = (np.asarray(run_on(SLOPES, rounds=4, **options).x) for _ in range(2))
    assert not np.allclose(one, other)
    monkeypatch.setattr("os.urandom", lambda number: bytes(range(number)))
    engines = fs.engines.Simulated(), fs.engines.Streamed(), Network()
    found = [np.asarray(run_on(SLOPES, rounds=4, engine=engine, **options).x) for engine in engines]
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5, atol=1e-6)


def test_the_server_of_sites_elsewhere_draws_noise_that_they_do_not_know():
    problem, data = linear(SLOPES)
    channel = fs.Channel(clip=1.0, noise=1.0)
    posed = pose(problem, fs.FedAvg(gamma=1.0), data, np.zeros(5), rounds=1, channel=channel)
    there, here = Network(remote=object()), Network()
    one, other = (there.carried(posed.method, posed.carry).state.secret for _ in range(2))
    assert (one != other).any()
    assert here.carried(posed.method, posed.carry).state.secret is None


LOOPS = {
    "fori_loop": lambda f, x: jax.lax.fori_loop(0, 4, lambda t, x: f(x), x),
    "cond": lambda f, x: jax.lax.cond(x[0] < 9, f, lambda x: x, x),
    "jit": lambda f, x: jax.jit(f)(jax.jit(f)(x)),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])).sum(0),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("inside", [False, True])
def test_verbs_in_loops_of_jax_are_refused(loop, inside):
    """They would be booked once, and have the same noise in every turn; in those of `fed.repeat` too."""

    class Looping(SameKey):
        def round(self, problem, fed, key, r, state):
            def body(t, x):
                return LOOPS[loop](lambda x: x + fed.average(self.zero, key, x), x)

            return Point(fed.repeat(2, body, state.x) if inside else body(0, state.x))

    with pytest.raises(TypeError, match=r"use fed\.repeat"):
        run_on(SLOPES, method=kit_method(Looping)())


@pytest.mark.parametrize("hidden", [{"noise": 1.0}, {"examples": fs.Examples(1.0, 1.0)}])
def test_a_text_that_passes_noise_by_has_no_epsilon(hidden):
    """`fed.mean` is for metrics: in a round no channel sees it. All other exchanges keep their channels."""

    class Passing(Small):
        private_samples = True

        def zero(self, problem, client, key, x):
            return jnp.zeros_like(x)

        def round(self, problem, fed, key, r, state):
            passed = fed.mean(lambda x, s: s["a"], state.x)
            return Point(passed + fed.average(self.zero, key, state.x))

    method = kit_method(Passing)()
    channel = fs.Channel(**{"clip": 1.0, **hidden} if "noise" in hidden else hidden)
    with pytest.warns(UserWarning, match=r"'fed\.mean' sends numbers"):
        found = run_on(SLOPES, method=method, channel={"*": channel})
    assert "epsilon" not in found.history
    assert np.allclose(found.x, SLOPES.mean(0), atol=1e-6) is ("examples" in hidden)
    with pytest.raises(ValueError, match=r"cannot be kept: 'fed\.mean'"):
        run_on(SLOPES, method=method, channel={"*": replace(channel, epsilon=1.0)})


def test_what_is_not_finite_counts_for_nothing_under_noise():
    """Else its NaN would show that a client takes part."""
    method, channel = fs.FedAvg(gamma=10.0), fs.Channel(clip=2.0, noise=0.0)
    found = run_on(np.array([[1e38, 1.0], [1e30, 1e30], [0.0, -1.0]]), method=method, channel=channel)
    np.testing.assert_allclose(found.x, [0, 2 / 3], rtol=1e-6)


def test_a_run_over_a_set_ends_with_a_channel():
    problem, data = linear(SLOPES)
    problem = replace(problem, project=fs.sets.Box(-0.1, 0.1))
    found = fs.solve(problem, fs.FedAvg(gamma=1.0), data, np.zeros(5), rounds=1, progress=False,
                     channel=fs.Channel(clip=1.0), default_metrics=False, certify=False)  # fmt: skip
    assert np.abs(found.x).max() <= 0.1 + 1e-6


def asked_of_sites(monkeypatch, channel):
    """What two sites were asked first: the site, the request's header and arrays."""
    seen, call = [], Site.call
    monkeypatch.setattr(
        Site, "call", lambda self, *request: seen.append((self, *request)) or call(self, *request)
    )
    run_on(np.zeros((2, 50)), channel=channel, engine=Network())
    return *seen[0], call


def test_a_site_is_not_sent_the_key_of_the_noise_at_the_server(monkeypatch):
    seen, call = [], Site.call
    monkeypatch.setattr(Site, "call", lambda self, *request: seen.append(request[1]) or call(self, *request))
    channel = fs.Channel(clip=1.0, noise=2.0, seeded=False)
    noise = np.asarray(run_on(np.zeros((2, 50)), channel=channel, engine=Network()).x)
    words = [np.asarray(a) for a in seen[0] if a.dtype == np.uint32]
    assert len(words) == 3  # of the phase, of the exchange, of each client's noise
    for key in map(jax.random.wrap_key_data, words):
        guess = noised(jax.random.fold_in(key, 3), [jnp.zeros(50)], 1.0)[0]
        assert not np.allclose(noise, guess, atol=1e-3)


def test_a_site_adds_its_noise_whatever_the_server_says(monkeypatch):
    """Its part of it, where sites share it, and to the count of an adaptive clip."""
    channel = fs.Channel(clip=fs.Adaptive(noise=3.0), noise=1.0, noise_at="clients")
    site, header, arrays, call = asked_of_sites(monkeypatch, channel)
    (part,) = (j for j, a in enumerate(arrays) if a.shape == () and abs(a - 0.5**0.5) < 1e-6)
    arrays[part], site.secret, site.last = np.float32(0.0), b"secret", None
    upload, below = call(site, header, arrays)[1]
    assert np.std(2 * upload) == pytest.approx(0.5**0.5, rel=0.4)
    assert abs(2 * below - 1) > 1e-3


def test_a_site_draws_its_noise_from_its_own_secret(monkeypatch):
    """The same message has the same noise; another message, or another site's secret, has another."""
    channel = fs.Channel(clip=1.0, noise=1.0, noise_at="each")
    site, header, arrays, call = asked_of_sites(monkeypatch, channel)

    def sent(secret, *changed):
        site.secret, site.last = secret, None
        return call(site, header, [*arrays[:3], *changed, *arrays[3 + len(changed) :]])[1][0]

    first = sent(b"one")
    assert (sent(b"one") == first).all()
    for other in (sent(b"two"), sent(None), sent(b"one", arrays[3] + 1) - 0.5):
        assert not np.isclose(other, first).any()


# ---- compressors

V = rng.normal(size=1000).astype(np.float32) * np.geomspace(1, 1e-3, 1000, dtype=np.float32)


def made_of(compressor, v, seed=0):
    key = jax.random.key(seed)
    return np.asarray(compressor.decode(key, compressor.encode(key, jnp.asarray(v)), v.size))


@pytest.mark.parametrize("d", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_the_largest_numbers_are_kept(d):
    """At least 0.99 k, and all k for numbers of one size; above 512 numbers, found by bisection."""
    v = np.resize(V, d) * np.geomspace(1, 2, d, dtype=np.float32)
    found = made_of(fs.TopK(0.1), v)
    n = np.count_nonzero(found)
    assert 0.099 * d <= n <= 0.1 * d
    np.testing.assert_array_equal(np.sort(np.abs(found))[-n:], np.sort(np.abs(v))[-n:])
    assert np.sum((found - v) ** 2) <= 0.9 * np.sum(v**2)
    ones = made_of(fs.TopK(0.1), np.ones(d, np.float32))
    assert np.sum((ones - 1) ** 2) == 0.9 * d


@pytest.mark.parametrize("compressor", [fs.TopK(0.1), fs.RandK(0.1), fs.RandK(0.1, scaled=True)])
@pytest.mark.parametrize("d", [50, 5000])
def test_what_is_read_is_what_is_decoded(compressor, d):
    v, key = jnp.resize(jnp.asarray(V), d), jax.random.key(0)
    np.testing.assert_allclose(read(compressor, key, v), made_of(compressor, v), rtol=1e-6)


def test_signs_have_their_contraction():
    found, d = made_of(fs.Sign(), V), V.size
    share = np.abs(V).sum() ** 2 / (d * np.sum(V**2))
    np.testing.assert_allclose(np.sum((found - V) ** 2), (1 - share) * np.sum(V**2), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [fs.QSGD(8), fs.QSGD(2), fs.RandK(0.25, scaled=True)])
def test_unbiased_compressors_are_unbiased(compressor):
    """Their mean is v to five standard errors, and their variance below ω."""
    number, v = 400, jnp.asarray(V[:600])
    many = jax.vmap(lambda key: compressor.decode(key, compressor.encode(key, v), v.size))
    found = np.asarray(many(jax.random.split(jax.random.key(1), number)))
    omega = 3.0
    if isinstance(compressor, fs.QSGD):
        s = compressor.levels
        omega = min(512 / (4 * s**2), 512**0.5 / s)
    variance = ((found - V[:600]) ** 2).sum(1).mean() / np.sum(V[:600] ** 2)
    assert variance <= 1.1 * omega
    error = np.linalg.norm(found.mean(0) - V[:600]) / np.linalg.norm(V[:600])
    assert error < 1.5 * np.sqrt(variance / number)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_scaled_levels_are_a_contraction(bits, seed):
    """Unbiased ones of two bits err by more than v."""
    v = np.random.default_rng(seed).normal(size=512).astype(np.float32)
    errors = [np.sum((made_of(fs.QSGD(bits, one), v, seed) - v) ** 2) / np.sum(v**2) for one in (True, False)]
    assert errors[1] < min(1, errors[0])
    assert bits == 4 or errors[0] > 1


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-35, 1e35])
def test_levels_of_tiny_and_huge_numbers(size):
    v = np.array([size, 0, -size, size / 2], np.float32)
    np.testing.assert_allclose(made_of(fs.QSGD(8), v), v, atol=max(size / 127, 2e-44))


@pytest.mark.slow
def test_every_bit_is_counted():
    """d = 1001 numbers of 5 clients in 3 rounds."""
    slopes, each = np.ones((5, 1001)), 3 * 5
    sent = {
        fs.TopK(0.1): 101 * (4 + 2),
        fs.RandK(0.1): 101 * 4,
        fs.QSGD(8): 1001 + 2 * 4,
        fs.QSGD(4): 501 + 2 * 4,
        fs.QSGD(2): 251 + 2 * 4,
        fs.Sign(): 126 + 4,
        fs.channels.Cast("bfloat16"): 1001 * 2,
    }
    for compressor, size in sent.items():
        found = run_on(slopes, rounds=3, channel=fs.Channel(compress=compressor)).ledger
        assert (found.bytes_up, found.bytes_down) == (each * size, each * 1001 * 4), compressor


@pytest.mark.parametrize(
    "compressor",
    [
        fs.TopK(0.1),
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in (fs.QSGD(2), fs.Sign(), fs.RandK(0.1, scaled=True), fs.channels.Cast("float8_e5m2"))
        ),
    ],
)
def test_sites_send_what_the_ledger_counts(compressor, monkeypatch):
    """Bytes of the arrays that travel; and the iterates are those of the simulated engine."""
    call, sent = Site.call, []

    def counted(self, *request):
        header, arrays = call(self, *request)
        sent.append(sum(array.nbytes for array in arrays))
        return header, arrays

    monkeypatch.setattr(Site, "call", counted)
    slopes, channel = rng.normal(size=(5, 1001)), fs.Channel(compress=compressor)
    options = {"rounds": 4, "participation": 3, "channel": channel}
    simulated = run_on(slopes, **options)
    found = run_on(slopes, engine=Network(), **options)
    assert sum(sent) == found.ledger.bytes_up == simulated.ledger.bytes_up
    np.testing.assert_allclose(found.x, simulated.x, rtol=1e-5, atol=1e-6)


def quadratics(clients=6, d=8):
    rng = np.random.default_rng(1)
    own = [{"A": np.diag(rng.uniform(0.5, 2, d))[None], "b": rng.normal(size=(1, d))} for _ in range(clients)]
    H = np.mean([c["A"][0] for c in own], axis=0)
    solution = np.linalg.solve(H, np.mean([c["b"][0] for c in own], axis=0))
    problem = fs.Minimization(lambda x, s: 0.5 * x @ s["A"] @ x - s["b"] @ x)
    return problem, fs.FederatedData.from_clients(own), solution


def off(method, rounds=400, **options):
    problem, data, solution = quadratics()
    found = fs.solve(
        problem, method, data, np.zeros(8), rounds=rounds, eval_every=rounds, progress=False, certify=False,
        **options,
    )  # fmt: skip
    return np.linalg.norm(found.x - solution) / np.linalg.norm(solution)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "right", "wrong"),
    [(fs.FedAvg(gamma=0.1), "ef21", "ef"), (fs.SCAFFOLD(eta_l=0.05, eta_g=0.5, K=2), "ef", "ef21")],
)
def test_the_feedback_that_a_method_bears_reaches_the_solution(method, right, wrong, monkeypatch):
    """Differences to what the server has; and where it adds increments up, what was left out."""
    share = fs.TopK(0.25)
    assert off(method, 1500, channel=fs.Channel(compress=share)) < 1e-4  # "auto"
    assert off(method, 1500, channel=fs.Channel(compress=share, feedback=right)) < 1e-4
    assert off(method, 1500, channel=fs.Channel(compress=share, feedback=None)) > 1e-2
    monkeypatch.setattr(type(method), "feedback", wrong)  # otherwise it is refused
    assert off(method, 1500, channel=fs.Channel(compress=share)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CODASCA", "FESSGDA", "FedAPD", "QFedAvg"])
def test_a_quarter_of_the_entries_leads_where_all_do(name):
    """Control variates are sums of increments, gradients are not: each with the feedback it declares."""
    toy = fs.quadratic_minimax(clients=6, seed=1)
    if name in ("CODASCA", "FESSGDA"):
        posed = (toy.problem, toy.data, np.zeros(5), np.zeros(8))
    else:
        own = np.random.default_rng(1)
        parts = [{"a": own.normal(size=(6, 8)), "b": own.normal(size=6) + i} for i in range(5)]
        ridge = fs.Minimization(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2 + 0.05 * x @ x)
        posed = (ridge, fs.FederatedData.from_clients(parts), np.zeros(8), None)
    problem, data, x0, y0 = posed
    method = fs.plan(*posed, name).method
    options = {"y0": y0, "rounds": 1500, "eval_every": 1500, "progress": False, "certify": False}
    plain = fs.solve(problem, method, data, x0, **options).x
    few = fs.solve(problem, method, data, x0, channel=fs.Channel(compress=fs.TopK(0.25)), **options).x
    assert np.linalg.norm(few - plain) < 1e-4 * np.linalg.norm(plain)


@pytest.mark.slow
def test_an_unbiased_compressor_without_noise_at_the_end():
    """Of 2 bits, ω > 1, it comes to rest with a shift, see DIANA, and does not without."""
    assert off(fs.FedAvg(gamma=0.1), 1500, channel=fs.Channel(compress=fs.QSGD(2))) < 1e-4  # "auto"
    assert off(fs.FedAvg(gamma=0.1), 1500, channel=fs.Channel(compress=fs.QSGD(2), feedback=None)) > 1e-2


# ---- robust means

ROWS = rng.normal(size=(10, 7)).astype(np.float32)
HERE = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1, 1], bool)


def krum(rows, f, keep):
    """By the definition, with the n − f − 1 nearest others."""
    far = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    score = np.sort(far, axis=1)[:, 1 : len(rows) - f].sum(1)
    return rows[np.argsort(score)[:keep]].mean(0)


def mixed(rows, f):
    far = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    return np.array([rows[np.argsort(row)[: len(rows) - f]].mean(0) for row in far])


BY_HAND = {
    "trimmed": (fs.TrimmedMean(0.2), lambda r: np.sort(r, axis=0)[2:-2].mean(0)),
    "median": (fs.Median(), lambda r: np.median(r, axis=0)),
    "krum": (fs.Krum(0.2), lambda r: krum(r, 2, 1)),
    "multi-krum": (fs.MultiKrum(0.2), lambda r: krum(r, 2, len(r) - 2)),
    "mixed and trimmed": (
        fs.TrimmedMean(0.2, mixing=True), lambda r: np.sort(mixed(r, 2), axis=0)[2:-2].mean(0),
    ),
    "wide clipping": (fs.CenteredClipping(radius=1e6), lambda r: r.mean(0)),
    "buckets of all": (fs.Median(bucketing=10), lambda r: r.mean(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_robust_means_by_hand(name):
    """Of those who answer: what the others hold is not read."""
    mean, by_hand = BY_HAND[name]
    for here in (np.ones(10, bool), HERE):
        rows = np.where(here[:, None], ROWS, np.nan)
        found = mean(jax.random.key(0), jnp.asarray(rows), jnp.asarray(here), jnp.arange(10))
        np.testing.assert_allclose(found, by_hand(ROWS[here]), rtol=2e-5, atol=1e-6)


def test_the_geometric_median_is_where_the_unit_vectors_cancel():
    found = fs.GeometricMedian(steps=200)(jax.random.key(0), jnp.asarray(ROWS), jnp.ones(10, bool), None)
    apart = ROWS - np.asarray(found)
    units = apart / np.linalg.norm(apart, axis=1, keepdims=True)
    assert np.linalg.norm(units.sum(0)) < 1e-3


def test_centred_clipping_bounds_what_one_upload_does():
    rows = ROWS.copy()
    rows[0] = 1e6
    mean = fs.CenteredClipping(radius=1.0, steps=5)
    a, b = (mean(jax.random.key(0), jnp.asarray(r), jnp.ones(10, bool), None) for r in (ROWS, rows))
    assert np.linalg.norm(a - b) < 2.0


def test_robust_means_are_those_of_byzfl():
    """Version 0.0.11, where it is installed, and attacks as well."""
    byzfl, every, here = pytest.importorskip("byzfl"), jnp.asarray(ROWS), jnp.ones(10, bool)
    pairs = [
        (fs.TrimmedMean(0.2), byzfl.TrMean(f=2)),
        (fs.Median(), byzfl.Median()),
        (fs.GeometricMedian(steps=200), byzfl.GeometricMedian(nu=1e-6, T=200)),  # from unlike starts
        (fs.Krum(0.2), byzfl.Krum(f=2)),
        (fs.MultiKrum(0.2), byzfl.MultiKrum(f=2)),
        (fs.CenteredClipping(radius=0.5, steps=5), byzfl.CenteredClipping(L=5, tau=0.5)),
        (fs.TrimmedMean(0.2, mixing=True), lambda rows: byzfl.TrMean(f=2)(byzfl.NNM(f=2)(rows))),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            ours(jax.random.key(0), every, here, None), theirs(ROWS), rtol=2e-6, atol=2e-7
        )
    attacks = [
        # to the other side, with the deviation of a sample
        (fs.channels.ALIE(fs.channels.Mean(), 2, z=-1.5 * (8 / 7) ** 0.5), byzfl.ALittleIsEnough(tau=1.5)),
        (
            fs.channels.InnerProduct(fs.channels.Mean(), 2, factor=2.0),
            byzfl.InnerProductManipulation(tau=2.0),
        ),
    ]
    for ours, theirs in attacks:
        sent = np.asarray(ours(jax.random.key(0), every, here, jnp.arange(10))) * 10 - ROWS[2:].sum(0)
        np.testing.assert_allclose(sent / 2, theirs(ROWS[2:]), rtol=1e-4, atol=1e-5)


def test_flipped_labels():
    """Of the first clients K − 1 − y; the others', and all else, stay as they are."""
    data = fs.FederatedData.from_clients([{"y": np.array([0, 1, 9]), "a": np.arange(3.0)} for _ in range(3)])
    found = fs.data.flip_labels(data, clients=1, classes=10)
    assert [found.client(i)["y"].tolist() for i in range(3)] == [[9, 8, 0], [0, 1, 9], [0, 1, 9]]
    assert (found.train["a"] == data.train["a"]).all()
    with pytest.raises(ValueError, match="no entry 'label'"):
        fs.data.flip_labels(data, clients=1, classes=10, label="label")


ATTACKS = fs.channels.SignFlip, fs.channels.ALIE, fs.channels.InnerProduct, fs.channels.Mimic


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_replace_the_first_uploads(attack):
    rows, here = jnp.asarray(ROWS), jnp.ones(10, bool)
    every = np.asarray(attack(fs.channels.Mean(), clients=2)(jax.random.key(0), rows, here, jnp.arange(10)))
    honest = ROWS[2:]
    sent = {
        "SignFlip": -ROWS[:2],
        "InnerProduct": np.tile(-0.5 * honest.mean(0), (2, 1)),
        "Mimic": ROWS[[9, 9]],
        "ALIE": None,
    }[attack.__name__]
    if sent is None:  # the paper's z for n = 10, 2 of them hostile: Φ(z) = (8 − 4)/8
        sent = np.tile(honest.mean(0), (2, 1))
    np.testing.assert_allclose(every, np.concatenate([sent, honest]).mean(0), rtol=1e-4, atol=1e-5)


def test_a_robust_mean_holds_against_a_hostile_upload():
    slopes = SLOPES.copy()
    slopes[0] *= 1e6
    found = run_on(slopes, channel=fs.Channel(mean=fs.TrimmedMean(0.2)))
    np.testing.assert_allclose(found.x, -np.sort(slopes, axis=0)[2:-2].mean(0), rtol=1e-4)
    assert found.ledger.gathers == 1  # single replies are seen


# ---- who answers


def test_who_drops_out_counts_for_nothing():
    dropouts = fs.Dropouts(0.5)
    means = {
        tuple(np.round(-SLOPES[list(some)].mean(0), 4))
        for k in range(1, 7)
        for some in itertools.combinations(range(6), k)
    }
    ledgers = set()
    for seed in range(6):
        found = run_on(SLOPES, seed=seed, dropouts=dropouts)
        assert not np.any(found.x) or any(np.allclose(found.x, m, atol=2e-4) for m in means)
        ledgers.add((found.ledger.bytes_up, found.ledger.gradients))
        assert found.ledger.gradients * 20 == found.ledger.bytes_up
        assert found.ledger.bytes_down == 6 * 20
    assert len(ledgers) > 1


def test_where_nobody_answers_nothing_moves():
    assert not np.any(run_on(SLOPES, rounds=3, dropouts=fs.Dropouts(1 - 1e-9)).x)


@pytest.mark.slow
def test_scaffold_bears_clients_that_drop_out_before_they_compute():
    """After it, they have changed the control variates that the server never hears of."""
    method = fs.SCAFFOLD(eta_l=0.1, eta_g=0.5, K=3)
    assert off(method, 600, dropouts=fs.Dropouts(0.3)) < 1e-5
    assert off(method, 600, dropouts=fs.Dropouts(0.3, when="after")) > 1e-2


def test_independent_draws_take_part_with_their_probability():
    """Bytes are of those who were drawn; room for all of them."""
    found = run_on(np.zeros((40, 1)), rounds=200, participation=fs.Poisson(0.3))
    took_part = found.ledger.bytes_up / 4
    assert took_part == pytest.approx(200 * 12, abs=5 * np.sqrt(200 * 40 * 0.21))
    assert found.ledger.bytes_up == found.ledger.bytes_down == 4 * found.ledger.gradients


@pytest.mark.slow
def test_with_noise_a_mean_over_independent_draws_is_divided_by_their_expected_number():
    """With equal uploads of −1 the mean is minus the part of the expected number that came."""
    channel = fs.Channel(clip=1e6, noise=0.0)
    steps = []
    for seed in range(40):
        found = run_on(np.ones((10, 1)), seed=seed, participation=fs.Poisson(0.4), channel=channel)
        number = found.ledger.bytes_up / 4
        steps.append(number)
        np.testing.assert_allclose(found.x, -number / 4, rtol=1e-6)
    assert min(steps) < 4 < max(steps)


def test_who_answers_by_a_trace_and_by_a_deadline():
    """By hand: two clients in even rounds and four in odd ones; then those who are fast enough."""
    trace = np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    found = run_on(SLOPES, rounds=3, dropouts=fs.Dropouts(trace=trace))
    by_hand = 2 * SLOPES[:2].mean(0) + SLOPES[2:].mean(0)
    np.testing.assert_allclose(found.x, -by_hand, rtol=1e-5)
    assert found.ledger.bytes_up == (2 + 4 + 2) * 20
    late = fs.Dropouts(seconds=np.array([[1, 1, 1, 9, 9, 9], [9, 9, 9, 9, 1, 9]]), deadline=2.5)
    found = run_on(SLOPES, rounds=2, dropouts=late)
    np.testing.assert_allclose(found.x, -SLOPES[:3].mean(0) - SLOPES[4], rtol=1e-5)


@pytest.mark.slow
def test_buffered_rounds_take_steps_from_where_clients_began():
    """Of one client: gradient descent with a delay of a round; with slopes that x does not change, none."""
    x = before = np.ones(2)
    curvature = np.array([1.0, 2.0])
    for _ in range(6):
        x, before = x - 0.3 * curvature * before, x
    data = fs.FederatedData.from_clients([{"a": curvature[None]}])
    problem = fs.Minimization(lambda x, s: 0.5 * (s["a"] * x**2).sum())
    options = {"progress": False, "certify": False, "participation": fs.Buffered(1)}
    found = fs.solve(problem, fs.FedAvg(gamma=0.3), data, np.ones(2), rounds=6, **options)
    np.testing.assert_allclose(found.x, x, rtol=1e-5)
    late, plain = (run_on(SLOPES, rounds=5, participation=p) for p in (fs.Buffered(3), 3))
    np.testing.assert_allclose(late.x, plain.x, rtol=1e-5)
    assert late.ledger == plain.ledger


def test_a_server_optimiser_steps_along_the_mean_difference():
    """Momentum on one and the same slope, by hand."""
    channel = fs.Channel(server=optax.sgd(0.5, momentum=0.9))
    velocity = x = np.zeros(5)
    for _ in range(4):
        velocity = 0.9 * velocity + SLOPES.mean(0)
        x = x - 0.5 * velocity
    np.testing.assert_allclose(run_on(SLOPES, rounds=4, channel=channel).x, x, rtol=1e-5)


# ---- directions that clients share


@pytest.mark.slow
def test_shared_directions_come_to_rest_at_the_solution():
    """Full batches, two-sided: own directions shake x for ever where clients differ, whatever is sent."""
    options = {"gamma": 0.05, "eta": 1e-2, "batch_size": None, "two_sided": True}
    with jax.enable_x64(True):
        own = off(fs.FedRZO(**options), 1000)
        vectors = off(fs.FedRZO(**options, shared_directions=True), 1000)
        scalars = off(fs.FedRZO(**options, shared_directions=True, messages="scalars"), 1000)
    assert own > 0.05
    assert scalars < 1e-8
    assert vectors == pytest.approx(scalars, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_plans_share_directions_where_clients_differ(alike):
    """More dimensions than directions: own ones, as many rounds, end half-way where clients differ."""
    n, rng = 64, np.random.default_rng(0)
    own = [{"A": rng.uniform(0.5, 2, (1, n)), "b": rng.normal(size=(1, n))} for _ in range(8)]
    own = own[:1] * 8 if alike else own
    problem = fs.Minimization(lambda x, s: 0.5 * x @ (s["A"] * x) - s["b"] @ x)
    data, x0 = fs.FederatedData.from_clients(own), np.zeros(n)
    A, b = (np.mean([one[name][0] for one in own], axis=0) for name in "Ab")
    planned = fs.plan(problem, data, x0, method=fs.FedRZO)
    assert planned.method.shared_directions is not alike
    rounds = 2 * int(planned.rounds)
    found = fs.solve(problem, planned.method, data, x0, rounds=rounds, eval_every=rounds, progress=False,
                     certify=False)  # fmt: skip
    assert np.linalg.norm(found.x - b / A) < 1e-2 * np.linalg.norm(b / A)


@pytest.mark.slow
def test_shared_scalars_are_averaged():
    case = CASES["fedrzo-shared"]
    vectors = fs.FedRZO(gamma=0.01, eta=0.1, H=2, batch_size=2, shared_directions=True)
    one, other = case.run(), case.run(method=vectors)
    for a, b in zip(jax.tree.leaves(one.x), jax.tree.leaves(other.x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert one.ledger.gathers == 0
    assert one.ledger.floats_up == 3 * 5 * 2  # rounds, clients, local steps


# ---- privacy

dp = pytest.importorskip("dp_accounting")
LOGISTIC = linear(np.zeros((100, 2)))


def epsilon(method, problem, data, x0, rounds=100, q=0.1, z=1.0, **options):
    posed = pose(
        problem, method, data, x0, rounds=rounds, participation=fs.Poisson(q) if q else 1.0,
        channel=fs.Channel(clip=1.0, noise=z, delta=1e-3), **options,
    )  # fmt: skip
    return posed.spending.epsilon(rounds)


def test_epsilon_of_one_exchange_a_round():
    """100 clients, q = .1, 100 rounds, z = 1, δ = 1e-3: 4.78; everyone in each round: 80."""
    problem, data = LOGISTIC
    assert epsilon(fs.FedAvg(gamma=0.1), problem, data, np.zeros(2)) == pytest.approx(4.78, abs=0.02)
    assert epsilon(fs.FedAvg(gamma=0.1), problem, data, np.zeros(2), q=None) == pytest.approx(80, abs=1)


def test_epsilon_of_several_exchanges_with_one_draw():
    """E exchanges are one subsampled Gaussian of z/√E: 9.90 for two, not 7.10 as of two draws."""
    problem, data = LOGISTIC
    two = epsilon(fs.FedAvg(gamma=0.1), problem, data, np.zeros(2), z=2**-0.5)
    assert two == pytest.approx(9.90, abs=0.05)
    six = epsilon(fs.FedAvg(gamma=0.1), problem, data, np.zeros(2), z=6**-0.5)
    assert six == pytest.approx(37.5, abs=0.3)


def test_a_plain_gaussian_is_that_of_balle_and_wang():
    """Φ(1/2z − εz) − e^ε Φ(−1/2z − εz) = δ, with z of all rounds together."""
    from scipy.stats import norm

    problem, data = LOGISTIC
    e = epsilon(fs.FedAvg(gamma=0.1), problem, data, np.zeros(2), rounds=4, q=None, z=4.0)
    z = 4.0 / 2
    delta = norm.cdf(1 / (2 * z) - e * z) - np.exp(e) * norm.cdf(-1 / (2 * z) - e * z)
    assert delta == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(
    ("name", "changes", "start", "each"),
    [("fedrzo-bilevel-accurate", {"lower_rounds": 6}, 1, 6 + 1), ("fednest", {"N": 5}, 0, 7 + 4)],
)
def test_a_loop_of_unknown_length_costs_its_largest_number_of_exchanges(name, changes, start, each):
    """One Gaussian of all, for a solver that stops by itself and for at most N − 1 random terms."""
    case = CASES[name]
    method = replace(case.method, **changes)
    found = epsilon(method, case.problem, case.data, case.x0, rounds=3, q=None, z=4.0, y0=case.y0)
    assert found == pytest.approx(gaussian_epsilon((start + 3 * each) ** 0.5 / 4, 1e-3), rel=1e-6)


@pytest.mark.slow
def test_the_accurate_solver_keeps_its_largest_number_of_exchanges():
    """Here it would take more: then it takes all of them, and never one more."""
    case = CASES["fedrzo-bilevel-accurate"]
    for most in (1, 2, 3, 6):
        with pytest.warns(UserWarning, match="was not solved"):
            found = case.run(method=replace(case.method, lower_tol=1e-9, lower_rounds=most), rounds=1)
        assert found.ledger.lower_rounds == 1 + most


@pytest.mark.slow
def test_a_run_stops_at_its_budget():
    problem, data = LOGISTIC
    options = {"participation": fs.Poisson(0.1), "progress": False, "certify": False}
    channel = fs.Channel(clip=1.0, noise=1.0, delta=1e-3, epsilon=2.0)
    with pytest.warns(UserWarning, match="is enough for"):
        found = fs.solve(problem, fs.FedAvg(gamma=0.1), data, np.zeros(2), rounds=100, eval_every=10,
                         channel=channel, **options)  # fmt: skip
    assert found.status == "stopped"
    assert found.history["epsilon"][-1] <= 2.0 < 100
    more = channel.__class__(**{**vars(channel), "epsilon": None})
    rounds = found.ledger.rounds + 1
    beyond = fs.solve(problem, fs.FedAvg(gamma=0.1), data, np.zeros(2), rounds=rounds, eval_every=rounds,
                      channel=more, **options)  # fmt: skip
    assert beyond.history["epsilon"][-1] > 2.0


@pytest.mark.slow
def test_the_noise_for_a_budget():
    problem, data = LOGISTIC
    found = fs.plan_privacy(
        problem, fs.FedAvg(gamma=0.1), data, np.zeros(2), epsilon=4.78, delta=1e-3, rounds=100, clip=2.0,
        participation=fs.Poisson(0.1),
    )  # fmt: skip
    assert found.noise == pytest.approx(1.0, rel=0.02)
    assert (found.clip, found.epsilon, found.delta) == (2.0, 4.78, 1e-3)


# ---- what cannot be combined

REFUSED = {
    "noise needs clip": lambda: fs.Channel(noise=1.0),
    "feedback": lambda: fs.Channel(clip=1.0, noise=1.0, compress=fs.TopK(0.1), feedback="ef"),
    "feedback='ef' does not fit: .* Give 'auto', here 'ef21'": lambda: run_on(
        SLOPES, channel=fs.Channel(compress=fs.Sign(), feedback="ef")
    ),
    "feedback='ef21' does not fit: .* Give 'auto', here 'ef'": lambda: CASES["scaffold"].run(
        channel=fs.Channel(compress=fs.Sign(), feedback="ef21")
    ),
    "the parts of the noise add up": lambda: fs.Channel(
        clip=1.0, noise=1.0, noise_at="clients", compress=fs.Sign(), feedback=None
    ),
    "robust mean depends on single uploads": lambda: fs.Channel(clip=1.0, noise=1.0, mean=fs.Median()),
    "this count needs noise too": lambda: fs.Channel(clip=fs.Adaptive(), noise=1.0),
    "is a privacy parameter": lambda: fs.Channel(epsilon=1.0),
    "epsilon=1 cannot be kept: 'local_steps' sends": lambda: run_on(
        SLOPES, channel=fs.Channel(clip=1.0, noise=0.0, epsilon=1.0)
    ),
    "epsilon=2 cannot be kept: 'local_steps' takes means of samples without noise": lambda: run_on(
        SLOPES, channel=fs.Channel(examples=fs.Examples(1.0), epsilon=2.0)
    ),
    "epsilon=3 cannot be kept: 'local_steps' sends": lambda: run_on(
        SLOPES, channel={"main": fs.Channel(clip=1.0), "*": fs.Channel(clip=1.0, noise=1.0, epsilon=3.0)}
    ),
    "no epsilon holds": lambda: fs.solve(
        *linear(SLOPES)[:1],
        "auto",
        linear(SLOPES)[1],
        np.zeros(5),
        rounds=9,
        channel=fs.Channel(clip=1.0, noise=1.0),
    ),
    "let x0 and y0 be of 32 bits": lambda: fs.solve(
        fs.Minimization(lambda x, s: (x @ s["a"]).astype(float)),
        fs.FedAvg(gamma=1.0),
        linear(SLOPES)[1],
        jnp.zeros(5, jnp.bfloat16),
        rounds=1,
        channel=fs.Channel(clip=1.0, noise=1.0),
    ),
    "capacity must be a whole number": lambda: fs.Poisson(0.5, capacity=0),
    "must be a positive number": lambda: fs.Channel(clip=-1.0),
    "share must be the fraction": lambda: fs.TopK(10),
    "compress must be a compressor": lambda: fs.Channel(compress="topk"),
    "mean must be a robust mean": lambda: fs.Channel(mean=fs.Median),
    "bits must be 2, 4 or 8": lambda: fs.QSGD(3),
    "absent clients add no noise": lambda: run_on(
        SLOPES, dropouts=fs.Dropouts(0.1), channel=fs.Channel(clip=1.0, noise=1.0, noise_at="clients")
    ),
    "same probability": lambda: run_on(SLOPES, weights="size", participation=fs.Poisson(0.5)),
    "unknown phase or level 'man'": lambda: run_on(SLOPES, channel={"man": fs.Channel(clip=1.0)}),
    "single replies": lambda: CASES["fedrzo-scalars"].run(
        participation=fs.Poisson(0.5), channel=fs.Channel(clip=1.0, noise=1.0)
    ),
    "linear recursion": lambda: CASES["hypergradient"].run(channel={"*": fs.Channel(compress=fs.TopK(0.5))}),
    "every sample of a client": lambda: CASES["fastdro"].run(
        channel=fs.Channel(clip=1.0), method=fs.FastDRO(eta=0.1)
    ),
    "one exchange in a round": lambda: CASES["fedmsa"].run(participation=fs.Buffered(3)),
    "a mean without a reference point": lambda: CASES["scaffold"].run(
        channel=fs.Channel(server=optax.sgd(1.0))
    ),
    "as there are 6 clients": lambda: run_on(SLOPES, dropouts=fs.Dropouts(trace=np.ones((2, 5)))),
    "deadline needs seconds": lambda: fs.Dropouts(deadline=1.0),
    "policy 'wait'": lambda: run_on(
        SLOPES, channel=fs.Channel(clip=1.0, noise=1.0), engine=Network(policy=Policy(missing="drop"))
    ),
    "needs every client in each round": lambda: CASES["feddro"].run(dropouts=fs.Dropouts(0.1)),
    "needs participation=1.0": lambda: CASES["feddro"].run(participation=fs.Poisson(0.5)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_combined_is_refused_with_the_reason(reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        REFUSED[reason]()
