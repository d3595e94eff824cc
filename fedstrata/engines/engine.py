"""The interface of an engine: it places the data, and advances a run by some rounds."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.fed import Setup
from fedstrata.core.hyperparameters import Count
from fedstrata.core.method import Method
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.support.threads import cores

# Loaded on first use: most runs need one of them.
ENGINES = {
    "simulated": "simulated.Simulated",
    "streamed": "streamed.Streamed",
    "sharded": "sharded.Sharded",
    "debug": "debug.Debug",
    "network": "network.Network",
}


Chunk = Count | Literal["auto"] | None  # clients of a block


class Carry(NamedTuple):
    """The method's state and the clients' memory (leading axis: clients), from round to round."""

    state: PyTree
    memory: PyTree


class Job(NamedTuple):
    """A run for an engine: its setup, method, seed, and the data as `Engine.place` returned it.

    For several runs side by side, methods and seeds are stacked.
    """

    setup: Setup
    method: Method
    seed: Any
    data: Any


class Lane(NamedTuple):
    """The outcome of some rounds of one run; an engine that runs several side by side returns one for each.

    Attributes:
        history: metric → values, one per evaluation.
        counts: the counts between one evaluation and the next.
        bad_round: the first round whose state was not finite, or −1.
    """

    history: dict[str, np.ndarray]
    counts: list[Counter[str]]
    bad_round: int

    def until(self, number: int) -> Lane:
        """The first ``number`` evaluations."""
        history = {name: values[:number] for name, values in self.history.items()}
        return Lane(history, self.counts[:number], self.bad_round)


class Advanced(NamedTuple):
    """State and memory after some rounds, and the outcome in each lane."""

    carry: Carry
    lanes: list[Lane]


class Unfinished(RuntimeError):
    """An engine cannot continue. The state before is saved if the run has a checkpoint."""


class ClientError(RuntimeError):
    """A phase failed; the message names round, phase and client."""


class TooFewThreads(RuntimeError):
    """JAX's callbacks could hang on this machine."""


def need_two_threads(what: str) -> None:
    """Refuse callbacks if a CPU has one thread: it would wait for a copy that it has to make itself.

    Args:
        what: the feature that needs them, as the beginning of a sentence.

    Raises:
        TooFewThreads: if JAX has one thread on a CPU.
    """
    if jax.default_backend() == "cpu" and max(cores(), jax.local_device_count()) < 2:
        raise TooFewThreads(
            f"{what} need two threads of JAX, and this process has one core. "
            "Set JAX_NUM_CPU_DEVICES=2 before it starts."
        )


class Engine(abc.ABC):
    """Base of all engines. The defaults are for one process, one device and one run."""

    evaluations_at_once: ClassVar[int] = 64  # the most that one call of `advance` takes
    rewrite: bool = False  # whether convolutions with weights of each client's own are compiled as products
    deterministic: bool = False  # whether a GPU's programs give the same bits in every run
    has_data: ClassVar[bool] = True  # whether the clients' samples are where the method's text is
    elsewhere: bool = False  # whether they are in other processes, and the run's data is a placeholder

    def place(self, data: FederatedData) -> Any:
        """Put the data where the phases run: once, and kept with the object."""
        return data.placed()

    def carried(self, method: Any, carry: Carry) -> Carry:
        """State and memory before the first round, in the form that this engine needs."""
        return carry

    def place_carry(self, carry: Carry) -> Carry:
        """Put state and memory on their devices."""
        return jax.device_put(carry)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """State and memory as host arrays, for results and checkpoints."""
        return Carry(*jax.device_get(tuple(carry)))

    def lane(self, carry: Carry, number: int) -> Carry:
        """One run's state and memory."""
        return carry

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """A run's ``(x, y)``; ``host`` is its carry as `fetch` returned it."""
        return method.output(*jax.tree.map(jnp.asarray, host))

    def outputs(self, methods: list[Method], carry: Carry, hosts: list[Carry]) -> list[tuple[PyTree, PyTree]]:
        """The output of every lane."""
        return [self.output(method, carry, host) for method, host in zip(methods, hosts, strict=True)]

    def saved(self, round_number: int) -> None:  # noqa: B027 (most engines need not know)
        """Note that a checkpoint was written after this round; the run never resumes before it."""

    def heed(self, stopping: Callable[[], bool]) -> None:  # noqa: B027 (most engines never wait)
        """Raise `Unfinished`, whatever is under way, as soon as ``stopping()`` holds."""

    def noted(self, round_number: int) -> dict[str, Any]:
        """Plain values of the engine that a checkpoint after this round must keep."""
        return {}

    def recall(self, round_number: int, noted: dict[str, Any]) -> None:  # noqa: B027
        """Resume from a checkpoint after this round, which kept these values; see `noted`."""

    def measured_on(self, data: FederatedData) -> str:
        """The clients over which metrics are averaged, in words."""
        return "all clients"

    def agree(self, value: Any) -> Any:
        """The first process's value, in every process; for decisions that depend on clocks."""
        return value

    @abc.abstractmethod
    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        """The method's exchanges before the first round, and their counts in each lane."""

    @abc.abstractmethod
    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        """``rounds[j]`` rounds before the j-th evaluation, from round ``first``, in lanes that are active."""


def engine_of(engine: str | Engine, streamed: bool = False) -> Engine:
    """An engine from its name, or the engine itself; for ``streamed`` data the default is another one."""
    match engine:
        case Engine():
            return engine
        case str() if engine in ENGINES:
            module, name = ENGINES["streamed" if streamed and engine == "simulated" else engine].split(".")
            return vars(import_module(f"fedstrata.engines.{module}"))[name]()
        case str():
            raise ValueError(
                f"Unknown engine {engine!r}. Choose one of {sorted(ENGINES)}, or give an engine object."
            )
    raise TypeError(f"engine must be a name or an engine object, but is {engine!r}.")
