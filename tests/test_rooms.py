"""The arrows between the rooms: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedstrata"
BELOW = {
    "support": set(),
    "core": {"support"},
    "data": {"support", "core"},
    "models": {"support", "core", "data"},
    "problems": {"support", "core", "data", "models"},
    "estimators": {"support", "core", "problems"},
    "methods": {"support", "core", "problems", "estimators"},
    "channels": {"support", "core"},
    "engines": {"support", "core", "data", "channels"},
    "solving": {"support", "core", "data", "channels", "engines"},
    "advice": {"support", "core", "data", "problems", "estimators", "methods", "solving"},
    "testing": {
        "support",
        "core",
        "data",
        "engines",
        "problems",
        "estimators",
        "methods",
        "solving",
        "channels",
    },
}
BELOW["lab"] = set(BELOW)
# What is only needed when it is asked for: a result draws itself and predicts, `fs.data.digits` loads data,
# an MPEC's metric finds equilibria.
WHEN_ASKED = {("solving", x) for x in ("advice", "lab", "models")} | {("advice", "lab"), ("data", "lab")}
WHEN_ASKED |= {("problems", "estimators")}
# What an engine shows to `solving`: the class that all of them are, the sweep, what a run is and sends,
# metrics.
INTERFACE = {"batched", "engine", "identity", "metrics", "outline"}
MODULES = sorted(path for room in BELOW for path in (PACKAGE / room).rglob("*.py"))


def imports(path):
    """``(room, names, whether inside a function)`` of every import of the package's own."""
    tree = ast.parse(path.read_text("utf-8"))
    top = set(map(id, tree.body))
    if path.name != "__init__.py":  # of which `lazy` imports what its `if TYPE_CHECKING:` names, when asked
        top |= {id(node) for block in tree.body if isinstance(block, ast.If) for node in block.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedstrata":
            parts, names = node.module.split(".")[1:], [alias.name for alias in node.names]
            if parts:
                yield parts[0], [*parts[1:], *names], id(node) not in top
            else:
                yield from ((name, [], id(node) not in top) for name in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).parts[0]
    for room, names, inside in imports(path):
        if room == own or room not in BELOW:
            assert room in BELOW or own == "lab", f"{own} imports {room}"
            continue
        allowed = room in BELOW[own] or (inside and (own, room) in WHEN_ASKED)
        assert allowed, f"{own} must not import {room} ({', '.join(names)})"
        assert not any(name.startswith("_") for name in names), f"{own} uses {room}'s own {names}"
        if own == "solving" and room == "engines":
            assert names[0] in INTERFACE, f"solving looks into an engine: {names}"


def test_core_is_the_contract_and_nothing_else():
    """What is one of these is never moved; what is none of these has a room of its own."""
    files = {path.stem: path.read_text("utf-8").count("\n") for path in (PACKAGE / "core").glob("*.py")}
    contract = "types tree term client counting fed method hyperparameters problem cohorts __init__"
    assert files.keys() == set(contract.split())
    assert sum(files.values()) <= 2600


def test_there_is_no_module_without_a_room():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("package", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_no_name_hides_a_module(package):
    """``from package import name`` must not give a function where a module has that name."""
    here = ".".join(package.parent.relative_to(PACKAGE.parent).parts)
    modules = {path.stem for path in package.parent.glob("*.py")}
    for node in ast.walk(ast.parse(package.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != here:
            assert not modules & {alias.asname or alias.name for alias in node.names}
