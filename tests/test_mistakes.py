"""What a newcomer gets wrong in the first hour is answered with what to do, before anything is compiled."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.core.fed import Remember
from fedstrata.core.method import METHODS, Method, Positive, method
from fedstrata.estimators.gradients import gradient
from fedstrata.lab import cli
from fedstrata.lab.report import history_table
from fedstrata.solving.pose import checked_callbacks

rng = np.random.default_rng(0)
data = fs.FederatedData.from_clients([{"a": rng.normal(i, 1, (4 + i, 3))} for i in range(3)])
problem = fs.Minimization(lambda x, sample: 0.5 * ((x - sample["a"]) ** 2).sum())


def solve(method=None, **changes):
    arguments = {
        "problem": problem, "method": method or fs.FedAvg(0.1), "data": data, "x0": np.zeros(3), "rounds": 2,
        "progress": False, "default_metrics": False, **changes,
    }  # fmt: skip
    return fs.solve(**arguments)


class State(NamedTuple):
    x: jax.Array


class Base(Method[fs.Minimization, State]):
    """Gradient steps; the tests change a part of it."""

    gamma: Positive = 0.1

    solves = (fs.Minimization,)

    def init(self, problem, x0, y0):
        return State(x0)

    def slope(self, problem, client, key, x):
        return gradient(client.mean(problem.loss, key, None), x)

    def round(self, problem, fed, key, r, state):
        return State(tree.axpy(-self.gamma, fed.average(self.slope, key, state.x), state.x))


@pytest.fixture
def made():
    """Makes a method of a class that is not kept in the table of all methods."""
    names = []

    def make(**parts):
        names.append("Own")
        return method(type("Own", (Base,), {"__annotations__": {"gamma": Positive}, **parts}))

    yield make
    for name in names:
        METHODS.pop(name, None)


def gathers(self, problem, fed, key, r, state):
    return State(state.x - self.gamma * jnp.median(fed.gather(self.slope, key, state.x), axis=0))


def remembers(self, problem, client, key, x):
    return Remember(x, x)


def without_key(self, problem, fed, key, r, state):
    return State(fed.average(self.slope, state.x))


def test_a_method_that_gathers_must_say_so(made):
    with pytest.raises(TypeError, match=r"Own gathers single replies.*def reveals_on"):
        solve(made(round=gathers)())
    honest = made(round=gathers, reveals_on=lambda self, problem: "replies")
    assert honest.reveals_on(problem) == honest().reveals_on(problem) == "replies"
    row = next(fit for fit in fs.applicable(problem) if fit.method is honest)
    assert row.reveals == "replies"


@pytest.mark.slow
def test_an_honest_one_runs_in_every_engine(made):
    honest = made(round=gathers, reveals_on=lambda self, problem: "replies")
    medians = np.median([data.client(i)["a"].mean(0) for i in range(3)], 0)
    for engine in ("simulated", "debug", "network"):
        found = solve(honest(0.5), engine=engine, rounds=40)
        np.testing.assert_allclose(found.x, medians, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"solves": ()}, "does not declare what it solves"),
        ({"slope": remembers}, r"begin with None.*memory\(problem, x0"),
        ({"round": without_key}, "takes the round's random key"),
        ({"round": lambda self, p, fed, key, r, s: None}, r"Own.round must return a state .*returns None"),
    ],
    ids=["solves", "memory", "key", "state"],
)  # fmt: skip
def test_mistakes_in_a_method(made, parts, words):
    with pytest.raises(TypeError, match=words):
        solve(made(**parts)())


def test_a_method_without_its_decorator():
    with pytest.raises(TypeError, match="write @method above the class"):
        Base(0.1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"metrics": ["loss"]}, TypeError, "must be a dict with a function under each name"),
        ({"metrics": {"n": lambda x: jnp.linalg.norm(x)}}, TypeError, "whose point is state.x"),
        ({"metrics": {"n": lambda state: state}}, TypeError, "'n' must be one number, but is a State"),
        ({"metrics": {"n": fs.on_host(lambda x, y: x)}}, TypeError, "^The metric 'n' must return one number"),
        ({"callbacks": [fs.track.Csv]}, TypeError, r"the class Csv: make one, Csv\("),
        ({"callbacks": [3]}, TypeError, "must be functions of what a run has so far, but has 3"),
        ({"x0": np.full(3, np.nan)}, ValueError, "x0 is not finite.$"),
        ({"data": [{"a": np.zeros((2, 3))}]}, TypeError, "a list: build it with"),
        ({"data": {"a": np.zeros((2, 3))}}, TypeError, "a dict: fs.FederatedData.from_arrays"),
        ({"problem": fs.Minimization(lambda x, sample: x @ sample["b"])}, TypeError, "'b' is not in what"),
        ({"problem": fs.Minimization(lambda x: x @ x)}, TypeError, "called with the arguments"),
    ],
)  # fmt: skip
def test_mistakes_in_a_call(changes, error, words):
    with pytest.raises(error, match=words):
        solve(**changes)


def test_a_data_frame_in_place_of_data():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"fs\.FederatedData\.from_dataframe"):
        solve(data=pandas.DataFrame({"a": [1.0]}))


def test_one_callback_is_a_list_of_one():
    stop = fs.EarlyStop("loss", patience=1)
    assert checked_callbacks(stop) == checked_callbacks([stop]) == (stop,)


def test_mistakes_in_a_problem():
    with pytest.raises(TypeError, match=r"no argument 'projection'\. Did you mean 'project'"):
        fs.Minimization(problem.loss, projection=fs.sets.Ball(1.0))
    with pytest.raises(TypeError, match=r"Bilevel has no argument 'f'.*It has upper, lower"):
        fs.Bilevel(f=problem.loss, g=problem.loss, same_samples=True)
    with pytest.raises(TypeError, match="is the class Ball: make a set of it"):
        fs.Minimization(problem.loss, project=fs.sets.Ball)
    pair = fs.MultiSequence(lambda x, Z, s: x, [lambda x, z, s: z, lambda y, z, s: z])
    with pytest.raises(
        ValueError, match=r"a tuple \(z1, z2\) with the start of each sequence, but is float32\[3\]"
    ):
        solve(fs.SOBA(0.1, 0.1), problem=pair, y0=np.zeros(3))


def test_entries_of_groups_in_place_of_labels():
    with pytest.raises(ValueError, match="a label for each entry of x"):
        fs.prox.GroupLasso(1.0, [[0, 1], [2, 3]])
    labels = fs.prox.GroupLasso(1.0, [[0, 0], [1, 1]]).prox(jnp.ones((2, 2)), 1.0)
    np.testing.assert_allclose(labels, 1 - 1 / np.sqrt(2), rtol=1e-6)


def test_a_folder_of_csv_files(tmp_path):
    (tmp_path / "one.csv").write_text("u,y\n1,2\n")
    with pytest.raises(fs.DataError, match=r"is a folder. Give its files, '.*\*.csv'"):
        fs.data.from_csv(tmp_path, label="y")


def test_a_result_knows_its_seed(tmp_path):
    result = solve(rounds=0, seed=7)
    result.save(tmp_path)
    assert result.seed == fs.Result.load(tmp_path).seed == 7


def test_the_objective_is_shown_first():
    history = {
        "round": np.arange(2),
        "client": np.ones(2),
        "coupling": np.ones(2),
        "objective": np.array([2.0, 1.0]),
    }
    shown = fs.Result(0.0, None, history, fs.Ledger(), {"name": "ZOHFL"}, 1.0)
    assert "ZOHFL, 0 rounds, objective 2 → 1, client" in repr(shown)


def test_what_was_not_measured_is_no_failure():
    nan = float("nan")
    table = str(history_table({"round": [0, 1, 2], "auc": [0.5, nan, 0.9], "loss": [1.0, 2.0, nan]}))
    assert table.count("not finite") == 1


def test_warnings_of_the_command_line_are_words():
    with cli.messages():
        assert warnings.formatwarning("give rounds", UserWarning, "file.py", 3) == "Warning: give rounds\n"
    assert "file.py:3" in warnings.formatwarning("give rounds", UserWarning, "file.py", 3)


def test_statistics_of_a_module_are_no_parameters():
    nnx = pytest.importorskip("flax.nnx")
    net = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"x0\.mean is a batch statistic"):
        solve(problem=fs.Minimization(lambda net, sample: net(sample["a"]).sum()), x0=net)

    nn = pytest.importorskip("flax.linen")
    linen = nn.BatchNorm(use_running_average=True)
    x0 = linen.init(jax.random.key(0), np.ones(3))
    with pytest.raises(TypeError, match="is a batch statistic"):
        solve(problem=fs.Minimization(lambda x, sample: linen.apply(x, sample["a"]).sum()), x0=x0)
    loss = lambda x, sample: linen.apply({"params": x}, sample["a"]).sum()  # noqa: E731
    with pytest.raises(TypeError, match="cannot use batch statistics"):
        solve(problem=fs.Minimization(loss), x0=x0["params"])
