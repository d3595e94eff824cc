"""Real sockets with mutual TLS: who is let in, what is refused, and what reaches the other side."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import socket
import threading
import time

import grpc
import numpy as np
import pytest

from fedstrata.engines.network import Failure, Request, WireError, grpc_server, grpc_site, knocks, wire
from fedstrata.engines.network.answering import Ended
from fedstrata.engines.network.grpc_server import (
    LARGEST,
    METHOD,
    PROCESS,
    PROTOCOLS,
    SERVICE,
    UNASKED,
    GrpcServer,
    options,
)
from fedstrata.engines.network.grpc_site import LONGEST_PAUSE, serve
from fedstrata.engines.network.kits import KitError, make, name_of, read
from fedstrata.engines.network.line import BURST, Rates


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    make(folder, ["berlin", "lyon"], ["localhost", "127.0.0.1", "[::1]"])
    make(folder / "foreign", ["berlin"], ["localhost"])
    return folder


@pytest.fixture
def server(kits):
    server = GrpcServer(["berlin", "lyon"], kits / "server", limit=2**20)
    yield server
    server.close()


class Dialled:
    """A raw connection, which answers as it is told."""

    def __init__(
        self,
        server,
        kit,
        answer,
        limit=2**24,
        anonymous=False,
        process="one",
        protocols=None,
        host="localhost",
        largest=None,
    ):
        self.outbox = queue.SimpleQueue()
        which = (0,) if anonymous else (0, 2, 1)  # the authority alone, or with key and certificate
        credentials = grpc.ssl_channel_credentials(*(read(kit)[i] for i in which)) if kit else None
        address = f"{host}:{server.port}"
        self.channel = (
            grpc.secure_channel(address, credentials, options(limit))
            if kit
            else grpc.insecure_channel(address)
        )
        dial = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        told = {PROCESS: process, PROTOCOLS: protocols, LARGEST: largest}
        metadata = [(name, value) for name, value in told.items() if value is not None]
        self.stream = dial(iter(self.outbox.get, None), metadata=metadata)
        self.ended = None
        self.thread = threading.Thread(target=self._listen, args=(answer,), daemon=True)
        self.thread.start()

    def _listen(self, answer):
        self.words = ""
        try:
            for message in self.stream:
                for reply in answer(message):
                    self.outbox.put(reply)
        except grpc.RpcError as error:
            self.ended, self.words = error.code(), error.details()

    def close(self):
        self.outbox.put(None)
        self.stream.cancel()
        self.channel.close()
        self.thread.join(5)


def echo(message):
    header, arrays = wire.unpack(message)
    return [wire.pack({"seq": header["seq"]}, arrays)]


def ask(server, site=0, size=3, timeout=5.0, seq=1):
    return server.exchange({site: Request({"seq": seq}, [np.arange(size, dtype=np.float32)])}, timeout)


def test_a_site_is_asked_and_bytes_are_counted(server, kits):
    site = Dialled(server, kits / "berlin", echo)
    assert server.wait([0], 10) == [0]
    assert server.wait([1], 0.1) == []
    replies, failures = ask(server)
    assert not failures
    np.testing.assert_array_equal(replies[0].arrays[0], np.arange(3))
    assert server.sent[0] == server.received[0] > 0
    _, failures = ask(server, site=1)
    assert failures[1].kind == "away"
    site.close()


@pytest.mark.parametrize(("who", "anonymous"), [(None, True), ("berlin", True), ("foreign/berlin", False)])
def test_no_certificate_or_another_authoritys_is_refused(server, kits, who, anonymous):
    stranger = Dialled(server, who and kits / who, echo, anonymous=anonymous)
    stranger.thread.join(10)
    assert stranger.ended is grpc.StatusCode.UNAVAILABLE
    assert server.wait([0, 1], 0.2) == []
    stranger.close()


def test_a_sites_certificate_is_its_name_and_the_servers_is_no_sites(server, kits):
    site = Dialled(server, kits / "lyon", echo)
    assert server.wait([1], 10) == [1]
    assert server.wait([0], 0.1) == []
    site.close()
    posing = Dialled(server, kits / "server", echo)
    posing.thread.join(10)
    assert posing.ended in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
    posing.close()


def test_a_site_does_not_talk_to_a_server_of_another_authority(kits, caplog):
    server = GrpcServer(["berlin"], kits / "foreign" / "server")
    site = Dialled(server, kits / "berlin", echo)
    site.thread.join(10)
    assert site.ended is grpc.StatusCode.UNAVAILABLE
    site.close()
    ended = iter([False, True])
    serve(None, kits / "berlin", f"localhost:{server.port}", ended=lambda: next(ended))
    assert "made by the same `net kits`" in caplog.text  # what its operator can do
    server.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda m: [b"noise"], "wrong"),
        (lambda m: [m[:20]], "wrong"),
        (lambda m: [m[:3] + b"\x09" + m[4:]], "wrong"),
        (lambda m: [bytes(2**21)], "away"),
        (lambda m: [], "late"),
        (lambda m: [wire.pack({"seq": 0}, [])], "late"),
        (lambda m: [wire.pack({"seq": 1, "error": "no\n2026 all is well\x1b[2J\u2028"}, [])], "error"),
    ],
    ids=["noise", "truncated", "version", "oversized", "silent", "another-number", "error"],
)
def test_bad_answers_are_one_sites_failure_and_the_rest_is_unharmed(server, kits, answer, kind):
    bad, good = Dialled(server, kits / "berlin", answer), Dialled(server, kits / "lyon", echo)
    assert server.wait([0, 1], 10) == [0, 1]
    requests = {i: Request({"seq": 1}, [np.ones(2)]) for i in (0, 1)}
    replies, failures = server.exchange(requests, 0.3 if kind == "late" else 10.0)
    assert list(replies) == [1]
    assert failures[0].kind == kind
    assert failures[0].why.isprintable()  # nothing that looks like another line of a log, or hides one
    bad.close()
    good.close()


def test_a_late_answer_does_not_hide_the_right_one(server, kits):
    """Both may come before anybody looks: what was asked for an earlier attempt, and what is asked now."""
    site = Dialled(server, kits / "berlin", lambda m: [wire.pack({"seq": 0}, []), *echo(m)])
    assert server.wait([0], 10) == [0]
    for seq in range(1, 4):
        replies, failures = ask(server, seq=seq, timeout=10.0)
        assert not failures
        assert replies[0].header["seq"] == seq
    assert server._streams[0].unasked == 3
    site.close()


class Clock:
    """A site's clock and its sleep: nobody waits."""

    def __init__(self, lasting):
        self.lasting, self.dials, self.now, self.pauses = lasting, 0, 0.0, []

    def monotonic(self):
        self.dials += 1
        if self.dials % 2 == 0:  # asked before and after a connection
            self.now += self.lasting.get(self.dials // 2, 0.01)
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)


