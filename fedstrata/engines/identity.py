"""The identity of a run: the programs that it computes, on shapes, whichever engine computes them.

The start, a round and a measurement are traced with one client in every exchange. The digests of the three
jaxprs hold the problem with its sets, the method with its options and schedules, the weights and the metrics:
whatever a user's function reads while it is traced (a helper in another module, the environment, a file)
shows in its equations. Real hyper-parameters, data and the point at which a run starts are arguments, of
which only shapes count. Tracing takes 1–10 % of the time that the first call takes to compile. A function is
traced once in a process, as it is compiled once: what it reads counts as it was then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting, tree
from fedstrata.core.fed import Exchange, Fed, Setup, visit
from fedstrata.core.method import Method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import FlatSamples, Placed, common_size, whole_group
from fedstrata.engines.engine import Carry
from fedstrata.engines.programs import key_of, objects
from fedstrata.engines.rounds import before_rounds, measure, one_round
from fedstrata.support.digest import digest_of, tree_digest
from fedstrata.support.frozen import lending
from fedstrata.support.tracing import compiling

_WORDS = {
    "function": "another function",
    "contents": "other contents",
    "program": "another program (a function, a set or a schedule, or what one of them reads)",
}
MOST_KNOWN = 64  # programs' digests


class OneClient(Fed):
    """Verbs that ask the first of the clients, whose upload stands for the mean of all."""

    data: Placed

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        of = self.everyone if exchange.of is None else exchange.of
        index = of[0]
        memory = tree.row(self.memory, index)
        reply, _ = visit(self.setup, exchange, self.data.client(index, memory))
        if reply.memory is not None:
            self.memory = jax.tree.map(lambda old, new: old.at[index].set(new), self.memory, reply.memory)
        shape = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), reply.upload)
        if exchange.stacked:
            return jax.tree.map(lambda u: jnp.broadcast_to(u, (*of.shape, *u.shape)), reply.upload), shape
        # The weights are among the equations, so that another weighting is another program.
        weight = 1.0 if exchange.weights is None else exchange.weights.sum()
        return jax.tree.map(lambda u: weight * u, reply.upload), shape


def programs_of(setup: Setup, method: Method, carry: Carry, data: FederatedData) -> dict[str, str]:
    """The digests of what a run computes: before the first round, in a round, and at an evaluation.

    Args:
        setup: what is fixed; its metrics are those that are compiled.
        method: with its horizon; of its real hyper-parameters only shapes count.
        carry: state and memory before the first round, of which only shapes count.
        data: of which only shapes count.
    """
    args: tuple[Any, ...] = method, carry, shapes_of(data), jax.random.key(0), jnp.int32(0)
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    key = key_of(setup), objects(structure), shapes, *configuration().values()
    # What a function reads while it is traced counts as it was the first time, as in its compiled program.
    if key not in _known:
        with compiling():
            _known[key] = _traced(setup, *args)
        while len(_known) > MOST_KNOWN:
            del _known[next(iter(_known))]
    return _known[key]


_known: dict[Any, dict[str, str]] = {}  # experiments ask for the same run, or similar ones, several times


def _traced(setup: Setup, method: Method, carry: Carry, data: Placed, key: Key, r: Integer) -> dict[str, str]:
    held = setup.problem.held

    def digest(program: Callable[..., Any], *args: Any) -> str:
        def lent(frozen: list[PyTree], *args: Any) -> Any:
            with lending(held, frozen):
                return program(OneClient, setup, *args)

        # Frozen arrays are arguments, as in the compiled program: they count by a digest of their own.
        with counting.collect():
            return digest_of(jax.make_jaxpr(lent)([one.arrays for one in held], method, carry, *args))

    digests = {"start": digest(before_rounds, key, data)} if method.starts() else {}
    return {**digests, "round": digest(one_round, key, data, r), "measure": digest(measure, data)}


def shapes_of(data: FederatedData) -> Placed:
    """The shapes of a data set where phases run; nothing is read."""

    def rows(part: str, number: int) -> PyTree:
        form = data.sample_of(part)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), form)

    def of_clients(part: str, sizes: np.ndarray) -> FlatSamples:
        total = int(sizes.sum(dtype=np.int64))
        each: Any = jax.ShapeDtypeStruct((data.clients,), jnp.int32)
        return FlatSamples(rows(part, total), each, each, total, common_size(sizes))

    def pooled(part: str, samples: PyTree) -> PyTree:
        leaves = jax.tree.leaves(samples)
        return rows(part, leaves[0].shape[0]) if leaves else None

    test, server = pooled("test", data.test), pooled("server", data.server)
    groups = (whole_group(data.sizes, data.valid_sizes),)
    return Placed(*data.each_part(of_clients), test, server, None, data.clients, groups)


def configuration() -> dict[str, Any]:
    """JAX's version and the settings that change results: runs continue, and sites join, under the same."""
    config: Any = jax.config
    return {
        "JAX": jax.__version__,
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": config.jax_default_matmul_precision,
        "prng": config.jax_default_prng_impl,
        "threefry_partitionable": config.jax_threefry_partitionable,
    }


def settings_of(name: str, value: Any) -> dict[str, Any]:
    """A problem or a method by its class and its fields, as plain values for people to read.

    Functions are in the programs: of them, and of objects, only the kind is told here.
    """
    given = {f.name: vars(value)[f.name] for f in fields(value) if f.init}
    settings = {f"{name}.{field}": _described(one) for field, one in given.items()}
    return {name: type(value).__name__, **settings}


def _described(value: Any) -> Any:
    match value:
        case np.ndarray() | np.generic() | jax.Array() if value.ndim == 0:
            return _described(value.item())
        case None | bool() | int() | float() | str():
            return value
    kinds = bool | int | float | str | np.ndarray | np.generic | jax.Array
    numbers = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, kinds)]
    return f"contents {tree_digest(numbers)}" if numbers else type(value).__name__


def host_functions(functions: Mapping[str, Any]) -> dict[str, str]:
    """Functions of the host, by their code; see `fedstrata.support.digest`."""
    return {name: f"function {digest_of(function)}" for name, function in functions.items()}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The differences between two identities, in words.

    Under another configuration of JAX everything may differ, so that only this is told.
    """
    differing = {}
    for key in dict.fromkeys([*here, *there]):
        if key not in there or key not in here:
            differing[key] = f"only {'here' if key in here else 'there'}"
        elif there[key] != here[key]:
            kinds = [str(value).partition(" ")[0] for value in (there[key], here[key])]
            alike = kinds[0] == kinds[1] and kinds[0] in _WORDS
            differing[key] = _WORDS[kinds[0]] if alike else f"{there[key]!r} there, {here[key]!r} here"
    first = {key: words for key, words in differing.items() if key in configuration()}
    return [f"{key}: {words}" for key, words in (first or differing).items()]
