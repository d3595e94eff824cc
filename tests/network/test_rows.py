"""Rows of the cases at three site processes over mutual TLS: iterates, ledgers, metrics and bytes."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from fedstrata.engines import programs
from fedstrata.engines.network import AtSites, Network, Request
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.grpc_server import GrpcServer
from fedstrata.engines.network.kits import make
from fedstrata.testing.cases import CLIENTS

from .faults import ROOT, environment
from .rows import SHARES, SHARING, SITES, posed, rows
from .test_grpc import Proxy

pytestmark = pytest.mark.slow
EVERYONE = range(len(SITES))
# Averages, memory, replies, second draws, loops with levels, personal models, a start: all verbs.
VERBS = ("fedavg", "scaffold", "scaffold-secure", "fedrzo-scalars", "fedmsa", "fednest", "zohfl", "feddro")
ALL = tuple(case.name for case in rows())


class Counted(GrpcServer):
    """Counts messages, and the bytes of the numbers that the method's text sends.

    Attributes:
        asked: messages to each site.
        messages: of exchanges, both ways.
        numbers: bytes of their leaves.
        others: bytes of what is no exchange: opening, joining, fetching what is remembered.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.asked, self.messages, self.numbers, self.others = [0] * len(SITES), 0, 0, 0

    def exchange(self, requests, timeout):
        before = sum(self.sent) + sum(self.received)
        replies, failures = super().exchange(requests, timeout)
        for i in requests:
            self.asked[i] += 1
        if all(request.header["op"] == "exchange" for request in requests.values()):
            leaves = [request.arrays[3:] for request in requests.values()]  # after clients, weights, key
            leaves += [reply.arrays for reply in replies.values()]
            self.messages += len(leaves)
            self.numbers += sum(array.nbytes for arrays in leaves for array in arrays)
        else:
            self.others += sum(self.sent) + sum(self.received) - before
        return replies, failures


class Sites:
    """A server here, and a process for each site, whose connections are counted on their way."""

    def __init__(self, folder, double):
        make(folder, SITES, ["localhost"])
        self.server = Counted(SITES, folder / "server")
        self.proxies = [Proxy(self.server.port) for _ in SITES]
        env = environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_ENABLE_X64": str(double)}
        self.processes = []
        for i, (name, proxy) in enumerate(zip(SITES, self.proxies, strict=True)):
            words = [str(folder / name), f"localhost:{proxy.port}", str(i), str(folder / name / "state")]
            with (folder / f"{name}.log").open("wb") as stream:
                command = [sys.executable, "-m", "tests.network.rows", *words]
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=stream)
                )
        assert len(self.server.wait(EVERYONE, 120)) == len(SITES)

    def run(self, number, case):
        """A row: its result, and what the sharing site remembers, or the words of those that do not share."""
        there = Federation(self.server, f"row-{number}", number, {})
        found, form = there.gather(), None
        if case.data.server is not None:
            one = case.data.sample_of("server")
            form = {k: [np.dtype(one[k].dtype).name, list(v.shape)] for k, v in case.data.server.items()}
        blank = replace(made_up(there.form, CLIENTS), server=case.data.server)
        run = posed(case, blank)
        there.pose(int(found.sizes.sum()), CLIENTS, form, run.common, run.setup.secure)
        result = case.run(engine=Network(found), data=blank)
        return result, there.memory() if isinstance(result.y, AtSites) else None

    def end(self):
        """All is done: the processes end by themselves."""
        done = {"op": "done", "seq": time.time_ns() // 1000}
        self.server.exchange({i: Request(done, []) for i in EVERYONE}, 2.0)
        assert [process.wait(20) for process in self.processes] == [0] * len(SITES)

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.server.close()
        for proxy in self.proxies:
            proxy.listener.close()


def differences(result, kept, wanted, tolerance):
    """What is not as simulated, in words."""
    if result.ledger != wanted.ledger:
        yield f"{result.ledger} is not {wanted.ledger}"
    pairs = [(result.x, wanted.x)]
    pairs += [(result.history[metric], wanted.history[metric]) for metric in wanted.metrics]
    if kept is None:
        pairs.append((result.y, wanted.y))
    else:
        replies, failures = kept
        own = SITES.index(SHARING)
        if list(replies) != [own] or not all("--share" in failure.why for failure in failures.values()):
            yield f"what sites remember: {list(replies)}, {failures}"
        for leaf in jax.tree.leaves(wanted.y):  # among what clients remember
            its = leaf[SHARES[own]]
            like = [a for a in replies[own].arrays if a.shape == its.shape]
            if not any(close(a, its, tolerance) for a in like):
                yield f"{its} is not among {like}"
    for u, v in pairs:
        for a, b in zip(jax.tree.leaves(u), jax.tree.leaves(v), strict=True):
            if not close(a, b, tolerance):
                yield f"{np.asarray(a)} is not {np.asarray(b)}"


def close(a, b, tolerance):
    return np.abs(np.asarray(a) - b).max() <= tolerance * max(1.0, np.abs(b).max())


@pytest.mark.parametrize(
    ("names", "precision"),
    [
        pytest.param(VERBS, "float32", id="verbs"),
        pytest.param(ALL, "float32", id="all-float32", marks=pytest.mark.long),
        pytest.param(ALL, "float64", id="all-float64", marks=pytest.mark.long),
    ],
)
def test_rows_at_real_sites_are_as_simulated(names, precision, tmp_path):
    double = precision == "float64"
    with jax.enable_x64(double):
        sites, wrong = Sites(tmp_path, double), {}
        try:
            for number, case in enumerate(rows()):
                if case.name not in names:
                    continue
                found, kept = sites.run(number, case)
                words = list(differences(found, kept, case.run(), 1e-10 if double else 1e-5))
                if words:
                    wrong[case.name] = words
                programs._programs.clear()
                jax.clear_caches()
                gc.collect()
            sites.end()
        finally:
            sites.close()
    assert not wrong
    server = sites.server
    for i, proxy in enumerate(sites.proxies):
        for told, seen in ((server.sent[i], proxy.down), (server.received[i], proxy.up)):
            assert told < seen < told + 120 * server.asked[i] + 10_000  # TLS, HTTP/2, certificates
    besides = sum(server.sent) + sum(server.received) - server.numbers - server.others
    assert 0 < besides <= 220 * server.messages