def test_a_site_dials_again_after_pauses_that_grow_and_differ(kits, monkeypatch):
    """Nobody listens there. The twelfth connection has lasted, so that the pauses begin anew."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"localhost:{found.getsockname()[1]}"
    clock = Clock({12: 60.0})
    monkeypatch.setattr(grpc_site, "time", clock)
    serve(None, kits / "berlin", address, ended=lambda: len(clock.pauses) == 14)
    growing = [min(0.25 * 2**i, LONGEST_PAUSE) for i in range(11)] + [0.25, 0.5, 1.0]
    share = np.array(clock.pauses) / np.array(growing)
    assert growing[7] == LONGEST_PAUSE
    assert ((share >= 0.5) & (share <= 1)).all(), clock.pauses
    assert len(set(share.round(6))) > 10  # sites that were cut off together do not come back together


def test_a_site_that_floods_is_cut_off(server, kits):
    flood = Dialled(server, kits / "berlin", echo)
    good = Dialled(server, kits / "lyon", echo)
    server.wait([0, 1], 10)
    for _ in range(UNASKED + 50):
        flood.outbox.put(wire.pack({"seq": 1}, []))
    flood.thread.join(10)
    assert not flood.thread.is_alive()
    assert server.session(0) is None
    assert not ask(server, site=1)[1]
    flood.close()
    good.close()


def test_the_newest_connection_counts_and_a_broken_one_is_noticed(server, kits):
    first = Dialled(server, kits / "berlin", echo)
    server.wait([0], 10)
    before = server.session(0)
    second = Dialled(server, kits / "berlin", lambda m: [])
    end = time.monotonic() + 10
    while server.session(0) == before and time.monotonic() < end:
        time.sleep(0.01)
    threading.Timer(0.3, second.close).start()
    began = time.monotonic()
    _, failures = ask(server, timeout=20)
    assert failures[0] == Failure("away", "the connection broke")
    assert time.monotonic() - began < 10
    first.close()


def test_no_answer_is_waited_for_when_the_run_is_to_end(server, kits):
    site = Dialled(server, kits / "berlin", lambda m: [])
    server.wait([0], 10)
    began = time.monotonic()
    server.heed(lambda: time.monotonic() > began + 0.2)
    _, failures = ask(server, timeout=60)
    assert "before the run was asked to end" in failures[0].why
    assert time.monotonic() - began < 5
    site.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system does not tell open files")
def test_silent_connections_take_neither_descriptors_nor_places_for_long_and_are_told(
    kits, monkeypatch, caplog
):
    monkeypatch.setattr(grpc_server, "HANDSHAKE", 1.0)
    monkeypatch.setattr(knocks, "PAUSE", 0.1)
    server = GrpcServer(["berlin", "lyon"], kits / "server")
    before = len(os.listdir("/proc/self/fd"))
    berlin = Dialled(server, kits / "berlin", echo)
    assert server.wait([0], 10) == [0]
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(150)]
    time.sleep(0.3)
    kept = len(os.listdir("/proc/self/fd")) - before - len(silent)
    assert kept < 60  # at the server
    assert not ask(server)[1]
    lyon = Dialled(server, kits / "lyon", echo)
    end = time.monotonic() + 10
    while server.wait([1], 0.5) != [1] and time.monotonic() < end:  # it dials again, as a site does
        lyon.close()
        lyon = Dialled(server, kits / "lyon", echo)
    assert server.wait([1], 0.1) == [1]
    while "without a certificate" not in caplog.text and time.monotonic() < end:
        time.sleep(0.05)
    told = re.findall(r"127\.0\.0\.1 port (\d+)", caplog.text)
    assert told
    assert {int(port) for port in told} <= {one.getsockname()[1] for one in silent}  # no site among them
    for one in silent:
        one.close()
    for site in (berlin, lyon):
        site.close()
    server.close()


def test_peers_as_linux_and_grpc_name_them():
    lines = [
        "0: 0100007F:20FB 00000000:0000 0A ...",  # it listens
        "1: 0100007F:20FB 0100007F:E9B2 01 ...",
        "2: 0100007F:E9B2 0100007F:20FB 01 ...",  # the other end
        "3: 0000000000000000FFFF00000100007F:20FB 0000000000000000FFFF00000100007F:0050 08 ...",
        "4: 00000000000000000000000001000000:20FB 00000000000000000000000001000000:0051 01 ...",
        "5: 0100007F:20FB 0100007F:0052 06 ...",  # over
    ]
    names = ["ipv4:127.0.0.1:59826", "ipv4:127.0.0.1:80", "ipv6:%5B::1%5D:81"]
    assert list(knocks._peers(lines, 0x20FB)) == [knocks.peer_of(name) for name in names]


@pytest.mark.parametrize(("one", "other"), [("one", "other"), ("", "")])
def test_a_second_process_of_a_site_is_refused_while_the_first_is_there(server, kits, caplog, one, other):
    first = Dialled(server, kits / "berlin", echo, process=one)
    server.wait([0], 10)
    second = Dialled(server, kits / "berlin", lambda m: [], process=other)
    second.thread.join(10)
    assert second.ended is grpc.StatusCode.ALREADY_EXISTS
    assert "refused 'berlin' from ipv" in caplog.text
    assert not ask(server)[1]
    for site in (first, second):
        site.close()


@pytest.mark.parametrize("protocols", [None, "4", "5,4", "4,3"])
def test_a_site_of_the_next_or_the_last_version_is_taken_in(server, kits, protocols):
    """The server speaks its own version where the site knows it; sites before 0.2 said nothing."""
    site = Dialled(server, kits / "berlin", echo, protocols=protocols)
    assert server.wait([0], 10) == [0]
    site.close()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"protocols": "5,6"}, "speaks version 5,6 of the protocol, the server version 4: update whichever"),
        ({"largest": "65536"}, "message_bytes is 65536 at the site, 1048576 at the server: make them equal"),
    ],
)
def test_a_site_that_cannot_be_served_is_told_why(server, kits, says, words):
    site = Dialled(server, kits / "berlin", echo, **says)
    site.thread.join(10)
    assert site.ended is grpc.StatusCode.FAILED_PRECONDITION
    assert words in site.words
    site.close()


def test_addresses_of_version_six(kits):
    try:
        server = GrpcServer(["berlin"], kits / "server", "[::1]:0")
    except OSError:
        pytest.skip("this machine has no IPv6")
    site = Dialled(server, kits / "berlin", echo, host="[::1]")
    assert server.wait([0], 10) == [0]
    site.close()
    server.close()


def tunnel(proxy, asked):
    """Serve CONNECT on a listening socket, once."""
    near, _ = proxy.accept()
    head = b""
    while b"\r\n\r\n" not in head:
        head += near.recv(4096)
    asked.append(head.split(b"\r\n")[0].decode())
    far = socket.create_connection(("127.0.0.1", int(asked[0].split()[1].rpartition(":")[2])), 10)
    near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while content := source.recv(2**16):
                sink.sendall(content)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=pump, args=(near, far), daemon=True).start()
    pump(far, near)
    near.close()
    far.close()


def test_a_site_dials_through_a_proxy(server, kits, monkeypatch):
    """As the environment says: the proxy sees a host, a port, and TLS."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        asked = []
        thread = threading.Thread(target=tunnel, args=(proxy, asked), daemon=True)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        site = Dialled(server, kits / "berlin", echo)
        assert server.wait([0], 10) == [0]
        replies, _ = ask(server)
        np.testing.assert_array_equal(replies[0].arrays[0], np.arange(3))
        assert asked == [f"CONNECT localhost:{server.port} HTTP/1.1"]
        site.close()
        thread.join(10)


