"""The argument of callbacks, and early ends of a run: a callback, a metric, divergence, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fedstrata.core.counting import Ledger
from fedstrata.core.hyperparameters import Count, check_fields
from fedstrata.core.types import PyTree
from fedstrata.solving.endings import steps_in_words
from fedstrata.solving.result import BOOKKEEPING, Result


class Diverged(FloatingPointError):
    """The iterates became infinite or NaN.

    Its words name the step at fault, for which constants are measured when they are first asked for.

    Attributes:
        round: the round after which they are not; −1 is the start.
        quantity: what is not finite, in words.
        result: the result at the last finite evaluation.
    """

    def __init__(self, round_number: int, quantity: str, result: Result) -> None:
        super().__init__(round_number, quantity)
        self.round, self.quantity, self.result = round_number, quantity, result

    @cached_property
    def fault(self) -> str:
        """Which step to lower, and to what; in general words where that could not be measured."""
        from fedstrata.advice.fault import at_fault

        method = self.result.method
        return at_fault(self.result) or (
            f"Lower the step size{steps_in_words(method)}: fs.plan(problem, data, x0, method="
            f"{type(method).__name__!r}) finds steps from measured constants."
        )

    def __str__(self) -> str:
        if self.round < 0:
            return (
                f"The {self.quantity} is not finite at x0, before any step: look at the data (labels out of "
                "range? engine='debug' finds them) and at the loss."
            )
        problem = self.result.problem
        assumed = f" Methods for {type(problem).__name__} assume {problem.assumes}." if problem.has_y else ""
        return (
            f"{type(self.result.method).__name__} diverged: the {self.quantity} is not finite after round "
            f"{self.round}. {self.fault} Or scale the data, or look closer with engine='debug'.{assumed} "
            "The exception's .result holds the last finite point."
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `fedstrata.solve` or `fedstrata.sweep`. ``result`` is what there is so far, and is saved."""

    def __init__(self, message: str, result: Result | list[Result]) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Progressed:
    """What a callback sees after an evaluation: the round, the metrics so far, the state, the ledger.

    ``lane`` is the run's number in a sweep.
    """

    round: int
    rounds: int
    history: Mapping[str, list[float]]
    state: PyTree
    ledger: Ledger
    lane: int = 0


Callback = Callable[[Progressed], bool | None]


@dataclass(frozen=True)
class EarlyStop:
    """Stop at a metric's ``target``, or after ``patience`` evaluations without a gain of ``min_delta``.

    >>> import fedstrata as fs
    >>> fs.EarlyStop("loss", patience=10)
    EarlyStop(metric='loss', patience=10, min_delta=0.0, target=None, mode='min')
    """

    metric: str
    patience: Count | None = None
    min_delta: float = 0.0
    target: float | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patience is None and self.target is None:
            raise ValueError("EarlyStop needs a patience or a target.")

    def __call__(self, progressed: Progressed) -> bool:
        """Whether to stop now."""
        if self.metric not in progressed.history:
            known = sorted(set(progressed.history) - set(BOOKKEEPING))
            raise KeyError(f"EarlyStop: unknown metric {self.metric!r}; known are {known}.")
        sign = 1.0 if self.mode == "min" else -1.0
        values = sign * np.asarray(progressed.history[self.metric])
        if self.target is not None and values[-1] <= sign * self.target:
            return True
        if self.patience is None or len(values) <= self.patience:
            return False
        return bool(values[-self.patience :].min() > values[: -self.patience].min() - self.min_delta)
