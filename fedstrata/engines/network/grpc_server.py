"""The server's end of gRPC: sites dial in with a certificate, keep a stream, and are asked through it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from fedstrata.engines.network import wire
from fedstrata.engines.network.kits import REVOKED, read, revoked, serial_of
from fedstrata.engines.network.transport import Failure, Outcome, Request, answer_of

log = logging.getLogger("fedstrata.network")
SERVICE, METHOD = "fedstrata.Network", "Serve"
PROCESS = "fedstrata-process"  # in a call's metadata: a word of the site's process, unlike any other's
HANDSHAKE = 10.0  # seconds for a connection to show its certificate
UNASKED = 16  # messages that nobody asked for, after which a site is cut off


def options(limit: int) -> list[tuple[str, int]]:
    """Of both ends: the limit of a message, and pings that notice a dead peer."""
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # else a second server on the port would take half of the sites
    ]


class Stream:
    """One site's connection."""

    def __init__(self, session: int, process: str, serial: str, until: float) -> None:
        self.session, self.process = session, process
        self.serial, self.until = serial, until  # its certificate's number, and when that expires
        self.outbox, self.unasked = queue.SimpleQueue[bytes | None](), 0


class GrpcServer:
    """A transport: sites are known by the common name of their certificate.

    Args:
        names: the sites of the federation.
        kit: the server's folder, with its certificate.
        address: where to listen; the port 0 takes a free one, see ``port``.
        limit: bytes of a message.
    """

    rejoins = True

    def __init__(
        self, names: Sequence[str], kit: Path, address: str = "127.0.0.1:0", limit: int = wire.LIMIT
    ) -> None:
        self.names: Sequence[str] = list(names)
        self.limit = limit
        self.heed(lambda: False)
        self.sent, self.received = [0] * len(names), [0] * len(names)
        self._streams: dict[int, Stream] = {}
        self._sessions = 0
        self._closing = False
        self._awaited: dict[int, int] = {}  # site → the number of the message it owes an answer to
        self._answers: dict[int, Request | Failure] = {}
        self._changed = threading.Condition()
        self._kit, self._revoked, self._revoked_at = kit, frozenset[str](), 0
        # The kit is read at each handshake, so that a renewed certificate needs no restart.
        credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )
        most = 4 * len(names) + 8  # a thread for each stream, for those that replace it, and for strangers
        # Who connects and says nothing takes neither all descriptors nor the places of sites for long.
        bounds = [
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_allowed_incoming_connections", 2 * most),
        ]
        _allow_descriptors(2 * most + 256)
        self._server = grpc.server(
            ThreadPoolExecutor(most, thread_name_prefix="fedstrata-site"),
            options=[*options(limit), *bounds],
            maximum_concurrent_rpcs=most,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((generic,))
        try:
            self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"Cannot listen on {address}: is another server running there?") from error
        self._server.start()

    def close(self) -> None:
        """Hang up."""
        with self._changed:
            self._closing = True
            for stream in self._streams.values():
                stream.outbox.put(None)
        self._server.stop(grace=1.0).wait(3.0)

    def _configuration(self) -> Any:
        authority, certificate, key = read(self._kit)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def _refused(self, stream: Stream) -> str:
        """Why a site's certificate counts no longer, or an empty string."""
        file = self._kit / REVOKED
        changed = file.stat().st_mtime_ns if file.exists() else 0
        if changed != self._revoked_at:
            self._revoked, self._revoked_at = revoked(self._kit), changed
        if stream.serial in self._revoked:
            return "its certificate was revoked"
        return "its certificate has expired" if time.time() > stream.until else ""

    def expires(self, site: int) -> float | None:
        """When the certificate expires with which a site is connected, in seconds since 1970."""
        with self._changed:
            stream = self._streams.get(site)
            return None if stream is None else stream.until

    def session(self, site: int) -> int | None:
        """The number of a site's connection, or None where it has none."""
        with self._changed:
            stream = self._streams.get(site)
            return None if stream is None else stream.session

    def _serve(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One connection of a site; what is yielded is sent."""
        shown = context.auth_context()
        name = shown.get("x509_common_name", [b""])[0].decode(errors="replace")
        if name not in self.names:
            log.warning("refused %r: not a site of this federation", name)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a site of this federation")
        i, process = self.names.index(name), dict(context.invocation_metadata()).get(PROCESS, "")
        arriving = Stream(0, process, *serial_of(shown["x509_pem_cert"][0]))
        if why := self._refused(arriving):
            log.warning("refused %s, from %s: %s", name, context.peer(), why)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        stream = self._enter(i, arriving)
        if stream is None:
            log.warning("refused a second process that says it is %s, from %s", name, context.peer())
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "another process of this site is connected")
            return
        log.info("%s is there", name)
        threading.Thread(target=self._listen, args=(i, stream, incoming), daemon=True).start()
        while (message := stream.outbox.get()) is not None:
            yield message
        context.cancel()

    def _enter(self, i: int, stream: Stream) -> Stream | None:
        """A site has one connection, the newest of its process; None where another process is there."""
        with self._changed:
            if (before := self._streams.get(i)) is not None:
                if before.process != stream.process or not stream.process:
                    return None
                before.outbox.put(None)  # its thread ends, and with it the old stream
            self._sessions += 1
            stream.session, self._streams[i] = self._sessions, stream
            self._changed.notify_all()
            return stream

    def _listen(self, i: int, stream: Stream, incoming: Iterator[bytes]) -> None:
        # gRPC does not say which: a message that is too large may end a stream like a site that hangs up.
        why = f"it hung up, the connection broke, or a message was larger than {self.limit} bytes"
        try:
            for message in incoming:
                if refused := self._refused(stream):
                    why = refused
                    break
                if not self._take(i, stream, message):
                    why = "it sent too much that nobody asked for"
                    break
        except Exception as error:  # gRPC's own, whatever ended the stream
            why = wire.said(getattr(error, "details", lambda: None)() or why)
        with self._changed:
            if self._streams.get(i) is stream:
                del self._streams[i]
                if not self._closing:
                    log.warning("%s is gone: %s", self.names[i], why)
            stream.outbox.put(None)
            self._changed.notify_all()

    def _take(self, i: int, stream: Stream, message: bytes) -> bool:
        """A message has come; whether to go on listening."""
        answer, number = answer_of(message, self.limit)
        with self._changed:
            self.received[i] += len(message)
            owed = self._awaited.get(i) if self._streams.get(i) is stream else None
            if owed is not None and i not in self._answers and number in (owed, None):
                self._answers[i] = answer
                self._changed.notify_all()
                return True
            stream.unasked += 1  # late, from an earlier attempt; or sent again; or a flood
            log.warning("%s sent a message that nobody asked for", self.names[i])
            return stream.unasked <= UNASKED

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        packed = {i: wire.pack(*request, self.limit) for i, request in requests.items()}
        numbers = {i: request.header["seq"] for i, request in requests.items()}
        end, asked = time.monotonic() + timeout, {}
        replies: dict[int, Request] = {}
        failures: dict[int, Failure] = {}
        with self._changed:
            self._answers, self._awaited = {}, dict(numbers)
            # sites that are told so leave
            self._closing |= any(request.header.get("op") == "done" for request in requests.values())
            for i in requests:
                if (stream := self._streams.get(i)) is None:
                    failures[i] = Failure("away", "it is not connected")
                    continue
                if why := self._refused(stream):
                    failures[i] = Failure("away", why)
                    stream.outbox.put(None)
                    del self._streams[i]
                    log.warning("%s is cut off: %s", self.names[i], why)
                    continue
                asked[i] = stream
                stream.outbox.put(packed[i])
                self.sent[i] += len(packed[i])
            while open_ := [i for i in asked if i not in replies and i not in failures]:
                for i in open_:
                    if (answer := self._answers.pop(i, None)) is not None:
                        if isinstance(answer, Failure):
                            failures[i] = answer
                        else:
                            replies[i] = answer
                    elif self._streams.get(i) is not asked[i]:
                        failures[i] = Failure("away", "the connection broke")
                    elif self._stopping():
                        failures[i] = Failure("late", "no answer before the run was asked to end")
                    elif time.monotonic() > end:
                        failures[i] = Failure("late", f"no answer in {timeout:.1f} s")
                if any(i not in replies and i not in failures and i not in self._answers for i in asked):
                    self._changed.wait(max(0.0, min(1.0, end - time.monotonic())) + 0.001)
            self._awaited = {}
        return replies, failures

    def heed(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        with self._changed:
            while not all(i in self._streams for i in sites) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return [i for i in sites if i in self._streams]


def _allow_descriptors(number: int) -> None:
    """Raise this process's own limit of open files, as far as the system lets it."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < number:
            wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
