"""The result of `solve`: point, history and ledger, with plots, tables, saving and loading."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.counting import Ledger
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.solving.certificate import Certificate, Verdict
from fedstrata.support import html
from fedstrata.support.containers import from_json, to_json
from fedstrata.support.lazy import extra
from fedstrata.support.sealed import CheckpointError, flatten, load_arrays, save_arrays
from fedstrata.support.shown import line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        x: the main variable.
        y: the second variable (lower level, maximiser, personal models with a leading client axis), or None.
        history: name → values at the evaluations; ``"round"``, ``"exchanges"``, ``"bytes_up"``,
            ``"bytes_down"``, ``"oracle_calls"`` and ``"seconds"`` (cumulative, without compiling) are always
            among them.
        ledger: totals of traffic and oracle calls.
        method: the method with its hyper-parameters (a description, if the result was loaded).
        seconds: wall-clock time, compiling included.
        status: ``"done"``, ``"stopped"`` (a callback or early stop) or ``"interrupted"`` (Ctrl-C).
        state: the method's full state.
        problem: the problem that was solved; None if the result was loaded.
        data: the data it was solved on; None if the result was loaded.
        weights: the clients' weights, as given to `fedstrata.solve`.
        measured_on: whose samples the metrics are means of: all clients, or a part of very many.
        compiling: the part of ``seconds`` that went into compiling.
        seed: the random seed.
        start: ``(x0, y0)``; None if the result was loaded.
        participation: the fraction of clients in each round.
        notes: changes that the engine made to the program, and decisions of ``"auto"``, one line each.
    """

    x: PyTree
    y: PyTree
    history: dict[str, np.ndarray]
    ledger: Ledger
    method: Any
    seconds: float
    status: str = "done"
    state: PyTree = field(default=None, repr=False)
    problem: Any = field(default=None, repr=False)
    data: Any = field(default=None, repr=False)
    weights: Weights = "uniform"
    measured_on: str = "all clients"
    compiling: float = 0.0
    seed: int | None = None
    start: tuple[PyTree, PyTree] | None = field(default=None, repr=False)
    participation: float | None = None
    notes: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def certificate(self) -> Certificate:
        """How far the result is from a solution, computed on first access; see `fedstrata.certify`.

        `fedstrata.solve` computes it if that is cheap, see its argument ``certify``.
        """
        from fedstrata.advice.price import remembered

        return remembered(self)

    @property
    def known_method(self) -> Any:
        """The method as an object; None if the result was loaded with a description only."""
        return None if isinstance(self.method, dict) else self.method

    @property
    def verdict(self) -> Verdict | None:
        """The certificate's verdict; None if no certificate was computed."""
        known: Certificate | None = vars(self).get("certificate")
        return None if known is None else known.verdict

    def __repr__(self) -> str:
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([line("Result", self._words()), *notes, *self._advice()])

    def _repr_html_(self) -> str:
        drawn, few = "", list(itertools.islice(self._main(), MOST_CURVES))
        with suppress(ImportError):  # only the lab draws
            from fedstrata.lab.report.plots import inline_svg

            drawn = inline_svg(self.plot(*few)) if len(self.history["round"]) > 1 and few else ""
            drawn += f'<div style="overflow-x:auto">{self.table().to_html()}</div>'
        words = html.note(" ".join([*self.notes, *self._advice()]))
        return html.titled(f"Result: {', '.join(self._words())}", words, drawn)

    def _advice(self) -> list[str]:
        """The certificate's advice, or how to get it."""
        known: Certificate | None = vars(self).get("certificate")
        if known is not None:
            return [f"  {known.advice}"] if known.advice else []
        return ["  Solved? result.certificate tells."] if self.problem is not None else []

    def _words(self) -> list[str]:
        name = describe_method(self.method)["name"]
        words = [name, f"{self.ledger.rounds} rounds"] + [self.status] * (self.status != "done")
        if self.verdict is not None:
            words.append(self.verdict)
        moving = _at_current_y(self.problem)
        for metric, values in itertools.islice(self._main().items(), 2):
            where = " at the current y" if metric in moving else ""
            words.append(
                f"{metric}{where} {html.number(float(values[0]))} → {html.number(float(values[-1]))}"
            )
        words.append(f"{self.weights} weights")
        compiled = f" ({self.compiling:.3g} compiling)" if self.compiling else ""
        return [*words, f"{self.ledger.bytes_up:,} bytes up", f"{self.seconds:.3g} s{compiled}"]

    def _main(self) -> dict[str, np.ndarray]:
        """The metrics by name, the objective first, without what `per_client` adds to one."""
        names = sorted(self.metrics, key=lambda name: (name != "objective", name))
        return {name: self.metrics[name] for name in names if "/" not in name}

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The history without the book-keeping series."""
        return {name: values for name, values in self.history.items() if name not in BOOKKEEPING}

    def plot(self, *names: str, x: str = "round", path: str | os.PathLike[str] | None = None) -> Figure:
        """Metrics against rounds or another series (``"bytes_up"``, ``"seconds"``); saved to ``path``."""
        with extra("lab", "result.plot"):
            from fedstrata.lab.report import plot_history

        figure = plot_history(self.history, metrics=list(names) or list(self.metrics), x=x)
        if path is not None:
            figure.savefig(path)
        return figure

    def table(self) -> Any:
        """The metrics at some rounds, and the ledger: for `print`, for `rich.print` and for notebooks."""
        with extra("lab", "result.table"):
            from fedstrata.lab.report import history_table

        title = "" if self.measured_on == "all clients" else f"Metrics on {self.measured_on}"
        return history_table({"round": self.history["round"], **self.metrics}, self.ledger, title=title)

    @cached_property
    def predictor(self) -> Any:
        """The model of `fedstrata.models` that the problem was made of, its parameters and its preparation.

        Raises:
            ValueError: if no model of the parameters' shapes is found in the problem.
        """
        if (found := self._predictor()) is None:
            raise ValueError(
                "The result has no model: for one, the problem's functions must apply a model of "
                "`fs.models`, whose parameters are x or y, to unchanged samples. Otherwise call "
                "model.predict(result.x, inputs)."
            )
        return found

    def _predictor(self) -> Any:
        from fedstrata.models import predicting

        if (known := vars(self).get("predictor")) is not None:
            return known
        return predicting.find(self.problem, self.data, self.x, self.y)

    def predict(self, new: Any) -> np.ndarray:
        """Predict labels (or numbers) for new data, prepared as the training data was.

        Args:
            new: a data frame, a dict of columns or a CSV file if the training data came from a table; a dict
                ``{"x": inputs}``; or an array of inputs, which is taken as it is.
        """
        return self.predictor.predict(new)

    def predict_proba(self, new: Any) -> np.ndarray:
        """The probability of each class for new data; see `predict`."""
        return self.predictor.predict_proba(new)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``result.safetensors`` (and nothing that needs pickle) into ``folder``; returns its path.

        The model of the problem, if it is one of `fedstrata.models`, is kept with it, and the preparation of
        the data in ``prepared.json``, so that what `fedstrata.load` returns can predict.
        """
        from fedstrata.models import predicting

        file = Path(folder) / "result.safetensors"
        predictor = self._predictor()
        prepared = predictor.preparation if predictor else getattr(self.data, "preparation", None)
        arrays = {f"history/{name}": values for name, values in self.history.items()}
        facts = {
            "x": _describe(self.x),
            "y": _describe(self.y),
            "ledger": self.ledger.to_dict(),
            "method": describe_method(self.method),
            **{name: vars(self)[name] for name in PLAIN},
            "certificate": known.to_dict() if (known := vars(self).get("certificate")) is not None else None,
            "model": predicting.save(predictor, prepared, Path(folder)),
        }
        save_arrays(file, {**arrays, **flatten("x", self.x), **flatten("y", self.y)}, facts)
        return file

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Result:
        """Read what `save` wrote: no ``state``, ``problem`` or ``data``, the method as a description."""
        file = Path(folder) / "result.safetensors"
        arrays, facts = load_arrays(file)
        try:
            result = cls(
                x=_rebuild(facts["x"], "x", arrays),
                y=_rebuild(facts["y"], "y", arrays),
                history={
                    n.removeprefix("history/"): a for n, a in arrays.items() if n.startswith("history/")
                },
                ledger=Ledger.from_dict(facts["ledger"]),
                method=facts["method"],
                **{name: facts[name] for name in PLAIN},
            )
        except KeyError as error:
            raise CheckpointError(f"{file} is not a saved result: it has no {error}.") from error
        if (known := facts["certificate"]) is not None:
            vars(result)["certificate"] = Certificate.from_dict(known)
        if (kept := facts.get("model")) is not None:
            from fedstrata.models import predicting

            vars(result)["predictor"] = predicting.load(kept, result.x, result.y, Path(folder))
        return result


