"""The names at `fs.`: all there, imported when they are used, known to type checkers."""

import ast
import subprocess
import sys
from importlib import import_module

import pytest

import fedstrata as fs


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_name_is_there():
    assert {"solve", "FedAvg", "Bilevel", "data", "dro", "METHODS", "sweep"} <= set(fs.__all__)
    assert {*fs.methods.__all__, *fs.problems.__all__, "__version__"} <= set(dir(fs))
    assert {name for name in dir(fs) if not name.startswith("__")} == set(fs.__all__)
    for name in fs.__all__:
        assert getattr(fs, name) is not None
    assert fs.data is import_module("fedstrata.data")
    assert fs.FedAvg is import_module("fedstrata.methods.fedavg").FedAvg
    assert run("from fedstrata import *; print(solve.__name__, FedMSA.__name__)") == ["solve", "FedMSA"]


def test_importing_the_package_imports_no_jax():
    assert run("import sys, fedstrata; print('jax' in sys.modules)") == ["False"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fs.applicable", "fs.solve", "import fedstrata.advice.applicable"])
def test_registries_are_complete_whatever_is_asked_for_first(first):
    code = f"import fedstrata as fs; {first}; from fedstrata.core.method import METHODS; print(*METHODS)"
    ours = {name for name, cls in fs.METHODS.items() if cls.__module__.startswith("fedstrata.")}
    assert set(run(code)) == ours


def test_a_name_that_is_none_says_so():
    with pytest.raises(AttributeError, match="module 'fedstrata' has no attribute 'FedAverage'"):
        _ = fs.FedAverage
    assert not hasattr(fs, "__wrapped__")


@pytest.mark.parametrize("package", ["fedstrata", "fedstrata.lab"])
def test_type_checkers_see_what_python_sees(package):
    module = import_module(package)
    with open(module.__file__, encoding="utf-8") as file:
        (block,) = [node for node in ast.parse(file.read()).body if isinstance(node, ast.If)]
    seen = set()
    for statement in block.body:
        home = import_module(statement.module)
        for alias in statement.names:
            names = home.__all__ if alias.name == "*" else [alias.name]
            seen |= set(names)
            for name in names:
                assert getattr(module, name) is getattr(home, name)
    assert seen == set(module.__all__)
