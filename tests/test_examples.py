"""The examples run as they are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    environment = {**os.environ, "PYTHONPATH": str(example.parents[1])}
    done = subprocess.run(
        [sys.executable, example], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_contributors_read_what_runs():
    shown = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert (ROOT / "examples" / "own_method.py").read_text("utf-8").rstrip() in shown


def test_the_walks_name_files_that_there_are():
    walks = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Three walks")[1].split("\n## ")[0]
    files = [name for name in re.findall(r"`([\w/]+\.py)`", walks) if "yours" not in name]
    assert len(files) > 15
    for name in files:
        assert (ROOT / "fedstrata" / name).exists() or (ROOT / name).exists(), name
