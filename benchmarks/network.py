"""An exchange with three sites over mutual TLS on loopback, beside the bare transport and a simulated round.

Three processes are the sites. A round of FedAvg is one exchange: a message down and an upload of the same
size. "Bare" is the same transport with sites that send back what they get. Then 50 and 200 sites, which share
four processes: the time of an exchange, and what it costs the server in threads, memory and open files.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedstrata as fs
from fedstrata.engines.engine import Carry, Engine, Job
from fedstrata.engines.network import Network, Policy, Request, Text
from fedstrata.engines.network.federation import Federation
from fedstrata.engines.network.grpc_server import GrpcServer
from fedstrata.engines.network.grpc_site import serve
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.kits import make
from fedstrata.engines.network.transport import Connected
from fedstrata.engines.simulated import Simulated
from fedstrata.solving.pose import Posed, pose

SITES = ("a", "b", "c")
SIZES = {"10 KB": 2_560, "1 MB": 262_144, "10 MB": 2_621_440}
ROUNDS = {"10 KB": 100, "1 MB": 40, "10 MB": 15}
MANY = ((50, "10 KB"), (200, "10 KB"), (50, "1 MB"))  # sites, and the size of a message
PROCESSES = 4  # that such sites share
TEXT = {"text": "bench"}


def loss(x: Any, sample: Any) -> Any:
    """As cheap as can be, so that what is timed is the exchange."""
    return 0.5 * ((x - sample["a"]) ** 2).sum()


PROBLEM = fs.Minimization(loss)


def posed(size: int, clients: int = len(SITES)) -> Posed:
    """FedAvg with one step."""
    data = fs.FederatedData.from_clients([{"a": np.ones(1, np.float32)}] * clients)
    method = fs.FedAvg(0.1, H=1, batch_size=None)
    x0 = np.zeros(size, np.float32)
    return pose(PROBLEM, method, data, x0, rounds=10_000, default_metrics=False)


@dataclass(frozen=True)
class Opened:
    """A run of a site."""

    size: int

    @property
    def data(self) -> fs.FederatedData:
        """One client."""
        return fs.FederatedData.from_clients([{"a": np.ones(1, np.float32)}])

    def text(self, clients: int, server: Any) -> tuple[Text, dict[str, str]]:
        """The run as it is posed."""
        mine = posed(self.size, clients)
        return Text.of(mine.setup, mine.method, mine.carry), TEXT


class BenchHost(Host):
    """A site that also sends back what it gets."""

    def call(
        self, header: dict[str, Any], arrays: list[np.ndarray]
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """See `Host.call`."""
        return ({}, arrays) if header.get("op") == "echo" else super().call(header, arrays)


def sites(address: str, *kits: str) -> None:
    """A process of some sites, which compile once."""
    sizes, programs = list(SIZES.values()), dict[Any, Any]()

    def one(kit: str, folder: str) -> None:
        host = BenchHost(TEXT, lambda n: Opened(sizes[n]), Path(folder, Path(kit).name), once=True)
        host._programs = programs
        serve(host, Path(kit), address)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=one, args=(kit, folder), daemon=True) for kit in kits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def rounds(engine: Engine, run: Posed, number: int) -> float:
    """The median milliseconds of a round, after three that compile and warm up."""
    data, carry = engine.place(run.data), engine.place_carry(run.carry)

    def one(r: int, carry: Carry) -> tuple[Carry, float]:
        began = time.perf_counter()
        done = engine.advance(Job(run.setup, run.method, 0, data), carry, r, np.array([1], np.int32)).carry
        np.asarray(done.state.x)
        return done, time.perf_counter() - began

    seconds = []
    for r in range(number + 3):
        carry, taken = one(r, carry)
        seconds.append(taken)
    return 1000 * statistics.median(seconds[3:])


def bare(server: Connected, size: int, number: int) -> float:
    """The median milliseconds of an exchange that computes nothing."""
    array, seconds = np.zeros(size, np.float32), []
    for _ in range(number):
        began = time.perf_counter()
        header = {"op": "echo", "seq": time.time_ns() // 1000}
        _, failures = server.exchange({i: Request(header, [array]) for i in range(len(SITES))}, 60.0)
        assert not failures, failures
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def network(server: Connected, number: int) -> Network:
    """An engine whose sites have joined the run of this number."""
    clients = len(server.names)
    there = Federation(server, hashlib.sha256(str(number).encode()).hexdigest()[:16], number, TEXT)
    remote = there.gather()
    there.pose(clients, clients, None, TEXT)
    return Network(remote, policy=Policy())


def costs() -> tuple[int, float, int]:
    """Of this process: threads, MiB of memory at most so far, open files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    return int(lines["Threads"]), int(lines["VmHWM"].split()[0]) / 1024, len(os.listdir("/proc/self/fd"))


