"""What a file names: registries' names with parameters, and methods with all that their options may be."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import optax
from pydantic import BaseModel, ConfigDict, model_validator

from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.methods import METHODS, Method
from fedstrata.support.words import suggest


class Named(BaseModel):
    """A name that a registry knows, and its parameters; a string is a name without any."""

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping | Named):
            raise ValueError(f'must be a table with a name, such as {{ name = "…" }}, but is {given!r}')
        return given

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


def check_name(where: str, named: Named, registry: Iterable[str]) -> None:
    """Raise for a name that a registry does not know, with those that it does."""
    known = list(registry)
    if named.name not in known:
        raise ExperimentError(
            f"{where}: there is no {named.name!r}{suggest(named.name, known)} There are {', '.join(known)}."
        )


def check_parameters(where: str, named: Named, known: list[str]) -> None:
    """Raise for a parameter that there is not."""
    for key in named.parameters:
        if key not in known:
            raise ExperimentError(
                f"{where}: {named.name} has no {key!r}{suggest(key, known)} It has {', '.join(known)}."
            )


def make_method(name: str, parameters: Mapping[str, Any]) -> Method:
    """A method by its name.

    Raises:
        ExperimentError: for parameters that do not fit.
    """
    try:
        return METHODS[name](**{key: _part(f"{name}.{key}", value) for key, value in parameters.items()})
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ExperimentError(text if text.startswith(name) else f"{name}: {text}") from error


def _part(where: str, value: Any) -> Any:
    """An option as Python has it: a list is a tuple, a table with a name is a method or optax's thing."""
    if isinstance(value, list):
        return tuple(_part(where, item) for item in value)
    if not isinstance(value, dict):
        return value
    given = dict(value)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise ExperimentError(f"{where}: a table needs the name of a method, an optax schedule or optimiser.")
    if name in METHODS:
        check_parameters(where, Named(name=name, **given), fields(METHODS[name]))
        return make_method(name, given)
    return _optax(where, name, json.dumps(given, sort_keys=True))


@functools.cache  # the same object again: a compiled program is then used again
def _optax(where: str, name: str, given: str) -> Any:
    known = [n for n in dir(optax) if not n.startswith("_") and callable(getattr(optax, n))]
    if name not in known:
        raise ExperimentError(f"{where}: there is no {name!r}{suggest(name, [*METHODS, *known])}")
    try:
        parts = {key: _part(f"{where}.{key}", item) for key, item in json.loads(given).items()}
        return getattr(optax, name)(**parts)
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{where}: optax's {name}: {error}") from error


def fields(cls: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [f.name for f in dataclasses.fields(cls)]
