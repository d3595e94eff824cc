"""The library needs its hard dependencies alone, and says which extra has the rest."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
import fedstrata as fs

problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
start = {{"x0": np.zeros(2), "y0": np.zeros(3)}}
result = fs.solve(problem, fs.FedMSA(0.3, 0.4, K=2), data, **start, rounds=200, eval_every=200)
print(np.linalg.norm(result.x - x_star) < 1e-3 * np.linalg.norm(x_star), fs.data.heart().clients)
from fedstrata.__main__ import main
for needs in (result.plot, result.table, fs.data.digits, lambda: fs.IID().draw(data.train, 2), main):
    try:
        needs()
    except (ModuleNotFoundError, SystemExit) as error:
        print(error)
"""


def closure(requirements):
    """The distributions that these bring, themselves among them."""
    found, waiting = set(), [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        name = one.name.lower().replace("_", "-")
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, metadata.requires(name) or ())
    return found


def test_there_are_few():
    assert len(PROJECT["dependencies"]) <= 8


def test_hard_dependencies_solve_a_bilevel_problem():
    hard = closure(PROJECT["dependencies"]) | {"fedstrata", "pip", "setuptools"}
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & hard
    }
    assert {"rich", "sklearn", "matplotlib", "pydantic", "typer", "pooch"} <= others
    code = PROGRAM.format(refused=others)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    solved, *errors = done.stdout.splitlines()
    assert solved == "True 4"
    assert len(errors) == 5
    assert all("pip install 'fedstrata[lab]'" in error for error in errors)
