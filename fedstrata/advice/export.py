"""A comparison as a benchopt folder: its problems are datasets, its methods are one solver's parameters.

    comparison.to_benchopt("contest")
    benchopt run contest                # extra benchopt

`contest.pkl` has the problems, data and methods, written by cloudpickle, including functions from notebooks.
A run of n rounds begins at the start, because benchopt requests the points of n = 1, 2, 4, … rounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.core.method import Method
from fedstrata.support.lazy import extra

FILES = {
    "objective.py": '''"""F, with lower levels solved, as `fedstrata.compare` judges points."""

from benchopt import BaseObjective
from fedstrata.advice.score import score_of


class Objective(BaseObjective):
    name = "F, lower levels solved"
    min_benchopt_version = "1.6"
    requirements = ["pip::fedstrata"]

    def set_data(self, case, problem, data, x0, y0, options):
        self.given = dict(case=case, problem=problem, data=data, x0=x0, y0=y0, options=options)
        self.score = score_of(problem, data, options["weights"], x0, y0)

    def get_objective(self):
        return self.given

    def evaluate_result(self, x, y):
        return dict(value=self.score(x, y))

    def get_one_result(self):
        return dict(x=self.given["x0"], y=self.given["y0"])
''',
    "datasets/cases.py": """from pathlib import Path

import cloudpickle
from benchopt import BaseDataset


class Dataset(BaseDataset):
    name = "case"
    parameters = {{"case": {cases!r}}}

    def get_data(self):
        contest = cloudpickle.loads((Path(__file__).parents[1] / "contest.pkl").read_bytes())
        return contest["cases"][self.case]
""",
    "solvers/methods.py": """from pathlib import Path

import cloudpickle
import fedstrata as fs
from benchopt import BaseSolver


class Solver(BaseSolver):
    name = "fedstrata"
    sampling_strategy = "iteration"
    parameters = {{"method": {methods!r}}}

    def set_objective(self, case, problem, data, x0, y0, options):
        contest = cloudpickle.loads((Path(__file__).parents[1] / "contest.pkl").read_bytes())
        self.begun, self.given = (x0, y0), (problem, contest["methods"][self.method][case], data, x0)
        self.options = dict(options, y0=y0, progress=False, certify=False, default_metrics=False)

    def run(self, rounds):
        self.found = self.begun
        if rounds > 0:
            result = fs.solve(*self.given, rounds=rounds, eval_every=rounds, **self.options)
            self.found = result.x, result.y

    def get_result(self):
        x, y = self.found
        return dict(x=x, y=y)
""",
}


def write_benchopt(
    cases: Mapping[str, Mapping[str, Any]],
    methods: Mapping[str, Mapping[str, Method]],
    folder: str | os.PathLike[str],
) -> Path:
    """Write the folder; returns its path.

    Args:
        cases: name → problem, data, x0, y0 and the options of `fedstrata.solve`.
        methods: name → the method of each case.
        folder: a new folder, or one whose files may be replaced.
    """
    with extra("benchopt", "comparison.to_benchopt"):
        import cloudpickle

    root, names = Path(folder), {"cases": list(cases), "methods": list(methods)}
    for file, text in FILES.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**names) if "{{" in text else text)
    (root / "contest.pkl").write_bytes(cloudpickle.dumps({"cases": dict(cases), "methods": dict(methods)}))
    return root
