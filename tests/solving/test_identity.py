"""What a run is: the program that it computes, its numbers and its data, whatever they are called."""

import functools
import os
import runpy
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.engines.identity import differences, programs_of
from fedstrata.solving.pose import pose
from fedstrata.support.digest import current, digest_of

A = np.arange(6.0).reshape(3, 2)
data = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}])
LAM = 0.5
helpers = types.ModuleType("helpers")
helpers.penalty = lambda x: (x**2).sum()


def loss(x, s):
    return 0.5 * ((x - s["a"]) ** 2).sum()


def programs(function=loss, method=None, metrics=None, project=None, **options):
    """The digests of a run."""
    problem = fs.Minimization(function, project=project)
    method = fs.FedAvg(gamma=0.1, H=2) if method is None else method
    posed = pose(problem, method, data, np.zeros(2), rounds=3, metrics=metrics, **options)
    return programs_of(posed.setup, posed.method, posed.carry, posed.data)


MODULE = """
import jax, jax.numpy as jnp, numpy as np, optax
import fedstrata as fs
from fedstrata.engines.identity import programs_of
from fedstrata.solving.pose import pose

def helper(x):
    return 0.25 * x

def upper(x, y, s):
    return jnp.where(y > 0, jax.nn.relu(y - s["a"]), helper(y)).sum() + {"b": x, "a": 2 * x}["a"] @ x

def lower(x, y, s):
    return (jnp.linalg.solve(jnp.eye(2) + 1.0, y - x) ** 2).sum() + np.arange(2.0) @ y

@fs.black_box
def box(x, s):
    return float(helper(x).sum() in {1.0, 2.0, 3.0})

data = fs.FederatedData.from_clients([{"a": np.ones((3, 2))}, {"a": np.zeros((2, 2))}])
ball, found = fs.sets.Ball(2.0), []
for problem, method in [
    (fs.Bilevel(upper, lower, project_x=ball, same_samples=True), fs.FedMSA(alpha=0.1, beta=0.1, K=2)),
    (fs.Minimization(box), fs.FedRZO(gamma=0.1, eta=0.1)),
    (fs.Minimization(lambda x, s: x @ s["a"]), fs.FedOpt(optax.sgd(0.1), optax.adam(0.1))),
]:
    y0 = np.zeros(2) if problem.has_y else None
    posed = pose(problem, method, data, np.zeros(2), y0=y0, rounds=1, participation=1)
    found += programs_of(posed.setup, posed.method, posed.carry, posed.data).values()
print(*found)
"""


@pytest.mark.slow
def test_another_process_agrees(tmp_path):
    """With other names, docstrings, places and hashes."""
    first, other = tmp_path / "first.py", tmp_path / "other.py"
    first.write_text(MODULE)
    told = MODULE.replace("def helper(x):", 'def helper(z):\n    "More."').replace("0.25 * x", "0.25 * z")
    other.write_text(
        "# further down\n\n" + told.replace("def upper", "def above").replace("(upper", "(above")
    )
    here = runpy.run_path(str(first))["found"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "7"}
    x64 = {"JAX_ENABLE_X64": str(jax.config.jax_enable_x64)}
    done = subprocess.run(
        [sys.executable, str(other)], env=environment | x64, capture_output=True, check=True, timeout=300
    )
    assert done.stdout.decode().split() == here


def renamed(point, one_sample):
    """Half the squared distance."""
    distance = point - one_sample["a"]  # of one sample
    return 0.5 * (distance**2).sum()


def test_names_and_words_do_not_count():
    assert programs(renamed) == programs() == programs(jax.jit(loss)) | programs(lambda z, s: loss(z, s))
    assert programs(metrics={"a": lambda x, y: x.sum()}) == programs(metrics={"a": lambda p, q: p.sum()})


def reads_file(x, s):
    return float(Path(os.environ["FACTOR_FILE"]).read_text()) * loss(x, s)


def imports(x, s):
    import helpers

    return helpers.penalty(x)


def other_helper(patch):
    patch.setattr(helpers, "penalty", jnp.sum)


