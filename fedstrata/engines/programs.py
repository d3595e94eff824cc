"""Compiled programs, kept for the next call with the same structure and shapes, and their outputs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.fed import Setup
from fedstrata.core.types import Array, Integer, PyTree
from fedstrata.data.storage import free_bytes
from fedstrata.engines.engine import Engine, Lane
from fedstrata.support.digest import Reader
from fedstrata.support.frozen import lending
from fedstrata.support.tracing import compiling, remark, uncollected

MOST_KEPT = 128  # executables that are kept, each under its own functions and under its digest

_programs: OrderedDict[Any, Program] = OrderedDict()
_lock = Lock()  # threads may solve at the same time; a program compiled twice is only slow


# Of a GPU, for the same bits in every run; an unknown name is an error, on CPUs too.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}


class TooLarge(MemoryError):
    """A program needs more memory than is free on the device."""


@dataclass(frozen=True)
class Program:
    """An executable. It takes leaves: equal programs may have methods of unequal structure."""

    run: Callable[..., PyTree]
    calls_host: bool
    remarks: tuple[str, ...] = ()
    frozen: tuple[Any, ...] = ()  # arrays that it reads besides its arguments
    needs: int = 0  # bytes of memory besides the arguments, where a device says how much is free

    def __call__(self, *args: PyTree) -> PyTree:
        """Run the program.

        Raises:
            TooLarge: if it needs more memory than there is.
        """
        if self.needs and self.needs > (free := free_bytes() or self.needs):
            raise TooLarge(f"A program needs {self.needs:,} bytes besides its arguments; {free:,} are free.")
        return self.run(*jax.tree.leaves(args), *self.frozen)


def program(function: Callable[..., PyTree], engine: Engine, setup: Setup, args: tuple[Any, ...]) -> Program:
    """The executable of ``function(engine, setup, *args)``, from the cache or made now.

    A notebook's cell that is run again defines its functions again. They are traced, and the executable with
    the same equations is reused; not if it calls the host, as such functions may hold anything.
    """
    held = setup.problem.held
    frozen, given = tuple(jax.tree.leaves([one.arrays for one in held])), args
    leaves, structure = jax.tree.flatten((*args, *(one.arrays for one in held)))
    shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    # Matrix products of another precision, or float64, are another program of the same shapes.
    config = jnp.result_type(float), jax.default_matmul_precision.value
    key = (function, engine, key_of(setup), objects(structure), shapes, config)
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            remark(*_programs[key].remarks)
            return replace(_programs[key], frozen=frozen)

    def flat(*leaves: Any) -> PyTree:
        args = jax.tree.unflatten(structure, leaves)
        with lending(held, args[len(given) :]) if held else nullcontext():
            return function(engine, setup, *args[: len(given)])

    with compiling():
        with uncollected():  # while tracing alone: compiling is XLA's, and may take long
            traced, reader = jax.jit(flat).trace(*leaves), Reader()
            digest = reader.text(traced.jaxpr), objects(jax.tree.structure(traced.out_info)), shapes, config
            same: Any = key if reader.calls_host else (digest, engine.rewrite, engine.deterministic)
            with _lock:
                executable = _programs.get(same)
            if executable is None:
                convolves = "conv_general_dilated" in reader.primitives
                lowered, remarks = lowered_by(traced, tuple(leaves), engine.rewrite and convolves)
        if executable is None:
            options = DETERMINISTIC if engine.deterministic else None
            run = lowered.compile(options)
            executable = Program(run, reader.calls_host, remarks, needs=_needs(run))
    remark(*executable.remarks)
    with _lock:  # twice: the same objects need not be traced again, equal equations not compiled
        _programs.update({key: executable, same: executable})
        while len(_programs) > 2 * MOST_KEPT:
            _programs.popitem(last=False)
    return replace(executable, frozen=frozen)


def lowered_by(traced: Any, args: tuple[Any, ...], rewrite: bool) -> tuple[Any, tuple[str, ...]]:
    """Lower a traced program, with convolutions in quicker forms; returns it and remarks."""
    if not rewrite:
        return traced.lower(), ()
    from jax.extend.core import jaxpr_as_fun

    from fedstrata.engines.convolutions import rewritten

    jaxpr, number = rewritten(traced.jaxpr, jax.default_backend())
    if jaxpr is traced.jaxpr:
        return traced.lower(), ()
    flat, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(traced.out_info)
    lowered = jax.jit(lambda *args: jax.tree.unflatten(structure, flat(*jax.tree.leaves(args)))).lower(*args)
    words = "convolutions of clients side by side are compiled as products (not with rewrite=False)"
    return lowered, (f"{number} {words}",) if number else ()


def _needs(run: Any) -> int:
    memory = None if free_bytes() is None else run.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes


def kept() -> frozenset[Any]:
    """The executables in the cache; tests see by it whether a call compiled anything."""
    with _lock:
        return frozenset(found.run for found in _programs.values())


@dataclass(frozen=True, eq=False)
class _Identity:
    """A hashable stand-in for an object without a hash (a set with arrays); it keeps the object alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(setup: Setup) -> Any:
    """A cache key of a setup, see `objects`."""
    return objects(setup.problem), replace(setup, problem=None)  # type: ignore[arg-type]


