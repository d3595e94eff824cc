"""The model inside a result: found in its problem, kept with what is saved, applied to new data."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.problem import Level, Problem
from fedstrata.core.term import Term
from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.preparation import Preparation
from fedstrata.data.samples import by_name
from fedstrata.models.model import SEEN, Model
from fedstrata.models.registry import MODELS

PREPARED = "prepared.json"
DEPTH = 6  # of nested functions in which a model is searched for


class Predictor(NamedTuple):
    """A model, its parameters and their place in a result, and the preparation of new data."""

    model: Model
    parameters: PyTree
    place: str
    preparation: Any = None

    def predict(self, new: Any) -> np.ndarray:
        """Labels (words, if the table had words) or numbers."""
        found = self._applied(self.model.predict, new)
        classes = self.classes
        return found if classes is None else np.array(classes)[found]

    def predict_proba(self, new: Any) -> np.ndarray:
        """The probability of each class."""
        return self._applied(self.model.predict_proba, new)

    def _applied(self, function: Callable[[PyTree, Any], np.ndarray], new: Any) -> np.ndarray:
        inputs = self.inputs(new)
        try:
            return function(self.parameters, inputs)
        except TypeError as error:
            shape = list(np.shape(inputs))
            raise DataError(f"The model cannot be applied to inputs of shape {shape}: {error}") from error

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, if the label was a word."""
        return None if self.preparation is None else self.preparation.classes

    def inputs(self, new: Any) -> Any:
        """The inputs: arrays unchanged; tables and dicts of arrays prepared like the training data."""
        if isinstance(new, np.ndarray | jax.Array):
            return new
        if self.preparation is not None:
            return self.preparation.apply(new)["x"]
        try:
            return new["x"]
        except (TypeError, KeyError, IndexError) as error:
            raise DataError(
                "The training data had no preparation: give the inputs as an array, or as {'x': array}."
            ) from error


def find(problem: Problem | None, data: Any, x: PyTree, y: PyTree) -> Predictor | None:
    """The model in a problem's functions, and the variable with its parameters, found by their shapes.

    None if a function gives the model changed features instead of the samples' own: the model alone would
    predict something else.
    """
    sample = _sample(data)
    for level in () if problem is None or sample is None else problem.levels:
        for model in _models(level.function, DEPTH, set()):
            shapes = _shapes(model.init(0))
            for place in ("x", "x.x", "y"):
                if _shapes(parameters := _at(place, x, y)) == shapes and _as_it_is(level, x, y, sample):
                    return Predictor(model, parameters, place, data.preparation)
    return None


def _sample(data: Any) -> Any:
    """A sample as losses see it; None if the samples are not in memory, or not ``{"x": …}``."""
    if not isinstance(data, FederatedData) or data.source is not None or "x" not in by_name(data.train):
        return None
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.client(0))


def _as_it_is(level: Level, x: PyTree, y: PyTree, sample: PyTree) -> bool:
    """Whether models in a level's function see the sample's own ``x``."""
    given: list[Any] = []

    def traced(args: tuple[PyTree, ...], sample: PyTree) -> Any:
        given.append(sample["x"])
        return level.function(*args, sample)

    inputs: list[Any] = []
    token = SEEN.set(inputs)
    try:
        jax.eval_shape(traced, level.args(x, y), sample)
    except (TypeError, ValueError):  # it reads a batch, or another level's value
        return False
    finally:
        SEEN.reset(token)
    return bool(inputs) and all(u is given[0] for u in inputs)


def _at(place: str, x: PyTree, y: PyTree) -> PyTree:
    """The variable at a place; ``x.x`` is the model in a lifted variable of a robust problem."""
    return y if place == "y" else x if place == "x" else getattr(x, "x", None)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _models(thing: Any, depth: int, seen: set[int]) -> Iterator[Model]:
    """The models in a function: its own, and those in its closure, its globals or its partial's function."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Model):
        yield thing
    elif callable(thing) and depth:
        for inner in [getattr(thing, "model", None), *_inside(thing)]:
            if isinstance(inner, Model) or callable(inner):
                yield from _models(inner, depth - 1, seen)


def _inside(function: Any) -> list[Any]:
    match function:
        case functools.partial():
            return [function.func, *function.args, *function.keywords.values()]
        case Term():
            return [function.function]
        case _ if inspect.isfunction(function):
            try:
                known = inspect.getclosurevars(function)
            except ValueError:  # a name that has no value yet
                return []
            return [*known.nonlocals.values(), *(v for v in known.globals.values() if isinstance(v, Model))]
        case _ if inspect.ismethod(function):
            return [function.__self__, function.__func__]
    return [*getattr(function, "__dict__", {}).values()]


def save(predictor: Predictor | None, preparation: Any, folder: Path) -> dict[str, Any] | None:
    """Keep the preparation in ``prepared.json``; returns the facts about the model for the result's own file.

    None without a model, or if its arguments are not plain values that a file can hold.
    """
    lost = False
    try:
        if preparation is not None:
            preparation.save(folder / PREPARED)
    except (AttributeError, DataError):  # of another library, or with a user's own step
        lost = True
    if lost or predictor is None or predictor.model.recipe is None:
        return None
    name, arguments = predictor.model.recipe
    try:
        plain = json.loads(json.dumps(arguments))
    except TypeError:  # a user's own loss
        return None
    prepared = preparation is not None
    return {"name": name, "arguments": plain, "place": predictor.place, "prepared": prepared}


def load(kept: dict[str, Any], x: PyTree, y: PyTree, folder: Path) -> Predictor:
    """The predictor of a saved result."""
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in kept["arguments"].items()}
    preparation = Preparation.load(folder / PREPARED) if kept["prepared"] else None
    model = MODELS[kept["name"]](**given)
    its, structure = jax.tree.flatten(model.init(0))
    # a file stores a lifted variable as the list of its leaves; the model's come first
    leaves = jax.tree.leaves(y if kept["place"] == "y" else x)[: len(its)]
    return Predictor(model, jax.tree.unflatten(structure, leaves), kept["place"], preparation)