READS = {
    "a global": (lambda x, s: LAM * loss(x, s), lambda m: m.setitem(globals(), "LAM", 0.25)),
    "a helper": (lambda x, s: helpers.penalty(x), other_helper),
    "a name": (lambda x, s: vars(helpers)["pen" + "alty"](x), other_helper),
    "an import": (imports, other_helper),
    "the environment": (
        lambda x, s: float(os.environ["FACTOR"]) * loss(x, s), lambda m: m.setenv("FACTOR", "3"),
    ),
    "a file": (reads_file, lambda m: Path(os.environ["FACTOR_FILE"]).write_text("3")),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_a_function_reads_is_part_of_it(name, monkeypatch, tmp_path):
    function, change = READS[name]
    monkeypatch.setitem(sys.modules, "helpers", helpers)
    monkeypatch.setenv("FACTOR", "2")
    monkeypatch.setenv("FACTOR_FILE", str(tmp_path / "factor"))
    (tmp_path / "factor").write_text("2")
    fs.solve(fs.Minimization(function), fs.FedAvg(0.1), data, np.zeros(2), rounds=0, checkpoint=tmp_path)
    change(monkeypatch)
    again = fs.Minimization(lambda x, s: function(x, s))  # as a new process would trace it
    with pytest.raises(fs.CheckpointError, match=r"round: another program.*measure: another program"):
        fs.solve(again, fs.FedAvg(0.1), data, np.zeros(2), rounds=1, checkpoint=tmp_path, resume=True)


decay = functools.partial(optax.exponential_decay, 0.1, 10)


def made(factor, table):
    return lambda x, s: factor * ((x - table) ** 2).sum()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"function": made(1.0, A)}, {"function": made(2.0, A)}),
        ({"function": made(1.0, A)}, {"function": made(1.0, A + 1)}),
        ({"function": made(0.0, A)}, {"function": made(-0.0, A)}),
        ({"function": loss}, {"function": fs.per_batch(lambda x, s: loss(x, s))}),
        ({"project": fs.sets.Ball(1.0)}, {"project": fs.sets.Ball(2.0)}),
        ({"method": fs.FedAvg(gamma=0.1, H=2)}, {"method": fs.FedAvg(gamma=0.1, H=3)}),
        ({"method": fs.FedAvg(gamma=0.1)}, {"method": fs.FedProx(gamma=0.1, mu=1.0)}),
        ({"method": fs.FedAvg(gamma=decay(0.9))}, {"method": fs.FedAvg(gamma=decay(0.8))}),
        ({"method": fs.FedAvg(gamma=decay(0.9))}, {"method": fs.FedAvg(gamma=0.1)}),
        ({"participation": 2}, {"participation": 1}),
        ({"function": fs.black_box(made(1.0, A))}, {"function": fs.black_box(made(2.0, A))}),
    ],
)  # fmt: skip
def test_another_computation_is_another_round(one, other):
    zeroth = {"method": fs.FedRZO(gamma=0.1, eta=0.1)} if "method" not in one else {}
    assert programs(**zeroth | one)["round"] != programs(**zeroth | other)["round"]


def test_metrics_are_no_part_of_a_round():
    one, other = (programs(metrics={"norm": lambda x, y, p=p: (x**p).sum()}) for p in (1, 2))
    assert one["round"] == other["round"]
    assert one["measure"] != other["measure"]


def test_real_numbers_are_arguments_of_a_program_and_part_of_a_run():
    one, other = fs.FedAvg(gamma=0.1, H=2), fs.FedAvg(gamma=0.2, H=2)
    assert programs(method=one) == programs(method=other)
    first = pose(fs.Minimization(loss), one, data, np.zeros(2), rounds=1)
    assert differences(first.identity, first.identity) == []
    second = replace(first, methods=[other], method=other)
    assert differences(first.identity, second.identity) == ["method.gamma: 0.1 there, 0.2 here"]


