"""The server's end of gRPC: sites dial in with a certificate and keep a stream, which carries requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from fedstrata.engines.network import wire
from fedstrata.engines.network.kits import REVOKED, read, revoked, serial_of
from fedstrata.engines.network.knocks import Knocks
from fedstrata.engines.network.transport import Failure, Outcome, Request, answer_of

log = logging.getLogger("fedstrata.network")
SERVICE, METHOD = "fedstrata.Network", "Serve"
PROCESS = "fedstrata-process"  # in a call's metadata: a unique word of the site's process
PROTOCOLS = "fedstrata-protocols"  # the versions that a site speaks, with commas; the server picks its own
LARGEST = "fedstrata-message-bytes"  # the largest message that the site takes
MOST_WRITING, SMALL = 8, 2**16  # the number of messages of at least so many bytes that are written at a time
PATIENCE = 1.0  # seconds that such a message waits for earlier ones, which may hang
HANDSHAKE = 10.0  # seconds for a connection to show its certificate
UNASKED = 16  # unrequested messages, after which a site is cut off


def options(limit: int) -> list[tuple[str, int]]:
    """The options of both ends: the limit of a message, and pings that notice a dead peer."""
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # or else a second server on the port would get half of the sites
    ]


class Stream:
    """One site's connection; its outbox is the event loop's."""

    def __init__(self, session: int, process: str, serial: str, until: float) -> None:
        self.session, self.process = session, process
        self.serial, self.until = serial, until  # its certificate's number, and when that expires
        self.outbox, self.unasked = asyncio.Queue[list[wire.Buffer] | None](), 0


class GrpcServer:
    """A transport: sites are known by the common name of their certificate.

    All streams are served by one thread with an event loop. A message's bytes are joined just before it is
    sent, so that the messages of an exchange are not all in memory at once.

    Args:
        names: the sites of the federation.
        kit: the server's folder, with its certificate.
        address: the address to listen on; the port 0 takes a free one, see ``port``.
        limit: the most bytes of a message.
    """

    rejoins = True

    def __init__(
        self, names: Sequence[str], kit: Path, address: str = "127.0.0.1:0", limit: int = wire.LIMIT
    ) -> None:
        self.names: Sequence[str] = list(names)
        self.limit = limit
        self.heed(lambda: False)
        self.sent, self.received, self.took = [0] * len(names), [0] * len(names), [0.0] * len(names)
        self._streams: dict[int, Stream] = {}
        self._sessions = 0
        self._closing = False
        self._owed: dict[int, int] = {}  # site → the number of the message it owes an answer to
        self._found: dict[int, Request | Failure] = {}
        self._asked_at = 0.0
        self._changed = threading.Condition()
        self._kit, self._revoked, self._revoked_at = kit, frozenset[str](), 0
        self._knocks: Knocks | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fedstrata-server", daemon=True)
        self._thread.start()
        try:
            self._soon(self._start(address))
        except RuntimeError as error:
            self._end_thread()
            raise OSError(f"Cannot listen on {address}: is another server running there?") from error

    def _soon(self, work: Coroutine[Any, Any, None], seconds: float | None = None) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    async def _start(self, address: str) -> None:
        # The kit is read at each handshake, so that a renewed certificate needs no restart.
        credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._at_handshake, require_client_authentication=True
        )
        most = 4 * len(self.names) + 8  # each stream, those that replace it, and strangers
        # A silent connection takes neither all descriptors nor the sites' places for long.
        bounds = [
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_allowed_incoming_connections", 2 * most),
        ]
        _allow_descriptors(2 * most + 256)
        self._writing = asyncio.Semaphore(MOST_WRITING)
        self._server = grpc.aio.server(options=[*options(self.limit), *bounds], maximum_concurrent_rpcs=most)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_secure_port(address, credentials)
        self._knocks = Knocks(self.port, HANDSHAKE)
        self._watching = asyncio.create_task(self._knocks.watch())
        await self._server.start()

    def close(self) -> None:
        """Hang up."""
        with self._changed:
            self._closing = True
            self._send([(stream, None) for stream in self._streams.values()])
        with suppress(TimeoutError):  # a site's connection may hang
            self._soon(self._stop(), 10.0)
        self._end_thread()

    async def _stop(self) -> None:
        self._watching.cancel()
        await self._server.stop(1.0)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _configuration(self) -> Any:
        authority, certificate, key = self._shows = read(self._kit)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def _at_handshake(self) -> Any:
        """The certificate to show from now on; None if it is unchanged."""
        if self._knocks is not None:
            self._loop.call_soon_threadsafe(self._knocks.knocked.set)
        # gRPC frees the shown certificate when it gets a new one, while other handshakes may still use it: a
        # server that sets it again at every handshake crashes when many sites dial at once.
        return None if read(self._kit) == self._shows else self._configuration()

    def _refused(self, stream: Stream) -> str:
        """Why a site's certificate is no longer accepted, or an empty string."""
        file = self._kit / REVOKED
        changed = file.stat().st_mtime_ns if file.exists() else 0
        if changed != self._revoked_at:
            self._revoked, self._revoked_at = revoked(self._kit), changed
        if stream.serial in self._revoked:
            return "its certificate was revoked"
        return "its certificate has expired" if time.time() > stream.until else ""

    def expires(self, site: int) -> float | None:
        """The expiry of the certificate of a site's connection, in seconds since 1970."""
        with self._changed:
            stream = self._streams.get(site)
            return None if stream is None else stream.until

    def waiting(self) -> tuple[list[str], float]:
        """The sites with pending answers, and the seconds waited for each."""
        with self._changed:
            return [self.names[i] for i in self._owed], time.monotonic() - self._asked_at

    def session(self, site: int) -> int | None:
        """The number of a site's connection, or None if it is not connected."""
        with self._changed:
            stream = self._streams.get(site)
            return None if stream is None else stream.session

    async def _serve(self, _: AsyncIterator[bytes], context: Any) -> None:
        """One connection of a site."""
        shown, told = context.auth_context(), dict(context.invocation_metadata())
        self._knocks.shown(context.peer())  # type: ignore[union-attr]  # set when the server listens
        name = shown.get("x509_common_name", [b""])[0].decode(errors="replace")
        code, why = grpc.StatusCode.PERMISSION_DENIED, "not a site of this federation"
        if name in self.names:
            arriving = Stream(0, told.get(PROCESS, ""), *serial_of(shown["x509_pem_cert"][0]))
            why = self._refused(arriving)
            if not why and (why := self._strange(told)):
                code = grpc.StatusCode.FAILED_PRECONDITION
            if not why and not self._enter(self.names.index(name), arriving):
                code, why = grpc.StatusCode.ALREADY_EXISTS, "another process of this site is connected"
        if why:
            log.warning("refused %r from %s: %s", name, context.peer(), why)
            await context.abort(code, why)
        log.info("%s is connected", name)
        listening = asyncio.create_task(self._listen(self.names.index(name), arriving, context))
        try:
            while (parts := await arriving.outbox.get()) is not None:
                await self._write(context, parts)
        finally:
            listening.cancel()
            self._leave(self.names.index(name), arriving, "the connection broke")

    def _strange(self, told: Mapping[str, str]) -> str:
        """Why a site with this metadata cannot be served, or an empty string."""
        protocols, largest = told.get(PROTOCOLS, str(wire.VERSION)), told.get(LARGEST, "")[:12]
        if str(wire.VERSION) not in protocols.split(","):
            return (
                f"the site speaks version {wire.said(protocols)} of the protocol, the server version "
                f"{wire.VERSION}: update whichever has the older FedStrata"
            )
        if largest.isdecimal() and int(largest) < self.limit:  # else its connection breaks at every message
            return f"message_bytes is {int(largest)} at the site, {self.limit} at the server: make them equal"
        return ""

    async def _write(self, context: Any, parts: list[wire.Buffer]) -> None:
        """Send a message; only a few large ones are in memory at a time, unless earlier ones hang."""
        if sum(map(len, parts)) < SMALL:
            await context.write(b"".join(parts))
            return
        turn = True
        try:
            await asyncio.wait_for(self._writing.acquire(), PATIENCE)
        except TimeoutError:
            turn = False
        try:
            await context.write(b"".join(parts))
        finally:
            if turn:
                self._writing.release()

    def _enter(self, i: int, stream: Stream) -> bool:
        """Keep a site's newest connection of its process; return whether no other process is connected."""
        with self._changed:
            if (before := self._streams.get(i)) is not None:
                if before.process != stream.process or not stream.process:
                    return False
                before.outbox.put_nowait(None)
                self._settle(i, Failure("away", "the connection broke"))
            self._sessions += 1
            stream.session, self._streams[i] = self._sessions, stream
            self._changed.notify_all()
            return True

    async def _listen(self, i: int, stream: Stream, context: Any) -> None:
        # gRPC does not distinguish them: a message that is too large may end a stream like a site hanging up.
        why = f"it hung up, the connection broke, or a message was larger than {self.limit} bytes"
        try:
            # gRPC's iterator would keep a site's last message, which may be a model, until the next one
            while (message := await context.read()) is not grpc.aio.EOF:
                if refused := self._refused(stream):
                    why = refused
                    break
                goes_on = self._take(i, stream, message)
                del message
                if not goes_on:
                    why = "it sent too much that nobody asked for"
                    break
        except Exception as error:  # gRPC's own, whatever ended the stream
            why = wire.said(getattr(error, "details", lambda: None)() or why)
        self._leave(i, stream, why)
        stream.outbox.put_nowait(None)

    def _leave(self, i: int, stream: Stream, why: str) -> None:
        with self._changed:
            if self._streams.get(i) is stream:
                del self._streams[i]
                self._settle(i, Failure("away", "the connection broke"))
                if not self._closing:
                    log.warning("%s is gone: %s", self.names[i], why)

    def _settle(self, i: int, outcome: Request | Failure) -> None:
        """Store the outcome of a site's part in an exchange, if it is awaited; the lock is held."""
        if self._owed.pop(i, None) is not None:
            self._found[i], self.took[i] = outcome, time.monotonic() - self._asked_at
            if not self._owed:
                self._changed.notify_all()

    def _take(self, i: int, stream: Stream, message: bytes) -> bool:
        """Handle a message; return whether to continue listening."""
        answer, number = answer_of(message, self.limit)
        with self._changed:
            self.received[i] += len(message)
            owed = self._owed.get(i) if self._streams.get(i) is stream else None
            if owed is not None and number in (owed, None):
                self._settle(i, answer)
                return True
            stream.unasked += 1  # late, from an earlier attempt; or sent again; or a flood
            log.warning("%s sent a message that nobody asked for", self.names[i])
            return stream.unasked <= UNASKED

    def _send(self, messages: list[tuple[Stream, list[wire.Buffer] | None]]) -> None:
        def put() -> None:
            for stream, parts in messages:
                stream.outbox.put_nowait(parts)

        self._loop.call_soon_threadsafe(put)

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        packed = {i: wire.parts(*request, self.limit) for i, request in requests.items()}
        with self._changed:
            self._asked_at, self._found, self._owed = time.monotonic(), {}, {}
            # sites leave when they are told so
            self._closing |= any(request.header.get("op") == "done" for request in requests.values())
            sent: list[tuple[Stream, list[wire.Buffer] | None]] = []
            for i, request in requests.items():
                if (stream := self._streams.get(i)) is None:
                    self._found[i] = Failure("away", "it is not connected")
                elif why := self._refused(stream):
                    self._found[i] = Failure("away", why)
                    sent.append((stream, None))
                    self._leave(i, stream, why)
                else:
                    self._owed[i] = request.header["seq"]
                    sent.append((stream, packed[i]))
                    self.sent[i] += sum(map(len, packed[i]))
            self._send(sent)
            del packed, sent
            end = self._asked_at + timeout
            while self._owed and not self._stopping() and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(1.0, left))
            why = "before the run was asked to end" if self._stopping() else f"in {timeout:.1f} s"
            found = self._found | dict.fromkeys(self._owed, Failure("late", f"no answer {why}"))
            self._found, self._owed = {}, {}
        replies = {i: reply for i, reply in found.items() if isinstance(reply, Request)}
        return replies, {i: failure for i, failure in found.items() if isinstance(failure, Failure)}

    def heed(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        with self._changed:
            while not all(i in self._streams for i in sites) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return [i for i in sites if i in self._streams]


def _allow_descriptors(number: int) -> None:
    """Raise this process's limit of open files, as far as the system permits."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < number:
            wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
