"""The programs that are compared do the same: the same steps exactly, the same draws, the same estimates."""

import json
import re
from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
import pytest

import fedstrata as fs
from benchmarks import cifar10, fedavg_softmax, fedmsa_losstuning, fedrzo, first_result, scale
from benchmarks.alternatives import ALTERNATIVES, Case
from benchmarks.rates import compositions
from benchmarks.rates.law import Law, slope
from benchmarks.timing import TRACK, interleave, track
from docs import build

LONG = ("Flower",)  # starts processes
EACH = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not alternative.installed, reason=f"{name} is not installed: docs/benchmarks.md"
            ),
            pytest.mark.filterwarnings("default"),  # other packages' warnings are not ours to heed
            *([pytest.mark.long] if name in LONG else []),
        ],
    )
    for name, alternative in ALTERNATIVES.items()
]


def run(name, case):
    with ALTERNATIVES[name].open(case) as program:
        return {leaf: np.asarray(value) for leaf, value in program().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_alternatives_take_the_same_steps(name):
    """A client with one sample leaves nothing to draw: all programs must agree with the formulas."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 1, 5)).astype(np.float32), np.array([[0], [2], [1], [2]], np.int32)
    case = Case(x, y, participants=4, rounds=3, classes=3, steps=4, batch=2, gamma=0.5)

    w, b = np.zeros((5, 3)), np.zeros(3)
    for _ in range(case.rounds):
        ends = []
        for u, label in zip(x[:, 0].astype(float), y[:, 0], strict=True):
            w_i, b_i = w, b
            for _ in range(case.steps):
                p = np.exp(u @ w_i + b_i)
                slope = p / p.sum() - np.eye(3)[label]
                w_i, b_i = w_i - case.gamma * np.outer(u, slope), b_i - case.gamma * slope
            ends.append((w_i, b_i))
        w, b = (np.mean(parts, axis=0) for parts in zip(*ends, strict=True))

    found = run(name, case)
    np.testing.assert_allclose(found["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["b"], b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_alternatives_draw_alike(name):
    """With a feature for each sample, one step from zero tells how often every sample was drawn."""
    clients, samples, participants, batch = 6, 4, 2, 48
    x = np.eye(clients * samples, dtype=np.float32).reshape(clients, samples, -1)
    case = Case(x, np.zeros((clients, samples), np.int32), participants, 1, classes=2, steps=1, batch=batch)

    # w[s, 0] = γ (1 − ½) · draws(s) / batch / participants
    draws = run(name, case)["w"][:, 0].reshape(clients, samples) * batch * participants / (case.gamma / 2)
    np.testing.assert_allclose(draws, np.round(draws), atol=1e-4)
    draws = np.round(draws)
    assert sorted(draws.sum(1)) == [0] * (clients - participants) + [batch] * participants
    # Shuffled epochs would give 12 draws to each sample. Drawing with replacement gives that to both clients
    # with probability (48!/12!⁴/4⁴⁸)² < 1e-4, and misses some sample of theirs with one of 8 (3/4)⁴⁸ < 1e-4.
    taken = draws[draws.sum(1) > 0]
    assert (taken != batch // samples).any()
    assert (taken > 0).all()


def test_ours_reaches_the_loss_of_a_loop_within_its_standard_error():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((10, 50, 8)).astype(np.float32)
    y = (x @ rng.standard_normal((8, 3))).argmax(-1).astype(np.int32)
    cases = [Case(x, y, 2, 5, classes=3, steps=5, batch=4, seed=seed) for seed in range(20)]
    ours, loop = (np.array([c.loss(run(name, c)) for c in cases]) for name in ("fedstrata", "NumPy loop"))
    error = np.sqrt((ours.var(ddof=1) + loop.var(ddof=1)) / len(cases))
    assert abs(ours.mean() - loop.mean()) < 4 * error
    assert ours.mean() + 20 * error < cases[0].loss(cases[0].start())  # the error is small beside the descent


@pytest.mark.slow
@pytest.mark.parametrize("name", fedrzo.PROGRAMS)
def test_fedrzo_programs_estimate_the_gradient(name):
    """With a small γ the way is −γ times the sum of all estimates, whose mean is ∇f within its deviation."""
    if name == "PyTorch loop":
        pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    u, labels = rng.random((500, 5, 3), dtype=np.float32), np.zeros((500, 5), np.int32)
    case = fedrzo.Case(u, labels, H=4, rounds=2, neurons=2, gamma=1e-4, eta=1e-2)
    start = case.start()

    def loss(x, u, y):
        x = {"Z": x[: -case.neurons].reshape(case.neurons, -1), "w": x[-case.neurons :]}
        return case.model().loss(x, {"x": u, "y": y})

    slopes = jax.vmap(partial(jax.grad(loss), start))(u.reshape(-1, 3), labels.reshape(-1))
    estimate = (start - np.asarray(fedrzo.PROGRAMS[name][1](case)())) / (case.gamma * case.H * case.rounds)
    # One estimate n/η² v vᵀg has E‖·‖² = n ‖g‖²; γ and η change the slopes by less than a percent.
    number = case.clients * case.H * case.rounds
    deviation = np.sqrt(start.size * (slopes**2).sum(1).mean() / number)
    assert 0 < deviation < 0.1 * np.linalg.norm(slopes.mean(0))
    assert np.linalg.norm(estimate - slopes.mean(0)) < 3 * deviation


@pytest.mark.long
def test_tables_have_a_row_for_every_program():
    rng = np.random.default_rng(0)
    x, y = rng.random((4, 6, 3), dtype=np.float32), rng.integers(0, 2, (4, 6)).astype(np.int32)
    found = {n: a for n, a in ALTERNATIVES.items() if n in ("fedstrata", "NumPy loop") or n.startswith("JAX")}
    written = fedavg_softmax.compare(Case(x, y, 2, 2, classes=2, steps=2, batch=2), found)
    rows = [line.split("|")[1].strip() for line in written.splitlines() if line.startswith("|")]
    assert sorted(rows[2:]) == sorted(found)
    assert re.search(r"best program by hand: \d+\.\d\d$", written)


def test_programs_are_stopped_at_the_end():
    calls = []

    @contextmanager
    def opened():
        yield lambda: calls.append("run")
        calls.append("stop")

    (timing,) = interleave({"one": opened}, repetitions=2)
    assert calls == ["run"] * 3 + ["stop"]
    assert 0 < timing.least <= timing.median


@pytest.mark.long
def test_first_result_is_timed_in_parts():
    parts = first_result.measure("FedMSA")
    assert tuple(parts) == first_result.PARTS
    assert all(seconds > 0 for seconds in parts.values())


@pytest.mark.long
def test_loss_tuning_goes_through_the_same_iterates(monkeypatch, capsys):
    """FedMSA's momentum cancels with full batches: the lines as they stand, at both points, and ours."""
    small = {
        "CLIENTS": 6,
        "CHOSEN": 2,
        "FEATURES": 7,
        "HIDDEN": 5,
        "COUNTS": [24, 12, 9, 8, 7, 6, 5, 5, 5, 5],
    }
    for name, value in small.items():
        monkeypatch.setattr(fedmsa_losstuning, name, value)
    data = fedmsa_losstuning.clients(None)
    ours = fedmsa_losstuning.ours(data, 5)()
    for over in ("map", "vmap"):
        x, w, v = fedmsa_losstuning.by_hand(data, 5, over)()
        theirs = jax.tree.leaves((x, w, v))
        mine = jax.tree.leaves((ours[0], ours[1][0].w, ours[1][0].v))
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert np.abs(jax.tree.leaves(ours[0])[0]).max() > 1e-3
    fedmsa_losstuning.main(["--rounds", "1", "--repetitions", "1"])
    printed = capsys.readouterr().out
    assert re.search(r"FedStrata: [\d.]+ GFLOP, \d+ GFLOP/s, \d+% of that", printed)


@pytest.mark.long
@pytest.mark.parametrize("name", scale.METHODS)
def test_scale_measures_what_it_streams(name, tmp_path):
    found = scale.measure(name, 100, tmp_path, True, 10)
    assert found.keys() == {"round", "call", "start", "host", "device", "in memory"}
    assert found["device"] > 0
    sizes = fs.data.open_store(tmp_path / "zipf-100").sizes
    np.testing.assert_array_equal(sizes, scale.sizes_of(100))
    assert 1 <= sizes.min() <= sizes.max() <= scale.LARGEST


def test_a_slope_is_that_of_the_line():
    law = Law("", "", "", "n", -0.5, (10, 100, 1000), lambda n: 3 * n**-0.5)
    rise, error, values = slope(law)
    assert rise == pytest.approx(-0.5)
    assert error == pytest.approx(0, abs=1e-9)
    assert values[1] == pytest.approx(0.3)


@pytest.mark.long
def test_feddro_has_its_rate():
    """Theorem 4.3: ‖∇Φ‖² ~ T^{−1/2}."""
    law = next(law for law in compositions.LAWS if law.method == "FedDRO" and law.against == "T")
    rise, _, _ = slope(law._replace(sizes=(256, 1024, 4096)))
    assert rise == pytest.approx(law.predicted, abs=0.1)


def test_tracked_ratios_are_shown_over_time(tmp_path, monkeypatch):
    lines, results = tmp_path / "lines", tmp_path / "benchmarks" / "results"
    monkeypatch.setenv(TRACK, str(lines))
    assert track("a call", [3.0, 2.0, 4.0], 4.0, "by hand") == 0.5
    entry = json.loads(lines.read_text("utf-8"))
    assert (entry["stats"]["min"], entry["stats"]["median"], entry["stats"]["rounds"]) == (2.0, 3.0, 3)

    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert "make bench" in build.history()
    about = {
        "cpu": {"count": 2, "brand_raw": "a processor"},
        "python_version": "3.11.7",
        "versions": {"jax": "0.12"},
    }
    results.mkdir(parents=True)
    for day, entries in (("2026-01-01", [entry]), ("2026-02-01", [])):
        run = {"machine_info": about, "commit_info": {"id": "0123456789"}, "benchmarks": entries}
        (results / f"{day}.json").write_text(json.dumps(run | {"datetime": f"{day}T10:00:00"}), "utf-8")
    shown = build.history()
    assert "| ratio, less is better | 2026-01-01 | 2026-02-01 |  |" in shown
    assert "| a call / by hand | 0.50 |  | <svg" in shown
    assert "- 2026-02-01, `0123456`: 2 cores, a processor, Python 3.11.7, jax 0.12" in shown


def test_splits_of_the_published_benchmark():
    """Clients have as many images each, no image twice; by Dir(0.1) few classes each."""
    labels, rng = np.repeat(np.arange(10), 1000), np.random.default_rng(0)
    classes = {}
    for kind in ("iid", "dirichlet"):
        parts = cifar10.split(labels, kind, 200, rng)
        assert {len(part) for part in parts} == {cifar10.IMAGES}
        assert len(np.unique(np.concatenate(parts))) == 200 * cifar10.IMAGES
        classes[kind] = np.mean([len(np.unique(labels[part])) for part in parts])
    assert classes["dirichlet"] < 5 < 9 < classes["iid"]


@pytest.mark.long
def test_rows_of_the_published_benchmark():
    """Each kind of row runs; the noise is that of (2, 1e-6)-DP."""
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (200, 32, 32, 3), np.uint8), "y_train": rng.integers(0, 10, 200),
        "x_test": rng.integers(0, 256, (4, 32, 32, 3), np.uint8), "y_test": rng.integers(0, 10, 4),
    }  # fmt: skip
    pixels = arrays["x_train"].reshape(-1, 3)
    np.testing.assert_allclose(cifar10.moments(arrays["x_train"]), [pixels.mean(0), pixels.std(0)])
    for name in ("SCAFFOLD iid", "FedAvg dirichlet, private"):
        found = cifar10.run(arrays, cifar10.ROWS[name]._replace(rounds=1), 4, 2, 0)
        assert found["finite"]
        assert 0 <= found["accuracy"] <= 1
    assert 0.5 < cifar10.multiplier(1500) < cifar10.multiplier(3000) < 1.5
