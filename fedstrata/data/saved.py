"""A preparation as a JSON file: what a model needs beside its numbers, so that it can be used elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError
from fedstrata.data.preparation import Preparation, Scaling, Step
from fedstrata.data.tables import Encoding
from fedstrata.support.writing import write_atomically

FORMAT = "fedstrata.preparation"
VERSION = 1


def write(preparation: Preparation, file: Path) -> Path:
    """See `Preparation.save`."""
    content = {"format": FORMAT, "version": VERSION, "steps": [_plain(step) for step in preparation.steps]}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    write_atomically(file, text.encode())
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
    if isinstance(step, Encoding):
        return {
            "kind": "encoding",
            "columns": step.columns,
            "label": step.label,
            "categories": dict(step.categories),
            "classes": step.classes,
            "fill": None if step.fill is None else step.fill.tolist(),
            "traffic": step.traffic,
        }
    if isinstance(step, Scaling):
        mean, deviation = ({k: v.tolist() for k, v in of.items()} for of in (step.mean, step.deviation))
        facts = {"mean": mean, "deviation": deviation, "impute": step.impute, "traffic": step.traffic}
        return {"kind": "scaling", **facts}
    raise DataError(f"{type(step).__name__} is a step that cannot be written: it is none of FedStrata's.")


def _step(kind: str, traffic: dict[str, int], **facts: Any) -> Step:
    if kind == "encoding":
        return Encoding(
            columns=tuple(facts["columns"]),
            label=facts["label"],
            categories={column: tuple(words) for column, words in facts["categories"].items()},
            classes=None if facts["classes"] is None else tuple(facts["classes"]),
            fill=None if facts["fill"] is None else np.asarray(facts["fill"], np.float64),
            traffic=Counter(traffic),
        )
    if kind == "scaling":
        mean, deviation = (
            {name: np.asarray(values, np.float64) for name, values in facts[key].items()}
            for key in ("mean", "deviation")
        )
        return Scaling(mean, deviation, facts["impute"], Counter(traffic))
    raise ValueError(f"a step {kind!r}")