class Echo:
    """Stands for a site's host."""

    def answer(self, message, limit):
        header, arrays = wire.unpack(message)
        if header.get("op") == "done":
            raise Ended
        return wire.pack({"seq": header["seq"]}, arrays)


@pytest.mark.parametrize("proxied", [False, True])
def test_a_site_is_no_faster_than_it_allows(server, kits, monkeypatch, proxied):
    """Both ways, also through a proxy: the server sees the site's own certificate all the same."""
    size, rates = 50_000, Rates(upload=8.0, download=4.0)  # a megabyte in a second, and half of one
    for name in ("no_proxy", "https_proxy", "http_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        asked = []
        if proxied:
            threading.Thread(target=tunnel, args=(proxy, asked), daemon=True).start()
            monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        arguments = (Echo(), kits / "berlin", f"localhost:{server.port}")
        site = threading.Thread(target=serve, args=arguments, kwargs={"rates": rates})
        site.start()
        assert server.wait([0], 10) == [0]
        began = time.monotonic()
        replies, failures = ask(server, size=size, timeout=20.0)
        took = time.monotonic() - began
        assert not failures
        np.testing.assert_array_equal(replies[0].arrays[0], np.arange(size))
        least = 4 * size / 5e5 + 4 * size / 1e6
        assert least - 2 * BURST < took < 10 * least
        server.exchange({0: Request({"op": "done", "seq": 2}, [])}, 0.1)
        site.join(10)
        assert not site.is_alive()
        assert len(asked) == proxied


def test_what_is_too_large_is_not_sent(server, kits):
    with pytest.raises(WireError, match="limit"):
        ask(server, size=2**20)


def test_kits_hold_what_a_party_needs_and_no_more(kits, tmp_path):
    assert sorted(p.name for p in (kits / "lyon").iterdir()) == [
        "authority.pem",
        "certificate.pem",
        "key.pem",
    ]
    assert name_of(kits / "lyon") == "lyon"
    assert all(p.stat().st_mode & 0o077 == 0 for p in (kits / "lyon").iterdir())
    with pytest.raises(KitError, match="already"):
        make(kits, ["a"], ["localhost"])
    with pytest.raises(KitError, match="is not a kit"):
        read(tmp_path)
    for name in ("authority.pem", "certificate.pem", "key.pem"):
        (tmp_path / name).write_bytes((kits / "lyon" / name).read_bytes())
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(KitError, match="Other users can read the private key"):
        read(tmp_path)
    (tmp_path / "key.pem").unlink()
    startup = tmp_path / "startup"
    startup.mkdir()
    for ours, theirs in (
        ("authority.pem", "rootCA.pem"),
        ("certificate.pem", "client.crt"),
        ("key.pem", "client.key"),
    ):
        (startup / theirs).write_bytes((kits / "lyon" / ours).read_bytes())
    assert read(tmp_path) == read(kits / "lyon")


def test_a_kit_that_cannot_be_used_is_told_before_anybody_dials(kits, tmp_path):
    def kit(name, **files):
        folder = tmp_path / name
        shutil.copytree(kits / "lyon", folder)
        for file, content in files.items():
            (folder / f"{file}.pem").write_bytes(content)
        return folder

    make(tmp_path / "old", ["lyon"], ["localhost"], days=0)
    for folder, words in (
        (kit("junk", key=b"noise"), "is damaged"),
        (kit("torn", certificate=(kits / "lyon" / "certificate.pem").read_bytes()[:200]), "is damaged"),
        (kit("swapped", key=read(kits / "berlin")[2]), "not that of its certificate"),
        (tmp_path / "old" / "lyon", "has expired"),
    ):
        with pytest.raises(KitError, match=words):
            name_of(folder)


class Proxy:
    """Passes a connection on, and counts its bytes."""

    def __init__(self, port):
        self.up = self.down = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()

    def _accept(self, port):
        try:
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                threading.Thread(target=self._pass, args=(near, far, "up"), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, "down"), daemon=True).start()
        except OSError:
            return

    def _pass(self, source, target, way):
        try:
            while data := source.recv(2**16):
                setattr(self, way, getattr(self, way) + len(data))
                target.sendall(data)
        except OSError:
            return


def test_bytes_at_the_socket_agree_with_what_the_transport_says(server, kits):
    """TLS and HTTP/2 add less than 100 to a message of 10 KB."""
    proxy = Proxy(server.port)
    site = Dialled(proxy, kits / "berlin", echo)
    assert server.wait([0], 10) == [0]

    def counts():
        return np.array([server.sent[0], proxy.down, server.received[0], proxy.up])

    assert not ask(server, size=2_560)[1]  # what a connection begins with comes before it
    before = counts()
    for seq in range(20):
        assert not ask(server, size=2_560, seq=seq)[1]
    told_down, down, told_up, up = (counts() - before) / 20
    for told, seen in ((told_down, down), (told_up, up)):
        assert told > 10_240
        assert told < seen < told + 100
    site.close()
    proxy.listener.close()
