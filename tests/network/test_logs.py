"""Logs as JSON, and canaries: no sample is in a log, an account, or what the server is told."""

import io
import json
import logging

import numpy as np
import pytest

from fedstrata.data.federated import FederatedData
from fedstrata.engines.network import Network, wire
from fedstrata.engines.network.audit import Audit
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.host import Host
from fedstrata.lab.experiments import logs

from .test_host import CASES, TERMS, Hosts, Opened

CANARY = 31337.125  # exact in float32


@pytest.fixture
def stream():
    """What is logged as JSON, at all levels."""
    handler = logging.StreamHandler(found := io.StringIO())
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("fedstrata")
    before = logger.level
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_line_is_an_object_with_its_facts(stream):
    Network().note("lyon", "late\nforged")
    found = json.loads(stream.getvalue())
    assert (found["level"], found["site"], found["round"]) == ("warning", "lyon", -1)
    assert found["message"] == "round -1: lyon: late\nforged"
    assert stream.getvalue().count("\n") == 1


class Canaries(Hosts):
    """Every sample is the canary; in the second round a site fails with an exception that quotes it."""

    def data(self, i):
        own = super().data(i).client(0)
        return FederatedData.from_clients([{k: np.full_like(v, CANARY) for k, v in own.items()}])

    def exchange(self, requests, timeout):
        header = next(iter(requests.values())).header
        if header.get("round") == 1 and header["op"] == "exchange":
            site = self.hosts[1].site
            site.call = lambda *request: site.text.setup.problem.loss(quote(site.data))
        return super().exchange(requests, timeout)


def quote(data):
    raise ValueError(f"{CANARY} of {data}")


def test_no_sample_is_ever_told(tmp_path, stream):
    hosts = Canaries(tmp_path, "fedavg")
    for name, host in zip(hosts.names, hosts.hosts, strict=True):
        host.audit = Audit(tmp_path / f"{name}.jsonl", name)
    there = Federation(hosts, "run", 0, TERMS)
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), 2, None, hosts.identity(2))
    with pytest.raises(Exception, match="site-1: ValueError; the site's log says more") as told:
        hosts.case.run(rounds=2, engine=Network(remote), data=made_up(there.form, 2), participation=1.0)
    accounts = "".join(file.read_text() for file in tmp_path.glob("*.jsonl"))
    assert "ValueError (" in stream.getvalue()
    assert '"failed"' in accounts
    for text in (stream.getvalue(), accounts, str(told.value)):
        assert "31337" not in text


def test_the_words_of_an_exception_are_logged_where_somebody_asks_for_them(tmp_path, stream):
    logging.getLogger("fedstrata").setLevel(logging.DEBUG)
    host = Host(TERMS, lambda n: quote(Opened(CASES["fedavg"], None)), tmp_path)
    request = {"op": "open", "seq": 1, "run": "run", "number": 0, "terms": TERMS}
    told = wire.unpack(host.answer(wire.pack(request, [])))[0]["error"]
    assert "31337" in stream.getvalue()
    assert "31337" not in told
