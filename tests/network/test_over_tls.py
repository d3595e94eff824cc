"""Rows of tests/cases over real sockets with mutual TLS, sites in threads: the simulated iterates again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from fedstrata.engines.network import AtSites, Network, Text
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.grpc_server import GrpcServer
from fedstrata.engines.network.grpc_site import serve
from fedstrata.engines.network.host import Host, form_of
from fedstrata.engines.network.kits import make
from fedstrata.engines.network.transport import Request
from fedstrata.solving.pose import pose

from ..cases import CLIENTS, all_cases

pytestmark = pytest.mark.usefixtures("quick_compiler")
CASES = {case.name: case for case in all_cases()}
NAMES = [f"site-{i}" for i in range(3)]
# Those with many exchanges in a round, with personal models, with the server's own data.
ROWS = ["zohfl", "fednest", "feddro", "fedrzo-bilevel", "ipirfedavg"]


def posed(case, data):
    options = {k: v for k, v in case.solve.items() if k in ("weights", "participation")}
    return pose(case.problem, case.method, data, case.x0, y0=case.y0, rounds=case.rounds, seed=1, **options)


@dataclass(frozen=True)
class Opened:
    case: Any
    data: Any

    def text(self, clients, server):
        run = posed(self.case, replace(made_up(form_of(self.data), clients), server=server))
        return Text.of(run.setup, run.method, run.carry, server), "the same"


@pytest.fixture
def server(tmp_path):
    make(tmp_path / "kits", NAMES, ["localhost"])
    server = GrpcServer(NAMES, tmp_path / "kits" / "server")
    yield server
    server.close()


def started(server, case, folder, share=()):
    threads = []
    for i, (name, clients) in enumerate(zip(NAMES, np.array_split(np.arange(CLIENTS), 3), strict=True)):
        own = Opened(case, part(case.data, clients))
        host = Host("text", lambda n, own=own: own, folder / name, share=i in share, once=True)
        arguments = (host, folder / "kits" / name, f"localhost:{server.port}")
        threads.append(threading.Thread(target=serve, args=arguments, daemon=True))
        threads[-1].start()
    return threads


def remote(server, case, run="run"):
    there = Federation(server, run, 0, "text")
    found = there.gather()
    form = None
    if case.data.server is not None:
        one = case.data.sample_of("server")
        form = {k: [np.dtype(one[k].dtype).name, list(v.shape)] for k, v in case.data.server.items()}
    there.pose(int(found.sizes.sum()), CLIENTS, form, "the same")
    return there, found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ROWS])
def test_equal_to_simulated(name, server, tmp_path):
    case = CASES[name]
    if name == "feddro":  # ten exchanges a round
        case = replace(case, method=replace(case.method, I=10))
    threads = started(server, case, tmp_path, share=(1,))
    there, found = remote(server, case)
    engine = Network(found)
    blank = replace(made_up(there.form, CLIENTS), server=case.data.server)
    result, wanted = case.run(engine=engine, data=blank), case.run()
    pairs = [(result.x, wanted.x)]
    if isinstance(result.y, AtSites):
        assert "collect" in repr(result.y)
        replies, failures = there.memory()
        assert list(replies) == [1]
        assert all("--share" in failure.why for failure in failures.values())
        pairs.append((replies[1].arrays, jax.tree.map(lambda leaf: leaf[there.members[1]], wanted.y)))
    else:
        pairs.append((result.y, wanted.y))
    for u, v in pairs:
        for a, b in zip(jax.tree.leaves(u), jax.tree.leaves(v), strict=True):
            assert np.abs(a - b).max() <= 1e-5 * max(1.0, np.abs(b).max())
    assert result.ledger == wanted.ledger
    for metric in wanted.metrics:
        np.testing.assert_allclose(result.history[metric], wanted.history[metric], rtol=1e-4, atol=1e-6)
    server.exchange({i: Request({"op": "done", "seq": 2**60}, []) for i in range(3)}, 2.0)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
