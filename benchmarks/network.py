"""An exchange with three sites over mutual TLS on loopback, beside the bare transport and a simulated round.

Three processes are the sites. A round of FedAvg is one exchange: a message down and an upload of the same
size. "Bare" is the same transport with sites that send back what they get.
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedstrata as fs
from fedstrata.engines.engine import Carry, Engine, Job
from fedstrata.engines.network import Network, Policy, Request, Text
from fedstrata.engines.network.federation import Connected, Federation
from fedstrata.engines.network.grpc_server import GrpcServer
from fedstrata.engines.network.grpc_site import serve
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.kits import make
from fedstrata.engines.simulated import Simulated
from fedstrata.solving.pose import Posed, pose

SITES = ("a", "b", "c")
SIZES = {"10 KB": 2_560, "1 MB": 262_144, "10 MB": 2_621_440}
ROUNDS = {"10 KB": 100, "1 MB": 40, "10 MB": 15}


def loss(x: Any, sample: Any) -> Any:
    """As cheap as can be, so that what is timed is the exchange."""
    return 0.5 * ((x - sample["a"]) ** 2).sum()


PROBLEM = fs.Minimization(loss)


def posed(size: int) -> Posed:
    """FedAvg with one step on three clients."""
    data = fs.FederatedData.from_clients([{"a": np.ones(1, np.float32)}] * len(SITES))
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

    def text(self, clients: int, server: Any) -> tuple[Text, str]:
        """The run as it is posed."""
        mine = posed(self.size)
        return Text.of(mine.setup, mine.method, mine.carry), "bench"


class BenchHost(Host):
    """A site that also sends back what it gets."""

    def call(
        self, header: dict[str, Any], arrays: list[np.ndarray]
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """See `Host.call`."""
        return ({}, arrays) if header.get("op") == "echo" else super().call(header, arrays)


def site(kit: str, address: str) -> None:
    """A site's process."""
    sizes = list(SIZES.values())
    with tempfile.TemporaryDirectory() as folder:
        serve(BenchHost("bench", lambda n: Opened(sizes[n]), Path(folder), once=True), Path(kit), address)


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


def measured(server: Connected) -> Iterator[tuple[str, float, float, float]]:
    """Of each size: an exchange, the bare transport, a simulated round."""
    for number, (words, size) in enumerate(SIZES.items()):
        there = Federation(server, hashlib.sha256(words.encode()).hexdigest()[:16], number, "bench")
        remote = there.gather()
        there.pose(len(SITES), len(SITES), None, "bench")
        yield (
            words,
            rounds(Network(remote, policy=Policy()), posed(size), ROUNDS[words]),
            bare(server, size, ROUNDS[words]),
            rounds(Simulated(), posed(size), ROUNDS[words]),
        )


def show(rows: Iterable[tuple[str, float, float, float]]) -> None:
    """A table, line by line."""
    print(f"{'':8s}{'network':>10s}{'bare':>10s}{'simulated':>11s}", flush=True)
    for words, network, transport, simulated in rows:
        print(f"{words:8s}{network:10.1f}{transport:10.1f}{simulated:11.2f}", flush=True)


@contextmanager
def served() -> Iterator[GrpcServer]:
    """Three processes are the sites of this server; they are ended by their ids."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, SITES, ["localhost"])
        server = GrpcServer(SITES, folder / "server")
        command = [sys.executable, "-m", "benchmarks.network", "site"]
        processes = [subprocess.Popen([*command, str(folder / s), f"localhost:{server.port}"]) for s in SITES]
        try:
            assert len(server.wait(range(len(SITES)), 120)) == len(SITES), "the sites did not come"
            yield server
            done = {"op": "done", "seq": time.time_ns() // 1000}
            server.exchange({i: Request(done, []) for i in range(len(SITES))}, 2.0)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["site"]:
        site(*sys.argv[2:4])
    else:
        main()
