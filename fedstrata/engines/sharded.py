"""The simulated program with the client axis laid over a device mesh, on one host or several.

The text is the simulated engine's; only the layout differs. Where the clients are not a multiple of the
devices, rows of padding with weight zero fill up the mesh. Over several processes, each joins the others by
`connect`, calls `solve` with the same arguments and gets the same result. Data from a source is read by each
process for its own clients alone, so that no process ever has all of it. Where one of them is lost, the
others say so and end; started again with ``resume=True``, all continue from the last checkpoint.
"""

from __future__ import annotations

import atexit
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedstrata.core.method import Method
from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import FlatSamples, Placed, common_size, on_device, whole_group
from fedstrata.engines.engine import Advanced, Carry, Chunk, Engine, Job
from fedstrata.engines.simulated import Simulated
from fedstrata.support.private_jax import coordination

LEAVING = 5  # seconds that a process waits for the others at its end
NOTICED = 20  # seconds without a sign of life after which JAX counts a process as lost
BEAT = 1.5  # seconds between two signs of life by which the others learn whom they lost
_SIGNS = "fedstrata/signs of life"
_LOST = re.compile(r"gloo|nccl|connection (reset|closed|refused)|socket closed|heartbeat|UNAVAILABLE", re.I)
_lost = threading.Event()  # set when a peer is lost, so that nobody waits for it


class PeerLost(RuntimeError):
    """Another process of the run ended or cannot be reached; the message says which, and what to do."""


def connect(address: str | None = None, processes: int | None = None, number: int | None = None) -> None:
    """Join the processes of a run, before JAX is used otherwise.

    It is `jax.distributed.initialize` with settings by which the loss of a process is noticed and reported.
    Under SLURM, Open MPI or Kubernetes, JAX finds out the arguments by itself.

    Args:
        address: ``host:port`` of the first process, the same in all.
        processes: the number of processes.
        number: this process's number, from 0.
    """
    jax.config.update("jax_enable_recoverability", True)  # else JAX ends this process before it can say why
    jax.distributed.initialize(
        address, processes, number, heartbeat_timeout_seconds=NOTICED, shutdown_timeout_seconds=NOTICED
    )
    number = coordination().process_id
    threading.Thread(target=_beat, args=(number,), name="fedstrata-beat", daemon=True).start()
    atexit.register(_leave)  # before JAX's own, which was registered before


def _beat(number: int) -> None:
    """Write signs of life to the first process, as long as it is there."""
    with suppress(jax.errors.JaxRuntimeError):
        for turn in itertools.count():
            client = coordination().client
            if client is None:
                return
            client.key_value_set(f"{_SIGNS}/{number}", str(turn), allow_overwrite=True)
            time.sleep(BEAT)


def _missing(number: int) -> list[int]:
    """The processes without a new sign of life; the first to find out tells the others."""
    client: Any = coordination().client
    told = "fedstrata/lost"
    if number and not _answers(coordination().coordinator_address or ""):
        return [0]  # it keeps the signs: JAX's client would wait for it, and then end this process

    def signs() -> dict[int, str]:
        entries = client.key_value_dir_get(_SIGNS)
        return {int(key.rpartition("/")[2]): value for key, value in entries}

    try:
        before = signs()
        time.sleep(3 * BEAT)  # a living process has written two or three times meanwhile
        with suppress(jax.errors.JaxRuntimeError):  # no loss was reported yet
            return json.loads(client.key_value_try_get(told))
        after = signs()
        gone = [i for i in before if i != number and after.get(i) == before[i]]
        if gone:
            client.key_value_set(told, json.dumps(gone), allow_overwrite=True)
        return gone
    except jax.errors.JaxRuntimeError as error:
        return [0] if number and _LOST.search(str(error)) else []  # the first one keeps the signs


def _answers(address: str, seconds: float = 2.0) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except (OSError, ValueError):
        return False