def objects(value: Any) -> Any:
    """A cache key of a value: objects without a hash are told apart by identity."""
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


@partial(jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("form", "rank"))
@dataclass(frozen=True)
class Rows:
    """Trees, one for each evaluation, as rows of one array, which is a single copy to the host.

    Attributes:
        rows: of shape (evaluations, leaves, …); None without leaves.
        form: the structure of the trees.
        rank: the number of axes of a leaf.
    """

    rows: Array | None
    form: Any
    rank: int

    @classmethod
    def like(cls, tree: PyTree, number: int) -> Rows:
        """Empty rows for ``number`` trees whose leaves have one shape and dtype."""
        leaves, form = jax.tree.flatten(tree)
        if not leaves:
            return cls(None, form, 0)
        return cls(jnp.zeros((number, len(leaves), *leaves[0].shape), leaves[0].dtype), form, leaves[0].ndim)

    def put(self, row: Integer, tree: PyTree) -> Rows:
        """A copy with a tree written into a row."""
        if self.rows is None:
            return self
        new = jnp.stack(jax.tree.leaves(tree))
        return replace(self, rows=jax.lax.dynamic_update_index_in_dim(self.rows, new, row, 0))

    def tree(self) -> PyTree:
        """The trees as one, whose leaves have a leading axis of evaluations, on the host."""
        each = () if self.rows is None else np.moveaxis(np.asarray(self.rows), -1 - self.rank, 0)
        return jax.tree.unflatten(self.form, list(each))


def lanes_of(
    rounds: np.ndarray, history: dict[str, np.ndarray], words: WideCounts, bad: np.ndarray
) -> list[Lane]:
    """The lanes of a program of several runs, stacked on a leading axis; equal counts are settled once."""

    def counts(b: int) -> list[Counter[str]]:
        return counts_of(rounds, tree.row(words, b))

    alike = all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(words))
    shared = counts(0) if alike else None
    lanes = []
    for b, first_bad in enumerate(bad.tolist()):
        values = {name: found[b] for name, found in history.items()}
        lanes.append(Lane(values_of(rounds, values), shared or counts(b), first_bad))
    return lanes


def values_of(rounds: np.ndarray, history: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The metrics without unused slots."""
    return {name: values[: len(rounds)] for name, values in history.items()}


def counts_of(rounds: np.ndarray, words: WideCounts) -> list[Counter[str]]:
    """The counts before each evaluation."""
    return [settle(tree.row(words, j), number) for j, number in enumerate(rounds.tolist())]


@partial(jax.tree_util.register_dataclass, data_fields=("sums",), meta_fields=("fixed", "scaled"))
@dataclass(frozen=True)
class WideCounts:
    """Sums of the factors of many tallies; exact beyond 2³², also without 64-bit mode.

    Attributes:
        sums: two 32-bit words (high, low) for each factor; one array, so that there is little to compile.
        fixed, scaled: the counts, as in a `Tally`.
    """

    sums: Array
    fixed: counting.Items
    scaled: tuple[counting.Items, ...]


def no_counts(tally: counting.Tally) -> WideCounts:
    """Zero counts of the same form as a tally (shapes suffice)."""
    factors, (fixed, scaled) = tally.tree_flatten()
    return WideCounts(jnp.zeros((len(factors), 2), jnp.uint32), fixed, scaled)


def add_counts(words: WideCounts, tally: counting.Tally) -> WideCounts:
    """Add a tally's factors."""
    if not tally.scaled:
        return words
    high, low = words.sums[:, 0], words.sums[:, 1]
    added = low + jnp.stack([factor for _, factor in tally.scaled]).astype(jnp.uint32)
    return replace(words, sums=jnp.stack([high + (added < low), added], axis=1))


def settle(words: WideCounts, times: int) -> Counter[str]:
    """The counts of ``times`` repetitions, with these sums of factors."""
    fixed = Counter({name: amount * times for name, amount in words.fixed})
    sums = [(int(high) << 32) + int(low) for high, low in np.asarray(words.sums)]
    return counting.Tally(
        fixed, [(Counter(dict(c)), s) for c, s in zip(words.scaled, sums, strict=True)]
    ).total()
