"""Names for the points of a program: for random keys that are used once, also in loops.

A loop's body is traced once, however often it runs, or more than once for a single run. So a number that is
counted while tracing is neither unique nor reproducible. A `Spot` is both: the call's number in the innermost
loop's body, the same for every loop around it, and the turns of these loops, which are traced.

Loops and maps of JAX itself (`jax.lax.scan`, `jax.vmap`, `jax.grad`) are not tracked: inside one, a spot
would stand for many calls, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fedstrata.core import counting
from fedstrata.support.tracing import transformation


class Spot(NamedTuple):
    """A point of a program: the numbers of the call and of the loops around it, and their turns."""

    path: tuple[int, ...]
    turns: tuple[Any, ...]

    def fold(self, key: jax.Array) -> jax.Array:
        """A key of this point alone."""
        for word in (*self.path, *self.turns):
            key = jax.random.fold_in(key, word)
        return key


@dataclass
class _Counter:
    inside: Spot
    trace: Any  # the transformation of JAX in which the numbering began
    number: int = 0


_spot: ContextVar[_Counter | None] = ContextVar("where in its loops a program is", default=None)


@contextmanager
def spots(inside: Spot | None = None, known: bool = True) -> Iterator[None]:
    """Number the points of the program inside, see `spot`; ``known`` is false inside a loop of JAX's own."""
    here = _spot.set(
        _Counter(Spot((), ()) if inside is None else inside, transformation() if known else None)
    )
    loops = counting.turning.set(_turning)
    try:
        yield
    finally:
        _spot.reset(here)
        counting.turning.reset(loops)


def spot() -> Spot:
    """The next point of the program inside `spots`: no other call, and no other turn of a loop, has it.

    A random key folded with it is used once, and is the same however often a loop's body is traced.

    Raises:
        TypeError: inside a loop, a map or a derivative of JAX itself.
    """
    found, known = _next()
    if not known:
        raise TypeError(
            "A phase uses its samples inside a transformation of JAX (vmap, grad, scan, while_loop, jit), "
            "where one call may stand for many. Use loop, repeat and each of fedstrata.core.counting, and "
            "the functions of fedstrata.estimators for derivatives."
        )
    return found


def _next() -> tuple[Spot, bool]:
    """The next point, and whether it is outside of JAX's own loops."""
    here = _spot.get()
    if here is None:
        raise RuntimeError("spot() outside of spots().")
    here.number += 1
    return Spot((*here.inside.path, here.number - 1), here.inside.turns), here.trace == transformation()


def _turning(body: Callable[..., Any]) -> Callable[..., Any]:
    """A loop's body, with numbered turns."""
    at, known = _next()

    def turn(t: Any, *rest: Any) -> Any:
        with spots(Spot(at.path, (*at.turns, t)), known):
            return body(t, *rest)

    return turn
