"""Accounts that cannot be changed unseen, and what two parties tell of the same exchanges."""

import errno
import json
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstrata.engines.engine import Unfinished
from fedstrata.engines.network import kits, wire
from fedstrata.engines.network.audit import (
    Audit,
    Audited,
    AuditError,
    check_manifest,
    compare,
    manifest,
    read,
)
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.transport import Failure, Request
from fedstrata.lab.cli import app
from fedstrata.support import writing


@pytest.fixture
def file(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl", "lyon")
    for n in range(5):
        audit.note("answered", seq=n, up=n)
    return audit.file


@pytest.mark.parametrize("spoil", ["change", "remove", "swap"])
def test_a_changed_account_is_seen(file, spoil):
    lines = file.read_text().splitlines(keepends=True)
    if spoil == "change":
        lines[2] = lines[2].replace('"up": 2', '"up": 3')
    elif spoil == "remove":
        del lines[1]
    else:
        lines[1], lines[2] = lines[2], lines[1]
    file.write_text("".join(lines))
    with pytest.raises(AuditError, match=r"line [23] does not follow"):
        read(file)


def test_a_party_goes_on_where_it_was_killed(file):
    with file.open("a") as stream:
        stream.write('{"n": 5, "time"')
    Audit(file, "lyon").note("answered", seq=5, up=5)
    assert [entry["seq"] for entry in read(file)] == list(range(6))


@pytest.fixture
def full(monkeypatch):
    """A disk on which half of a line fits."""

    def write(handle, content):
        if len(content) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, content[: len(content) // 2])

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "write", write)
        yield patch


def test_a_full_disk_leaves_no_half_line(file, full):
    audit = Audit(file, "lyon")
    before = file.read_bytes()
    with pytest.raises(OSError, match="No space left"):
        audit.note("answered", seq=5)
    assert file.read_bytes() == before
    full.undo()
    audit.note("answered", seq=5)
    assert [entry["seq"] for entry in read(file)] == list(range(6))


def test_nothing_is_answered_that_cannot_be_written_down(tmp_path, full):
    site, server = Audit(tmp_path / "site.jsonl", "lyon"), Audit(tmp_path / "server.jsonl", "server")
    host = Host({}, lambda number: None, tmp_path, audit=site)
    request = Request({"op": "done", "seq": 1}, [])
    answered = wire.unpack(host.answer(wire.pack(*request)))[0]
    assert "can record in its account (No space left" in answered["error"]
    with pytest.raises(Unfinished, match=r"server.jsonl cannot be written"):
        Audited(Sites(), server).exchange({0: request}, 1.0)
    full.undo()
    assert "error" not in wire.unpack(host.answer(wire.pack(*request)))[0]
    assert [entry["event"] for entry in read(site.file)] == ["answered"]


class Sites:
    """A transport whose second site is away."""

    names, rejoins, sent, received, took = ["lyon", "oslo"], True, [0, 0], [0, 0], [0.0, 0.0]

    def exchange(self, requests, timeout):
        return {0: Request({}, [np.ones(7)])}, {1: Failure("away", "it is not connected")}


def test_two_parties_tell_the_same_or_it_is_said(tmp_path):
    server, site = Audit(tmp_path / "server.jsonl", "server"), Audit(tmp_path / "lyon.jsonl", "lyon")
    header = {"op": "exchange", "run": "a-0", "what": ["round", 0, "local", 2], "round": 1}
    facts = {"op": "exchange", "run": "a-0", "what": ["round", 0, "local", 2], "round": 1, "down": 3}
    for seq in (4, 9):
        Audited(Sites(), server).exchange(
            {i: Request({**header, "seq": seq}, [np.ones(3)]) for i in (0, 1)}, 1
        )
        site.note("answered", seq=seq, **facts, up=7)
    assert compare(read(server.file), read(site.file)) == []
    found = CliRunner().invoke(app, ["net", "audit", str(server.file), str(site.file)])
    assert found.exit_code == 0, found.output
    assert "Both accounts agree" in found.output
    site.note("answered", seq=11, **facts, up=7)
    assert compare(read(server.file), read(site.file)) == [
        "11: lyon answered what the server does not know of"
    ]
    assert '"oslo"' in server.file.read_text()  # who was asked in vain is in it


def test_an_exchange_during_which_the_server_was_killed_is_known_to_it(tmp_path):
    server, site = Audit(tmp_path / "server.jsonl", "server"), Audit(tmp_path / "lyon.jsonl", "lyon")
    header = {"op": "exchange", "seq": 4, "run": "a-0", "what": ["round", 0, "local", 2], "round": 1}

    class Killed(Sites):
        def exchange(self, requests, timeout):
            site.note("answered", **header, down=3, up=7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Audited(Killed(), server).exchange({0: Request(header, [np.ones(3)])}, 1)
    assert compare(read(server.file), read(site.file)) == []
    other = [{**entry, "round": 2} for entry in read(site.file)]
    assert compare(read(server.file), other) == ["4: round is 1 at the server, 2 at lyon"]


def test_a_manifest_is_signed_by_a_party(tmp_path):
    kits.make(tmp_path / "kits", ["lyon"], ["localhost"])
    kits.make(tmp_path / "others", ["lyon"], ["localhost"])
    (tmp_path / "index.html").write_text("a report")
    authority, certificate, key = kits.read(tmp_path / "kits" / "server")
    signed = manifest({"run": "a"}, [tmp_path / "index.html"], key, certificate)
    check_manifest(json.loads(json.dumps(signed)), authority, tmp_path)
    with pytest.raises(AuditError, match="was changed"):
        check_manifest({**signed, "run": "b"}, authority, tmp_path)
    with pytest.raises(AuditError, match="not signed by a party"):
        check_manifest(signed, kits.read(tmp_path / "others" / "server")[0], tmp_path)
    (tmp_path / "index.html").write_text("another report")
    with pytest.raises(AuditError, match=r"index\.html is not the file"):
        check_manifest(signed, authority, tmp_path)