def many(number: int, words: str) -> None:
    """A line for so many sites; in a process of its own, as memory is the most so far."""
    names = [f"site-{i}" for i in range(number)]
    before = costs()[1]
    with served(names, PROCESSES) as server:
        run = posed(SIZES[words], number)
        taken = rounds(network(server, list(SIZES).index(words)), run, 20)
        threads, memory, files = costs()
    more = memory - before
    models = more * 2**20 / (4 * SIZES[words] * number)
    print(
        f"{number:5d}   {words:8s}{taken:10.1f}{threads:9d}{files:8d}{more:10.0f}{models:10.1f}", flush=True
    )


def measured(server: Connected) -> Iterator[tuple[str, float, float, float]]:
    """Of each size: an exchange, the bare transport, a simulated round."""
    for number, (words, size) in enumerate(SIZES.items()):
        yield (
            words,
            rounds(network(server, number), posed(size), ROUNDS[words]),
            bare(server, size, ROUNDS[words]),
            rounds(Simulated(), posed(size), ROUNDS[words]),
        )


def show(rows: Iterable[tuple[str, float, float, float]]) -> None:
    """A table, line by line."""
    print(f"{'':8s}{'network':>10s}{'bare':>10s}{'simulated':>11s}", flush=True)
    for words, network, transport, simulated in rows:
        print(f"{words:8s}{network:10.1f}{transport:10.1f}{simulated:11.2f}", flush=True)


@contextmanager
def served(names: Sequence[str] = SITES, number: int = len(SITES)) -> Iterator[GrpcServer]:
    """So many processes are the sites of this server; they are ended by their ids."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, names, ["localhost"])
        server = GrpcServer(names, folder / "server")
        command = [sys.executable, "-m", "benchmarks.network", "sites", f"localhost:{server.port}"]
        kits = [str(folder / site) for site in names]
        processes = [subprocess.Popen([*command, *kits[k::number]]) for k in range(number)]
        try:
            assert len(server.wait(range(len(names)), 120)) == len(names), "the sites did not come"
            yield server
            done = {"op": "done", "seq": time.time_ns() // 1000}
            server.exchange({i: Request(done, []) for i in range(len(names))}, 2.0)
        finally:
            for process in processes:
                process.terminate()
                process.wait()
            server.close()


def main() -> None:
    """Start the sites, and time."""
    print("An exchange with three sites over mutual TLS on loopback, median ms")
    with served() as server:
        show(measured(server))
    print("\nAn exchange with many sites, median ms; what it takes at the server, in MiB and models a site")
    print(
        f"sites   {'':8s}{'network':>10s}{'threads':>9s}{'files':>8s}{'memory':>10s}{'models':>10s}",
        flush=True,
    )
    for number, words in MANY:
        command = [sys.executable, "-m", "benchmarks.network", "many", str(number), words]
        subprocess.run(command, check=True, timeout=600)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sites", address, *kits]:
            sites(address, *kits)
        case ["many", number, words]:
            many(int(number), words)
        case _:
            main()
