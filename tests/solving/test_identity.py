"""What tells runs apart: fingerprints that see every change of meaning, and nothing else."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.core.fingerprint import fingerprint

A = np.arange(6.0).reshape(3, 2)
data = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}])


def loss(x, s):
    return 0.5 * ((x - s["a"]) ** 2).sum()


MODULE = '''
"""A module whose fingerprints are printed."""
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np, optax
import fedstrata as fs
from fedstrata.core.fingerprint import fingerprint

LAM = 0.1
TABLE = {"weights": np.arange(3.0), "names": {"b", "a", "c"}}

def helper(x):
    return LAM * x

def loss(x, s):
    return helper(x).sum() + TABLE["weights"] @ s["a"]

def recursive(x, n=3):
    return x if n == 0 else recursive(x, n - 1)

@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: float
    def __call__(self, x, s):
        return self.factor * loss(x, s)

class Model:
    def __init__(self):
        self.w = np.ones(3)
    def loss(self, x, s):
        return self.w @ x

@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, 0, 1)

@clipped.defjvp
def rule(primals, tangents):
    return clipped(*primals), tangents[0]

def closed(lam):
    return lambda x, s: lam * loss(x, s) if s in {"x", "y", "z"} else 0.0

EVERYTHING = [
    loss, recursive, Scaled(2.0), Model().loss, clipped, closed(0.3), jax.jit(loss), jax.grad(loss),
    jax.vmap(loss, (None, 0)), functools.partial(loss, s={"a": 1}), functools.cache(loss),
    fs.black_box(functools.partial(loss)), fs.per_batch(loss),
    fs.Minimization(loss, project=fs.sets.Ball(2.0)),
    optax.exponential_decay(0.1, 10, 0.9), optax.join_schedules([optax.constant_schedule(1.0)] * 2, [5]),
    jax.nn.relu, jnp.log, np.add, len, jax.random.key(3), optax.adam(1e-3),
]
print(*map(fingerprint, EVERYTHING))
'''


def printed(file, seed):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed}
    output = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, check=True)
    return output.stdout.decode().split()


@pytest.mark.slow
def test_other_processes_and_places_agree(tmp_path):
    (tmp_path / "here").mkdir()
    first, moved, changed = tmp_path / "first.py", tmp_path / "here" / "moved.py", tmp_path / "changed.py"
    first.write_text(MODULE)
    moved.write_text(
        "# further down\n\n" + MODULE.replace("    return LAM * x", '    "More."\n    return LAM * x')
    )
    changed.write_text(MODULE.replace("LAM = 0.1", "LAM = 0.2"))
    found = printed(first, "1")
    assert found == printed(moved, "2")
    differ = [a != b for a, b in zip(found, printed(changed, "1"), strict=True)]
    assert differ == [True, False, True, False, False, *[True] * 9, *[False] * 8]  # those that call the loss


def made(factor, table, power=2):
    def f(x, s):
        return factor * ((x - table) ** power).sum()

    return f


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
        (lambda x, p=1: x, lambda x, p=2: x),
        (lambda x, *, p=1: x, lambda x, *, p=2: x),
        (lambda x: [z + 1 for z in x], lambda x: [z + 2 for z in x]),
        (made(1.0, A), made(2.0, A)),
        (made(1.0, A), made(1.0, A + 1)),
        (made(1.0, A), made(1.0, A.astype(np.float32))),
        (functools.partial(made, 1.0), functools.partial(made, 2.0)),
        (jax.jit(made(1.0, A)), jax.jit(made(2.0, A))),
        (fs.black_box(made(1.0, A)), fs.black_box(made(2.0, A))),
        (optax.exponential_decay(0.1, 10, 0.9), optax.exponential_decay(0.1, 10, 0.8)),
        (fs.sets.Ball(1.0), fs.sets.Ball(2.0)),
        (fs.per_batch(loss), fs.Minimization(loss).loss),
        (0.0, -0.0),
        (1, 1.0),
        (True, 1),
        ([1, [2]], [[1], 2]),
    ],
)
def test_a_change_of_meaning_is_seen(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_what_means_the_same_is_the_same():
    assert fingerprint(made(1.0, A)) == fingerprint(made(1.0, A.copy()))
    assert fingerprint(made(1.0, A)) == fingerprint(made(1.0, np.asfortranarray(A)))
    assert fingerprint(lambda x: 2 * x) == fingerprint(lambda z: 2 * z)
    shared = (1, 2)
    assert fingerprint([shared, shared]) == fingerprint([(1, 2), (1, 2)])


def test_a_counter_is_no_part_of_a_function():
    calls = 0

    def counted(x, s):
        nonlocal calls
        calls += 1
        return loss(x, s)

    before = fingerprint(counted)
    counted(np.zeros(2), {"a": A[0]})
    assert fingerprint(counted) == before


def test_what_cannot_be_looked_into_counts_by_its_class():
    def locked(lock):
        return lambda x, s: loss(x, s) if lock else None

    assert fingerprint(locked(threading.Lock())) == fingerprint(locked(threading.Lock()))
    assert fingerprint(locked(threading.Lock())) != fingerprint(locked(threading.Event()))


def test_a_function_can_be_named():
    one, other = (lambda x, s: 1.0), (lambda x, s: 2.0)
    one.fingerprint = other.fingerprint = "the simulator, version 3"
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(fs.black_box(one)) == fingerprint(fs.black_box(other))
    other.fingerprint = "the simulator, version 4"
    assert fingerprint(one) != fingerprint(other)


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
    "method": fs.FedAvg(gamma=optax.exponential_decay(0.1, 10, 0.9), H=2),
    "data": data,
    "x0": np.zeros(2),
    "rounds": 2,
    "metrics": {"norm": lambda x, y: (x**2).sum()},
    "progress": False,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": fs.FederatedData.from_clients([{"a": A}, {"a": A + 2}])}, "data: other contents"),
        ({"problem": fs.Minimization(lambda x, s: 2 * loss(x, s))}, "loss: another function"),
        ({"problem": fs.Minimization(loss, project=fs.sets.Ball(1.0))}, "project: another function"),
        ({"x0": np.ones(2)}, "x0: other contents"),
        (
            {"method": fs.FedAvg(gamma=optax.exponential_decay(0.1, 10, 0.8), H=2)},
            "method.gamma: another function",
        ),
        ({"method": fs.FedAvg(gamma=0.1, H=2)}, r"method.gamma: 'function \w+' there, 0.1 here"),
        ({"method": fs.FedAvg(gamma=optax.exponential_decay(0.1, 10, 0.9))}, "method.H: 2 there, 1 here"),
        ({"metrics": {"norm": lambda x, y: abs(x).sum()}}, r"metrics\['norm'\]: another function"),
        ({"metrics": {}}, r"metrics\['norm'\]: only there"),
        ({"weights": "size"}, "weights: 'uniform' there, 'size' here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"default_metrics": False}, "default_metrics"),
    ],
)
def test_another_run_is_refused_with_what_differs(change, words, tmp_path):
    fs.solve(**ARGUMENTS, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match=words):
        fs.solve(**{**ARGUMENTS, **change}, checkpoint=tmp_path, resume=True)


def test_the_same_run_is_resumed_by_equal_arguments(tmp_path):
    fs.solve(**ARGUMENTS, checkpoint=tmp_path)
    equal = {
        "problem": fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum()),
        "method": fs.FedAvg(gamma=optax.exponential_decay(0.1, 10, 0.9), H=2),
        "data": fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}]),
        "metrics": {"norm": lambda x, y: (x**2).sum()},
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
