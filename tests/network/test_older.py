"""Messages of an older peer, as they were recorded: an older server is answered, an older site is understood.

`python -m tests.network.test_older` records what this version says. Do that once for each version of the
protocol, before it changes, and keep the files.
"""

import base64
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fedstrata.engines.network import Request, wire
from fedstrata.engines.network.engine import _wrong
from fedstrata.engines.network.federation import _columns, _described
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.transport import answer_of

from .test_host import CASES, TERMS, Hosts, Opened, part

RECORDED = sorted((Path(__file__).parents[1] / "data").glob("protocol*.json"))


def requests(identity):
    """A run of FedAvg on two sites, as the first of them is asked; and once something unknown."""
    x = [np.zeros((), np.float32), np.zeros(3, np.float32)]
    weights, key = np.array([0.5]), np.array([0, 1], np.uint32)
    about = {"op": "exchange", "run": "run-0", "round": 0}
    join = {"total": 40, "clients": 2, "server": None, "identity": identity, "fresh": True, "anew": False}
    client = np.zeros(1, np.int32)
    yield {"op": "open", "run": "run-0", "number": 0, "terms": TERMS}, []
    yield {"op": "join", "run": "run-0", "states": [0], **join}, [client]
    yield {**about, "what": ["round", 0, "local_steps", 2], "states": [0]}, [client, weights, key, *x]
    yield {**about, "what": ["round", 0, "no_such_phase", 2], "states": [0]}, [client, weights, key, *x]
    yield {"op": "done"}, []


def answered(folder, messages):
    """What a site of this version answers."""
    own = part(CASES["fedavg"].data, np.array([0]))
    host = Host(TERMS, lambda n: Opened(CASES["fedavg"], own), folder)
    return [host.answer(message) for message in messages]


def record():
    """This version's requests and replies."""
    with tempfile.TemporaryDirectory() as folder:
        identity = Hosts(Path(folder), "fedavg").identity(2)
        asked = [
            wire.pack({"seq": n, **header}, arrays) for n, (header, arrays) in enumerate(requests(identity))
        ]
        pairs = list(zip(asked, answered(Path(folder) / "site", asked), strict=True))
    file = RECORDED[0].parent if RECORDED else Path(__file__).parents[1] / "data"
    plain = [[base64.b64encode(message).decode() for message in pair] for pair in pairs]
    (file / f"protocol{wire.VERSION}.json").write_text(json.dumps(plain, indent=0) + "\n", "utf-8")


@pytest.mark.parametrize("file", RECORDED, ids=[file.stem for file in RECORDED])
def test_an_older_peer_is_understood(file, tmp_path):
    pairs = [[base64.b64decode(message) for message in pair] for pair in json.loads(file.read_text("utf-8"))]
    here = Hosts(tmp_path / "other", "fedavg").identity(2)  # of this version's programs
    asked = []
    for message, _ in pairs:
        header, arrays = wire.unpack(message)
        asked.append(wire.pack({**header, **({"identity": here} if "identity" in header else {})}, arrays))
    kinds = []
    for answer, (_, before) in zip(answered(tmp_path / "site", asked), pairs, strict=True):
        (now, number), (then, same) = (answer_of(one, wire.LIMIT) for one in (answer, before))
        assert number == same
        assert type(now) is type(then)
        kinds.append(type(then) is Request)
        if isinstance(then, Request):
            assert then.header.keys() <= now.header.keys()  # what an older server looks for is there
            assert [(a.shape, a.dtype) for a in then.arrays] == [(a.shape, a.dtype) for a in now.arrays]
    assert kinds == [True, True, True, False, True]
    opened, _, moved, *_ = (answer_of(before, wire.LIMIT)[0] for _, before in pairs)
    (train, _), form, _ = _described(opened)
    assert train.tolist() == CASES["fedavg"].data.sizes[:1].tolist()
    assert form["train"].keys() == CASES["fedavg"].data.sample_of("train").keys()
    assert _columns(opened) == {}
    assert _wrong([(a.shape, a.dtype) for a in moved.arrays], 2, 0, moved) is None


if __name__ == "__main__":
    record()
