"""Save a preparation as a JSON file, so that a model can be used elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError
from fedstrata.data.preparation import Preparation, Scaling, Step
from fedstrata.data.tables import Encoding
from fedstrata.support.writing import write_atomically

FORMAT = "fedstrata.preparation"
VERSION = 1
KINDS = {"encoding": Encoding, "scaling": Scaling}


def write(preparation: Preparation, file: Path) -> Path:
    """See `Preparation.save`."""
    content = {"format": FORMAT, "version": VERSION, "steps": [_plain(step) for step in preparation.steps]}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1, default=np.ndarray.tolist)
    write_atomically(file, f"{text}\n".encode())
    return file


def read(file: Path) -> Preparation:
    """See `Preparation.load`."""
    try:
        content = json.loads(file.read_text("utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        return Preparation(tuple(_step(**step) for step in content["steps"]))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not a saved preparation of version {VERSION}: {error}.") from error


def _plain(step: Step) -> dict[str, Any]:
    for kind, cls in KINDS.items():
        if type(step) is cls:
            return {"kind": kind, **vars(step)}
    raise DataError(f"{type(step).__name__} cannot be written: only FedStrata's own steps can.")


def _each(make: Callable[[Any], Any], value: Any) -> Any:
    """``make`` of a value, or of each value of a mapping; None stays None."""
    if isinstance(value, Mapping):
        return {name: _each(make, own) for name, own in value.items()}
    return None if value is None else make(value)


# JSON does not say which of its lists are arrays, and which are words.
MADE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("fill", "mean", "deviation"), partial(_each, partial(np.asarray, dtype=np.float64))),
    **dict.fromkeys(("columns", "categories", "classes"), partial(_each, tuple)),
    "traffic": Counter,
}


def _step(kind: str, **facts: Any) -> Step:
    return KINDS[kind](**{name: MADE.get(name, lambda value: value)(value) for name, value in facts.items()})