def load(folder: str | os.PathLike[str]) -> Result:
    """Read what `Result.save` wrote: points, history, ledger, certificate, and a model that predicts.

    >>> import fedstrata as fs, tempfile
    >>> data = fs.data.breast_cancer(clients=2, seed=0)
    >>> model = fs.models.for_data("logistic", data)
    >>> result = fs.solve(fs.Minimization(model.loss), fs.FedAvg(0.1), data, model.init(0), rounds=5)
    >>> folder = tempfile.mkdtemp()
    >>> _ = result.save(folder)
    >>> fs.load(folder).predict(data.test["x"][:3]).shape
    (3,)
    """
    return Result.load(folder)


MOST_CURVES = 4  # that a notebook's small plot shows
PLAIN = ("seconds", "status", "weights", "measured_on", "compiling", "seed", "participation")
BOOKKEEPING = ("round", "exchanges", "bytes_up", "bytes_down", "oracle_calls", "seconds")


def describe_method(method: Any) -> dict[str, Any]:
    """Name and hyper-parameters as plain values, which a saved result has already."""
    return method if isinstance(method, dict) else {"name": type(method).__name__, **method.describe()}


def _describe(tree: PyTree) -> Any:
    """The containers of a pytree as JSON; of another kind, the list of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return to_json(
        jax.tree.unflatten(structure, range(len(leaves))), lambda node: {"list": jax.tree.leaves(node)}
    )


def _rebuild(shape: Any, prefix: str, arrays: dict[str, np.ndarray]) -> PyTree:
    count = sum(name.startswith(f"{prefix}/") for name in arrays)
    return from_json(shape, [jnp.asarray(arrays[f"{prefix}/{j}"]) for j in range(count)])


def _at_current_y(problem: Problem | None) -> set[str]:
    """The default metrics that depend on the y of the moment, which need not solve its level."""
    if problem is None or not problem.has_y or type(problem).measure is not Problem.measure:
        return set()
    return {level.name for level in problem.levels if level.variable == "x" and "y" in level.arguments}
