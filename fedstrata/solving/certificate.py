"""The certificate of a result, and the time that `solve` may spend on unrequested ones."""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from fedstrata.support.shown import WIDTH

if TYPE_CHECKING:
    from fedstrata.solving.result import Result

FREE = 1.0  # seconds that a process spends on certificates that nobody asked for, besides
SHARE = 0.1  # of what its runs take
Certify: TypeAlias = Literal["auto"] | bool
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
        interval: lower and upper bounds of the excess.
        advice: the one thing to change, in a sentence.
        objective: F(x) with the lower level solved, where the history has it at the current y.
        start: F(x0), likewise; NaN if the start is not known.
        relative: the excess relative to that of the start; NaN where the start is not known.
        distance: the distance of x from the best point found, relative to that point.
        outside: the distance of x from its set, relative to ‖x‖.
        remarks: further findings.
        calls: its cost: evaluations of F and its gradient, each one pass over all samples, or several if a
            lower level is solved.
    """

    solved: bool
    verdict: Verdict
    value: float
    interval: tuple[float, float]
    advice: str
    objective: float = np.nan
    start: float = np.nan
    relative: float = np.nan
    distance: float = np.nan
    outside: float = 0.0
    remarks: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON can hold them."""
        return {**asdict(self), "interval": list(self.interval), "remarks": list(self.remarks)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        low, high = values["interval"]
        return cls(**{**values, "interval": (low, high), "remarks": tuple(values["remarks"])})

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


@dataclass
class Allowance:
    """The seconds left for unrequested certificates.

    A process has `FREE` seconds plus a `SHARE` of the time of its runs. Thousands of short runs are not
    slowed down, and a single run is certified if that takes less than a second.
    """

    left: float = FREE

    def earn(self, seconds: float) -> None:
        """Add the share of a run."""
        self.left += SHARE * seconds


ALLOWANCE = Allowance()


def certify_at_end(result: Result, certify: Certify) -> None:
    """Certify a result of `solve` if requested, or if it is cheap."""
    if certify is True:
        try:
            _ = result.certificate
        except Exception as error:  # the answer must not be lost
            warnings.warn(f"The certificate failed: {type(error).__name__}: {error}", stacklevel=4)
        return
    ALLOWANCE.earn(result.seconds)
    # warning filters, which are silenced here, belong to the process: other threads leave them alone
    if certify is False or ALLOWANCE.left <= 0 or threading.current_thread() is not threading.main_thread():
        return
    from fedstrata.advice.price import certified_within

    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        certificate = certified_within(result, ALLOWANCE.left)
    ALLOWANCE.left -= time.perf_counter() - began
    if certificate is not None:
        vars(result)["certificate"] = certificate