class Simulator:
    """A program of the host."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, s):
        return self.scale * x


def host(factor, table=A):
    def f(x, y=1.0):
        return float(factor * LAM * (x - table).sum() + y)

    return f


def documented(factor, table=A):
    def g(point, y=1.0):
        """The same."""
        return float(factor * LAM * (point - table).sum() + y)  # with a comment

    return g


def test_functions_of_the_host_are_known_by_their_code(monkeypatch):
    assert digest_of(host(1.0)) == digest_of(documented(1.0))
    assert digest_of(host(1.0)) == digest_of(host(1.0, A.copy()))
    assert digest_of(lambda x: 2 * x) == digest_of(lambda z: 2 * z)
    ways = [host, functools.partial(functools.partial, host(2.0)), Simulator, lambda f: fs.on_host(host(f))]
    for make in ways:
        assert digest_of(make(1.0)) == digest_of(make(1.0))
        assert digest_of(make(1.0)) != digest_of(make(3.0))
    before, calls = digest_of(host(1.0)), digest_of(imports)
    monkeypatch.setitem(globals(), "LAM", 0.75)
    assert digest_of(host(1.0)) != before
    assert digest_of(imports) == calls
    one, other = host(1.0), host(2.0)
    one.fingerprint = other.fingerprint = "the simulator, version 3"
    assert digest_of(fs.black_box(one)) == digest_of(fs.black_box(other))


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


INNER = {
    "jax.jit": lambda f: jax.jit(f),
    "jax.custom_jvp": lambda f: jax.custom_jvp(f),
    "functools.cache": lambda f: functools.cache(f),
    "an array": lambda f: types.MethodType(lambda table, x: table * x, np.full(1, f(1.0))),
    "an attribute": lambda f: Scaled(f(1.0)),
    "a base class": lambda f: type("Model", (type("Base", (), {"value": f}),), {})(),
    "a module": lambda f: vars(helpers).update(penalty=f) or helpers,
}


@pytest.mark.parametrize("name", INNER)
def test_another_function_inside_of_the_same_one_is_another_program(name, monkeypatch):
    """As when the cell of a notebook that defines a helper is run again, and the loss is not."""
    monkeypatch.setattr(helpers, "penalty", None)
    held = {}

    def outer(x, s):
        return inner.penalty(x) if name == "a module" else inner(x)

    for factor in (1.0, 2.0):
        inner = INNER[name](lambda x, factor=factor: factor * x)
        held[factor] = current(outer)
        inner = INNER[name](lambda x, factor=factor: factor * x)
        assert current(outer) == held[factor] != ""
    assert held[1.0] != held[2.0]


def test_rules_for_derivatives_and_methods_classes_are_looked_into():
    @jax.custom_jvp
    def power(x):
        return x**3

    class Own(fs.FedAvg):
        def local_steps(self, *args):
            return factor

    power.defjvp(lambda primals, tangents: (power(*primals), tangents[0]))
    factor, before = 1.0, current(lambda x: power(x))
    was = current(Own)
    power.defjvp(lambda primals, tangents: (power(*primals), 2 * tangents[0]))
    assert current(lambda x: power(x)) != before
    factor = 2.0
    assert current(Own) != was


def test_data_is_known_by_its_contents():
    again = fs.FederatedData.from_clients([{"a": A.copy()}, {"a": A + 1}])
    assert data.fingerprint == again.fingerprint
    rows = np.concatenate([A, A + 1])
    others = [
        fs.FederatedData.from_clients([{"a": A}, {"a": A + 2}]),
        fs.FederatedData.from_clients([{"b": A}, {"b": A + 1}]),
        fs.FederatedData({"a": rows}, [2, 4]),
        fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}], test={"a": A}),
        fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}], server={"a": A}),
        fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}], valid=[{"a": A}, {"a": A}]),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 7


ARGUMENTS = {
    "problem": fs.Minimization(loss),
    "method": fs.FedAvg(gamma=decay(0.9), H=2),
    "data": data,
    "x0": np.zeros(2),
    "rounds": 2,
    "metrics": {"norm": lambda x, y: (x**2).sum(), "host": fs.on_host(lambda x, y: 1.0)},
    "progress": False,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that was saved."""
    folder = tmp_path_factory.mktemp("saved")
    fs.solve(**ARGUMENTS, checkpoint=folder)
    return folder


