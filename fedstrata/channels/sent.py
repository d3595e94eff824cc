"""What a method's text sends, as data: see `fedstrata.solving.exchanges`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedstrata.channels.examples import Release


class Sent(NamedTuple):
    """One exchange of a method's text.

    Attributes:
        program: ``"start"``, before the first round, or ``"round"``.
        number: which exchange of the program it is; the body of a loop has the same ones at every turn.
        level: under which the ledger books it: ``"main"``, ``"lower"``, ``"step"``.
        phase: what clients run.
        shapes: shape and dtype of each array of an upload.
        gathered: whether the server gets every upload, or their mean.
        reference: whether the method names a point to which the upload is a difference.
        asked: ``"everyone"``, the round's ``"cohort"``, or ``"some"`` that the method chooses.
        times: how often in a round; None where that depends on what happens.
        per_sample: whether an upload has a number for every sample of a client.
        releases: the means over samples that a client takes for it, where they are private; None where their
            number depends on what happens.
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
    releases: tuple[Release, ...] | None = ()

    @property
    def place(self) -> str:
        """Program and number."""
        return f"{self.program} {self.number}"

    @property
    def floats(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Those arrays that a channel acts on."""
        return tuple((s, d) for s, d in self.shapes if np.issubdtype(d, np.inexact) and np.prod(s) > 0)