def _words(lost: list[int], number: int, processes: int) -> str:
    who = " and ".join(map(str, lost))
    who = f"process {who}" if len(lost) == 1 else f"the processes {who}" if lost else "another one"
    return (
        f"Process {number} of {processes} lost {who}, which {'have' if len(lost) > 1 else 'has'} ended or "
        "cannot be reached, and cannot continue alone. Start all processes again, with a checkpoint and "
        "resume=True: the run continues from the last one that was saved."
    )


def _leave() -> None:
    """Let the first process, which serves the others, end last; else theirs would end with an error.

    JAX's own barrier does not wait for recoverable processes.
    """
    client = coordination().client
    if client is None or _lost.is_set():
        return
    with suppress(jax.errors.JaxRuntimeError):  # a process failed, which is reported elsewhere
        client.wait_at_barrier("fedstrata: the end", 1000 * LEAVING)
        if jax.process_index() == 0:
            time.sleep(1.0)  # the others have passed the barrier, and need the server until they are gone


@contextmanager
def _together() -> Iterator[None]:
    """Turn JAX's errors about a lost process into `PeerLost`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter where a collective fails at once
        if jax.process_count() == 1 or not _LOST.search(str(error)):
            raise
        number = jax.process_index()
        message = _words(_missing(number), number, jax.process_count())
        _lost.set()
        # JAX ends this process where the lost one was the first: often before the exception is handled.
        print(f"PeerLost: {message}", file=sys.stderr, flush=True)
        raise PeerLost(f"{message} ({str(error).splitlines()[0]})") from error


@dataclass(frozen=True)
class Sharded(Simulated):
    """Several devices, one program.

    Args:
        chunk: clients per block over all devices together; None is all at once.
        devices: which devices (default: all that JAX sees, of every process).
    """

    chunk: Chunk = None
    devices: tuple[Any, ...] | None = None
    flat_passes: ClassVar[bool] = False  # tiles of flat arrays would cross devices

    @classmethod
    def over(cls, devices: Sequence[Any]) -> Sharded:
        """An engine over just these devices."""
        return cls(devices=tuple(devices))

    @cached_property
    def mesh(self) -> Mesh:
        """One axis, "clients"."""
        devices = np.array(self.devices if self.devices is not None else jax.devices())
        return Mesh(devices, ("clients",), axis_types=(AxisType.Auto,))

    def multiple(self) -> int:
        """The number of devices, to whose multiples blocks are padded."""
        return int(self.mesh.devices.size)

    def block(self, number: int, message: PyTree, whole: Callable[[], int] | None) -> int:
        """All at once, unless a chunk is asked for."""
        return number if self.chunk in (None, "auto") else super().block(number, message, whole)

    def _layout(self, *axes: str) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def over_clients(self, array: PyTree) -> PyTree:
        """Constrain leading client axes to the mesh."""
        layout = self._layout("clients")
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, layout), array)

    def fixed_layout(self, carry: Carry) -> Carry:
        """The state on every device, the clients' memory over the mesh."""
        everywhere = self._layout()
        state = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, everywhere), carry.state)
        return Carry(state, self.over_clients(carry.memory))

    def _spread(self, leaf: Array | np.ndarray) -> jax.Array:
        """A leading client axis over the mesh, padded with copies of the first row."""
        rows = np.asarray(leaf)
        padding = -rows.shape[0] % self.multiple()  # copies: a phase computes there, and finds real values
        return _put(np.concatenate([rows, np.repeat(rows[:1], padding, axis=0)]), self._layout("clients"))

    def _copy(self, leaf: Array) -> jax.Array:
        return _put(np.asarray(leaf), self._layout())

    def place(self, data: FederatedData) -> Placed:
        """Clients' arrays over the mesh, all else on every device; made once, and kept with the data."""
        return data.placed(self._lay_out, kind=self)

    def clients_here(self, clients: int) -> np.ndarray:
        """The clients whose samples this process holds; a source is asked for no others."""
        rows = -(-clients // self.multiple()) * self.multiple()
        places = self._layout("clients").addressable_devices_indices_map((rows,)).values()
        here = [np.arange(rows)[index] for index in places if index is not None]
        found = np.unique(np.concatenate(here))
        return found[found < clients]

    def _lay_out(self, data: FederatedData) -> Placed:
        """Pad clients to one length, and their number to a multiple of the devices: a mesh divides evenly.

        Each process reads only its own clients' samples.
        """
        if data.source is not None and not len(self.clients_here(data.clients)):
            raise ValueError(
                f"Process {jax.process_index()} of {jax.process_count()} has no client: {data.clients} are "
                f"divided over {self.multiple()} devices. Use fewer processes."
            )
        rows = -(-data.clients // self.multiple()) * self.multiple()
        who = np.minimum(np.arange(rows), data.clients - 1)
        layout = self._layout("clients")

        def part(name: str, sizes: np.ndarray) -> FlatSamples:
            longest, form = int(sizes.max()), data.train if name == "train" else data.valid

            def stacked(clients: np.ndarray) -> list[np.ndarray]:
                real, back = np.unique(clients, return_inverse=True)  # padding repeats the last client
                own = sizes[real]
                starts = np.cumsum(own) - own
                positions = np.minimum(np.arange(longest), own[back][:, None] - 1)
                rows = (starts[back][:, None] + positions).reshape(-1)
                return [leaf[rows] for leaf in jax.tree.leaves(on_device(data.read(real, name), name))]

            places = layout.addressable_devices_indices_map((rows,))
            shards = {d: stacked(who[index]) for d, index in places.items() if index is not None}

            def assembled(number: int, leaf: Any) -> jax.Array:
                each = [jax.device_put(own[number], device) for device, own in shards.items()]
                shape = (rows * longest, *leaf.shape[1:])
                return jax.make_array_from_single_device_arrays(shape, layout, each)

            leaves, structure = jax.tree.flatten(form)
            flat = jax.tree.unflatten(structure, [assembled(j, leaf) for j, leaf in enumerate(leaves)])
            # All of one length, so that the flat array is divided between devices at clients' borders.
            starts = np.arange(rows, dtype=np.int32) * longest
            total = int(sizes.sum(dtype=np.int64))
            sizes_and_starts = self._spread(sizes[who]), self._spread(starts)
            return FlatSamples(flat, *sizes_and_starts, total, common_size(sizes), longest)

        groups = (whole_group(data.sizes, data.valid_sizes),)
        return Placed(*data.each_part(part), *data.pooled(self._copy), None, data.clients, groups)

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        with _together():
            return super().begin(job, carry)

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        with _together():
            return super().advance(job, carry, first, rounds, active)

    def place_carry(self, carry: Carry) -> Carry:
        return Carry(jax.tree.map(self._copy, carry.state), jax.tree.map(self._spread, carry.memory))

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`: from the host, without the mesh's padding."""
        return Engine.output(self, method, carry, host)

    def agree(self, value: Any) -> Any:
        if jax.process_count() == 1:
            return value
        with _together():
            return multihost_utils.broadcast_one_to_all(np.float64(value)).item()

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """See `Engine.fetch`; rows that other processes hold are brought here."""

        def rows(leaf: jax.Array) -> np.ndarray:
            if not leaf.is_fully_addressable:  # other processes have a part of it
                leaf = multihost_utils.process_allgather(leaf, tiled=True)
            return np.asarray(leaf)[:clients]

        with _together():
            return Carry(jax.tree.map(np.asarray, carry.state), jax.tree.map(rows, carry.memory))


def _put(array: np.ndarray, layout: NamedSharding) -> jax.Array:
    """An array over devices of one or several processes, each of which holds the whole on its host."""
    return jax.make_array_from_callback(array.shape, layout, lambda index: array[index])
