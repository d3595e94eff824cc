"""What an engine is: where it puts the data, and how it advances a run by some rounds."""

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

# Loaded when they are asked for: most runs need one of them.
ENGINES = {
    "simulated": "simulated.Simulated",
    "streamed": "streamed.Streamed",
    "sharded": "sharded.Sharded",
    "debug": "debug.Debug",
    "network": "network.Network",
}


Chunk = Count | Literal["auto"] | None  # clients of a block


class Carry(NamedTuple):
    """What passes from round to round: the method's state and the clients' memory (leading axis: clients)."""

    state: PyTree
    memory: PyTree


class Job(NamedTuple):
    """What an engine is to run: what is fixed, the method, the seed, and the data where the phases run.

    Of several runs side by side, methods and seeds are stacked.
    """

    setup: Setup
    method: Method
    seed: Any
    data: Any  # what the engine's own `place` returned


class Lane(NamedTuple):
    """What happened to one run in some rounds; an engine that runs several side by side has a lane for each.

    Attributes:
        history: metric → values, one per evaluation.
        counts: what was counted before each evaluation, since the one before it.
        bad_round: the first round whose state was not finite, or −1.
    """

    history: dict[str, np.ndarray]
    counts: list[Counter[str]]
    bad_round: int

    def until(self, number: int) -> Lane:
        """The first so many evaluations."""
        history = {name: values[:number] for name, values in self.history.items()}
        return Lane(history, self.counts[:number], self.bad_round)


class Advanced(NamedTuple):
    """What an engine returns after some rounds: state and memory after the last one, and what happened."""

    carry: Carry
    lanes: list[Lane]


class Unfinished(RuntimeError):
    """An engine cannot go on. What there was before is saved where the run has a checkpoint."""


class ClientError(RuntimeError):
    """A phase failed; the message names round, phase and client."""


class TooFewThreads(RuntimeError):
    """JAX's callbacks could hang on this machine."""


def need_two_threads(what: str) -> None:
    """Refuse callbacks where a CPU has one thread: they hang where it waits for what it has to copy.

    Args:
        what: what needs them, as the beginning of a sentence.

    Raises:
        TooFewThreads: if JAX has one thread on a CPU.
    """
    if jax.default_backend() == "cpu" and max(cores(), jax.local_device_count()) < 2:
        raise TooFewThreads(
            f"{what} need two threads of JAX, and this process has one core. "
            "Set JAX_NUM_CPU_DEVICES=2 before it starts."
        )


class Engine(abc.ABC):
    """Where a method runs. The defaults are those of one process, one device and one run."""

    evaluations_at_once: ClassVar[int] = 64  # the most that one call of `advance` takes
    rewrite: bool = False  # whether convolutions with weights of each client's own are compiled as products
    has_data: ClassVar[bool] = True  # whether the clients' samples are where the method's text is
    elsewhere: bool = False  # whether they are in other processes, so that a run's data only stands for them

    def place(self, data: FederatedData) -> Any:
        """Put the data where the phases run: once, and kept with the object."""
        return data.placed()

    def carried(self, method: Any, carry: Carry) -> Carry:
        """What state and memory before the first round are here."""
        return carry

    def place_carry(self, carry: Carry) -> Carry:
        """Put state and memory where they belong."""
        return jax.device_put(carry)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """State and memory as host arrays, for results and checkpoints."""
        return Carry(*jax.device_get(tuple(carry)))

    def lane(self, carry: Carry, number: int) -> Carry:
        """One run's state and memory."""
        return carry

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """The result's ``(x, y)`` of a run's carry; ``host`` is what `fetch` returned of it."""
        return method.output(*jax.tree.map(jnp.asarray, host))

    def outputs(self, methods: list[Method], carry: Carry, hosts: list[Carry]) -> list[tuple[PyTree, PyTree]]:
        """The same of every lane."""
        return [self.output(method, carry, host) for method, host in zip(methods, hosts, strict=True)]

    def saved(self, round_number: int) -> None:  # noqa: B027 (most engines need not know)
        """A checkpoint was written after so many rounds; the run is never taken up before it."""

    def heed(self, stopping: Callable[[], bool]) -> None:  # noqa: B027 (most engines never wait)
        """Give up what is under way, by raising `Unfinished`, as soon as ``stopping()`` holds."""

    def noted(self, round_number: int) -> dict[str, Any]:
        """What a checkpoint after so many rounds must keep of the engine, as plain values."""
        return {}

    def recall(self, round_number: int, noted: dict[str, Any]) -> None:  # noqa: B027
        """Go on from a checkpoint after so many rounds, which kept this; see `noted`."""

    def measured_on(self, data: FederatedData) -> str:
        """Whose samples the metrics are means of, in words."""
        return "all clients"

    def agree(self, value: Any) -> Any:
        """The first process's value in every process: decisions that depend on clocks go through this."""
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
    """An engine from its name, or the engine itself; ``streamed`` data changes what the default is."""
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
