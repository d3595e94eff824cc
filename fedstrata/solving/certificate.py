"""What `fedstrata.certify` found of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from fedstrata.support.shown import WIDTH

Verdict: TypeAlias = Literal[
    "solved",
    "on its way",
    "oscillating",
    "biased by drift",
    "at the noise floor",
    "diverging",
    "not certifiable",
]


@dataclass(frozen=True)
class Certificate:
    """How far a point is from a solution.

    Attributes:
        solved: whether it is a solution to the accuracy asked for.
        verdict: ``"solved"``, ``"on its way"``, ``"oscillating"``, ``"biased by drift"``, ``"at the noise
            floor"``, ``"diverging"`` or ``"not certifiable"``.
        value: the excess F(x) − F*, as estimated; NaN where the point is not certifiable.
        interval: the least that it is, and the most that the measure leaves possible.
        advice: the one thing to change, in a sentence.
        objective: F(x) with the lower level solved, where the history has it at the current y.
        relative: the excess relative to that of the start; NaN where the start is not known.
        distance: how far x is from the best point that was found, relative to that.
        outside: how far x is outside of its set, relative to its length.
        remarks: what else was found.
        calls: what it cost: evaluations of F and its gradient, each a pass over all samples, or several where
            a lower level is solved.
    """

    solved: bool
    verdict: Verdict
    value: float
    interval: tuple[float, float]
    advice: str
    objective: float = np.nan
    relative: float = np.nan
    distance: float = np.nan
    outside: float = 0.0
    remarks: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        words: list[str] = [self.verdict]
        if np.isfinite(self.value):
            low, high = self.interval
            words.append(f"objective {self.objective:.6g}")
            words.append(f"{self.value:.2g} above the best ({low:.2g} to {high:.2g})")
        if np.isfinite(self.relative):
            words.append(f"{self.relative:.1%} of the start's excess")
        if np.isfinite(self.distance):
            words.append(f"x {self.distance:.1%} away")
        words += [*self.remarks, self.advice]
        words = [word for word in words if word]
        short = f"Certificate({', '.join(words)})"
        return short if len(short) <= WIDTH else "Certificate(\n  " + ",\n  ".join(words) + ",\n)"
