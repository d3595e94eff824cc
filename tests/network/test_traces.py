"""Spans of exchanges: one trace over server and sites, with names and counts alone."""

import numpy as np
import pytest

from fedstrata.engines.network import Failure, Request, wire
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.traces import PARENT, Traced, Traces

pytest.importorskip("opentelemetry.sdk")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


class Sites:
    """One answers through a host, the other is away."""

    names, rejoins, sent, received, took = ["lyon", "turin"], True, [0, 0], [0, 0], [0.0, 0.0]

    def __init__(self, host):
        self.host = host

    def exchange(self, requests, timeout):
        self.asked = requests
        reply = Request(*wire.unpack(self.host.answer(wire.pack(*requests[0]))))
        self.took[0] = 1e-6
        return {0: reply}, {1: Failure("away", "it is not connected")}


def collected(service):
    exporter = memory.InMemorySpanExporter()
    return Traces(service, exporter), exporter


def test_server_and_site_have_one_trace(tmp_path):
    (traces, told), (own, at_site) = collected("server"), collected("lyon")
    host = Host({}, None, tmp_path, around=own.answering)
    host.call = lambda header, arrays: ({}, [np.ones(3)])
    sites = Sites(host)
    what = {"op": "exchange", "run": "a-0", "round": 7, "what": ["round", 1, "local_steps", 2], "seq": 5}
    replies, failures = Traced(sites, traces).exchange(
        {i: Request(what, [np.full(2, 31337.125)]) for i in (0, 1)}, 9.0
    )
    assert len(replies[0].arrays[0]) == 3
    assert failures.keys() == {1}
    assert {name for name in sites.asked[0].header if name not in what} == {PARENT}
    traces.end()
    own.end()
    lyon, turin, whole = sorted(
        told.get_finished_spans(), key=lambda s: (s.name != "site", s.attributes.get("site"))
    )
    (answer,) = at_site.get_finished_spans()
    assert (whole.name, answer.name) == ("exchange", "answer")
    assert {span.context.trace_id for span in (lyon, turin, whole, answer)} == {whole.context.trace_id}
    assert lyon.parent.span_id == turin.parent.span_id == whole.context.span_id
    assert answer.parent.span_id == lyon.context.span_id
    facts = {"round": 7, "program": "round", "exchange": 1, "phase": "local_steps"}
    assert facts.items() <= dict(whole.attributes).items()
    assert dict(lyon.attributes) == {"site": "lyon", "numbers_down": 2, "numbers_up": 3}
    assert lyon.end_time - lyon.start_time == 1000  # what the transport measured
    assert turin.status.description == "away: it is not connected"
    assert "31337" not in "".join(span.to_json() for span in (lyon, turin, whole, answer))


@pytest.mark.parametrize("parent", ["", "noise", 7, "00-" + "f" * 32 + "-zz-01"])
def test_whatever_a_peer_says_of_its_trace_is_answered(parent, tmp_path):
    own, told = collected("lyon")
    host = Host({}, None, tmp_path, around=own.answering)
    host.call = lambda header, arrays: ({}, [])
    message = wire.pack({"op": "exchange", "seq": 1, "what": parent, PARENT: parent}, [])
    assert "error" not in wire.unpack(host.answer(message))[0]
    own.end()
    assert told.get_finished_spans()[0].parent is None