def metrics(**changes):
    return {"metrics": {**ARGUMENTS["metrics"], **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": fs.FederatedData.from_clients([{"a": A}, {"a": A + 2}])}, "data: other contents"),
        ({"problem": fs.Minimization(lambda x, s: 2 * loss(x, s))}, "round: another program"),
        ({"x0": np.ones(2)}, "x0: other contents"),
        ({"method": fs.FedAvg(gamma=0.1, H=2)}, "method.gamma: 'function' there, 0.1 here"),
        ({"method": fs.FedAvg(gamma=decay(0.9))}, "method.H: 2 there, 1 here"),
        (metrics(norm=lambda x, y: abs(x).sum()), r"\(measure: another program[^;]*\)\. Resume"),
        (metrics(host=fs.on_host(lambda x, y: 2.0)), r"\(metrics\['host'\]: another function\)\. Resume"),
        ({"metrics": {}}, r"metrics\['host'\]: only there"),
        ({"weights": "size"}, "weights: 'uniform' there, 'size' here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"default_metrics": False}, "default_metrics"),
    ],
)
def test_another_run_is_refused_with_what_differs(change, words, saved):
    with pytest.raises(fs.CheckpointError, match=words):
        fs.solve(**{**ARGUMENTS, **change}, checkpoint=saved, resume=True)


CONFIGURED = {
    "x64: (False there, True|True there, False) here": lambda: jax.enable_x64(not jax.config.jax_enable_x64),
    "matmul_precision: None there, 'highest' here": lambda: jax.default_matmul_precision("highest"),
    "prng: 'threefry2x32' there, 'rbg' here": lambda: jax.default_prng_impl("rbg"),
}


@pytest.mark.parametrize("words", CONFIGURED)
def test_another_configuration_of_jax_is_the_reason(words, saved):
    with CONFIGURED[words](), pytest.raises(fs.CheckpointError, match=rf"another run \({words}\)\. Resume"):
        fs.solve(**ARGUMENTS, checkpoint=saved, resume=True)


def test_another_version_of_jax_is_the_reason(saved, monkeypatch):
    version = jax.__version__
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    with pytest.raises(fs.CheckpointError, match=rf"another run \(JAX: '{version}' there, '0.0.1' here\)"):
        fs.solve(**ARGUMENTS, checkpoint=saved, resume=True)


def test_the_same_run_is_resumed_by_equal_arguments(tmp_path):
    fs.solve(**ARGUMENTS, checkpoint=tmp_path)
    equal = {
        "problem": fs.Minimization(renamed),
        "method": fs.FedAvg(gamma=decay(0.9), H=2),
        "data": fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}]),
        "metrics": {"norm": lambda x, y: (x**2).sum(), "host": fs.on_host(lambda x, y: 1.0)},
        "rounds": 4,
    }
    resumed = fs.solve(**{**ARGUMENTS, **equal}, checkpoint=tmp_path, resume=True)
    whole = fs.solve(**{**ARGUMENTS, "rounds": 4})
    np.testing.assert_array_equal(resumed.x, whole.x)


def test_second_variables_and_sweeps_are_told_apart(tmp_path):
    problem = fs.Minimax(lambda x, y, s: (x - s["a"]) @ y - y @ y)
    arguments = {"problem": problem, "x0": np.zeros(2), "y0": np.zeros(2), "rounds": 2, "progress": False}
    methods = [fs.LocalSGDA(eta_x=0.1, eta_y=g) for g in (0.1, 0.2)]
    fs.sweep(**arguments, methods=methods, data=data, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match="y0: other contents"):
        fs.sweep(
            **{**arguments, "y0": np.ones(2)}, methods=methods, data=data, checkpoint=tmp_path, resume=True
        )
    with pytest.raises(fs.CheckpointError, match=r"methods\[1\].eta_y: 0.2 there, 0.1 here"):
        fs.sweep(**arguments, methods=[methods[0]] * 2, data=data, checkpoint=tmp_path, resume=True)
