"""The memory of a site's clients, in states that the server names, because it decides which rounds count.

A state is named by the number of the message that left it; 0 is the state before the first round. Every
request names the state that it builds on, and those that the server may return to; the rest is deleted. So
one rule covers a retry, a server that returned to its checkpoint, a site that was away or restarted, and a
late answer to a round that was then completed without the site: that state is never named again.
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
_BACK = "Bring back its newest folder, or empty it and let the policy take the site as a new one."


class SiteRefused(RuntimeError):
    """A site refuses a request; nothing has changed."""


class Forgotten(SiteRefused):
    """The site has no state of a run that has begun."""

    def __init__(self) -> None:
        super().__init__(
            "This site remembers nothing of the run that has begun (an empty disk?). Bring back its folder, "
            "or let the policy take it as a new site."
        )


class States:
    """The states of one site in one run.

    Args:
        first: the clients' memory before the first round; None if the method has no memory.
        folder: the folder of the states, each sealed by a digest; None keeps them in this process.
        data: the fingerprint of the site's samples: states belong to them.

    Attributes:
        number, memory: the state that the clients are in.
    """

    def __init__(self, first: PyTree, folder: Path | None = None, data: str = "") -> None:
        self.first, self.folder, self.data = first, folder, data
        self.number, self.memory = 0, first
        self._others: dict[int, PyTree] = {}  # used without a folder
        self._there = set() if folder is None else set(numbers_in(folder))

    def start(self, numbers: Sequence[int] = (0,)) -> None:
        """Delete all states: the memory before the first round replaces these states."""
        self._forget_but(())
        for number in reversed(numbers):  # the first of them is left last, and is then the present one
            self.leave(number, self.first)

    def check(self, wanted: Sequence[int]) -> None:
        """Check that this site can continue a run from the first of these states, such as after a restart.

        Raises:
            Forgotten: if the site has no state.
            SiteRefused: if the states are damaged, of other data, or lack the requested one.
        """
        for number in self._there:  # a damaged file is found now, not in the middle of the run
            self._load(number)
        if wanted[0] and not self._there:
            raise Forgotten
        self.at(wanted[0])

    def at(self, number: int) -> PyTree:
        """The clients' memory in a state.

        Raises:
            SiteRefused: if the state is not kept here.
        """
        if number == self.number:
            return self.memory
        if number in self._there:
            return self._load(number)
        if number == 0:  # before the first message, no file exists
            return self.first
        raise SiteRefused(
            f"This site must continue from its state after message {number}, which it does not have; "
            f"its newest is of message {self.newest}. Was its folder restored from a backup, or does another "
            f"process answer in its name? {_BACK}"
        )

    @property
    def newest(self) -> int | None:
        """The newest state, or None."""
        return max(self._there, default=None)

    def go_to(self, wanted: Sequence[int]) -> None:
        """Enter the first of these states, and delete all others that are not among them."""
        self.number, self.memory = wanted[0], self.at(wanted[0])
        self._forget_but(wanted)

    def leave(self, number: int, memory: PyTree, r: int = START_ROUND) -> None:
        """Enter a new state, in round r; it is on disk before it is announced."""
        if self.folder is None:
            self._others[number] = memory
        else:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Sealed with its identity: a file that was renamed, or is of other samples, is refused when read.
            facts = {"state": number, "round": r, "data": self.data}
            save_arrays(self._file(number), flatten("memory", memory), facts)
        self._there.add(number)
        self.number, self.memory = number, memory

    def _forget_but(self, wanted: Sequence[int]) -> None:
        # Delete states that the server will never name again: as many files are left as it may name.
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
        except CheckpointError as error:  # whose advice is for a run that can be started again
            why = str(error).partition(". ")[0]
            raise SiteRefused(f"{why}. The run continues from this state. {_BACK}") from error
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
    """The memory of some number of clients before the first round."""
    return jax.tree.map(lambda leaf: np.repeat(leaf[None], clients, axis=0), one)
