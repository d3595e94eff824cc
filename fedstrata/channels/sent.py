"""The exchanges of a method, as data; see `fedstrata.solving.exchanges`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.channels.examples import Release

PASSED_BY = -1  # the number of `fed.mean` in a round, which is for metrics: no channel transforms it


class Sent(NamedTuple):
    """One exchange of a method.

    Attributes:
        program: ``"start"``, before the first round, or ``"round"``.
        number: the index of the exchange in the program; the body of a loop has the same ones in every turn.
            -1 is `fed.mean`, which no channel transforms.
        level: the level in the ledger: ``"main"``, ``"lower"``, ``"step"``.
        phase: the name of the clients' phase.
        shapes: shape and dtype of each array of an upload.
        gathered: whether the server gets every upload instead of their mean.
        reference: whether the method names a reference point, to which the upload is a difference.
        asked: ``"everyone"``, the round's ``"cohort"``, or ``"some"`` that the method chooses.
        times: the number of times per round; None if it is not known beforehand.
        per_sample: whether an upload has a number for every sample of a client.
        sent: shape and dtype of each array of the message.
        releases: the means over samples that a client takes for it, if samples are private; None if their
            number depends on the run.
        most: the largest number per round of this and the level's other exchanges with such a number,
            together; None if the method has no limit.
    """

    program: str
    number: int
    level: str
    phase: str
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]
    gathered: bool
    reference: bool
    asked: str
    times: int | None
    per_sample: bool
    sent: tuple[tuple[tuple[int, ...], np.dtype], ...]
    releases: tuple[Release, ...] | None = ()
    most: int | None = None

    @property
    def place(self) -> str:
        """The program and the number, as a string."""
        return f"{self.program} {self.number}"

    @property
    def floats(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """The arrays that a channel transforms."""
        return tuple((s, d) for s, d in self.shapes if jnp.issubdtype(d, jnp.inexact) and np.prod(s) > 0)
