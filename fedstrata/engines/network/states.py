"""What a site's clients remember, in states that the server names: which rounds count is its to say.

A state is named by the number of the message that left it; 0 is what there was before the first round. Every
request names the state that it builds on, and those that the server may come back to; the rest is forgotten.
So one rule covers a retry, a server that went back to its checkpoint, a site that was away or restarted, and
a late answer to a round that was then done without the site: that state is never named again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.engines.network.text import START_ROUND
from fedstrata.support.sealed import CheckpointError, flatten, load_arrays, save_arrays, unflatten

_PREFIX, _SUFFIX = "state_", ".safetensors"


class SiteRefused(RuntimeError):
    """A site does not do what it is asked; it has changed nothing."""


class Forgotten(SiteRefused):
    """Nothing of a run that has begun is remembered."""

    def __init__(self) -> None:
        super().__init__(
            "This site remembers nothing of the run that has begun (an empty disk?). Bring back its folder, "
            "or let the policy take it as a new site."
        )


class States:
    """The states of one site in one run.

    Args:
        first: what clients remember before the first round; None where the method has no memory.
        folder: where states are kept, each sealed by a digest; None keeps them in this process.
        data: the fingerprint of the site's samples: states belong to them.

    Attributes:
        number, memory: the state that the clients are in.
    """

    def __init__(self, first: PyTree, folder: Path | None = None, data: str = "") -> None:
        self.first, self.folder, self.data = first, folder, data
        self.number, self.memory = 0, first
        self._others: dict[int, PyTree] = {}  # where there is no folder
        self._there = set() if folder is None else set(numbers_in(folder))

    def start(self, numbers: Sequence[int] = (0,)) -> None:
        """Forget everything: what there was before the first round stands for these states."""
        self._forget_but(())
        for number in reversed(numbers):  # the first of them is left last, and is then the present one
            self.leave(number, self.first)

    def check(self, wanted: Sequence[int]) -> None:
        """Whether this site can continue in a run from the first of these states, after a restart say.

        Raises:
            Forgotten: if nothing is remembered.
            SiteRefused: if what is remembered is damaged, of other data, or not what is wanted.
        """
        for number in self._there:  # a damaged file is found now, not in the middle of the run
            self._load(number)
        if wanted[0] and not self._there:
            raise Forgotten
        self.at(wanted[0])

    def at(self, number: int) -> PyTree:
        """What clients remember in a state.

        Raises:
            SiteRefused: if the state is not kept here.
        """
        if number == self.number:
            return self.memory
        if number in self._there:
            return self._load(number)
        if number == 0:  # before the first message nothing has been left, so that there is no file
            return self.first
        raise SiteRefused(
            f"This site is to continue from its state after message {number}, which it does not have; "
            f"its newest is of message {self.newest}. Was its folder restored from a backup, or does another "
            "process answer in its name? Bring back its newest folder, or empty it and let the policy take "
            "the site as a new one."
        )

    @property
    def newest(self) -> int | None:
        """The state that was left last, or None."""
        return max(self._there, default=None)

    def go_to(self, wanted: Sequence[int]) -> None:
        """Be in the first of these states, and forget all that are not among them."""
        self.number, self.memory = wanted[0], self.at(wanted[0])
        self._forget_but(wanted)

    def leave(self, number: int, memory: PyTree, r: int = START_ROUND) -> None:
        """Be in a new state, in round r; it is on disk before anybody hears of it."""
        if self.folder is None:
            self._others[number] = memory
        else:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Sealed with what it is: a file that was renamed, or is of other samples, is refused when read.
            facts = {"state": number, "round": r, "data": self.data}
            save_arrays(self._file(number), flatten("memory", memory), facts)
        self._there.add(number)
        self.number, self.memory = number, memory

    def _forget_but(self, wanted: Sequence[int]) -> None:
        # What the server will never name again goes: there are as many files as states that it may name.
        for number in self._there - set(wanted):
            self._others.pop(number, None)
            if self.folder is not None:
                self._file(number).unlink(missing_ok=True)
            self._there.discard(number)

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}{number}{_SUFFIX}"

    def _load(self, number: int) -> PyTree:
        if self.folder is None:
            return self._others[number]
        file = self._file(number)
        try:
            arrays, facts = load_arrays(file)
            memory = unflatten("memory", self.first, arrays, file)
        except CheckpointError as error:
            raise SiteRefused(str(error)) from error
        if facts.get("data") != self.data:
            raise SiteRefused(
                "This site's samples are not those with which it took part in the run so far. Bring them "
                "back, or begin another run."
            )
        if facts.get("state") != number:
            raise SiteRefused(f"{file} holds the state {facts.get('state')}: it was renamed.")
        return memory


def numbers_in(folder: Path) -> list[int]:
    """The states that are kept in a folder, the oldest first."""
    names = (file.name for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"))
    middles = (name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in names)
    return sorted(int(middle) for middle in middles if middle.isdigit())


def first_of(one: PyTree, clients: int) -> PyTree:
    """What so many clients remember before the first round."""
    return jax.tree.map(lambda leaf: np.repeat(leaf[None], clients, axis=0), one)
