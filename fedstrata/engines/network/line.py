"""A line to the server with a site's limit on its bandwidth, in both directions.

The site dials a port of its own process, which forwards bytes at a limited rate; TCP's own flow control then
slows the sender. TLS passes through end to end, and through an HTTP proxy if the environment names one.
"""

from __future__ import annotations

import base64
import logging
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

log = logging.getLogger("fedstrata.network")
BUFFER = 2**16  # bytes that wait at either end: pings, which keep a connection, wait behind them
BURST = 0.05  # seconds for which a line may exceed its rate
DIALLING = 20.0  # seconds
MEGABIT = 125_000.0  # bytes


class Rates(NamedTuple):
    """Megabits per second in each direction; None is unlimited."""

    upload: float | None = None
    download: float | None = None


UNLIMITED = Rates()


class Throttle:
    """A limit on the bytes per second.

    Args:
        rate: megabits per second, or None.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = None if rate is None else rate * MEGABIT
        self.chunk = BUFFER if self.rate is None else max(512, min(BUFFER, int(self.rate * BURST)))
        self._free = 0.0  # the time at which the bytes so far would have passed at the rate
        self._lock = threading.Lock()

    def take(self, number: int) -> None:
        """Wait until this number of bytes may pass."""
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - BURST) + number / self.rate
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


class Line:
    """A port of this process that forwards to a server; a context in which it listens.

    Args:
        address: the server's address, host:port.
        rates: the rates of the line.

    Attributes:
        host: the server's name, as in its certificate.
        dial: the address to dial instead.
    """

    def __init__(self, address: str, rates: Rates) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self.up, self.down = Throttle(rates.upload), Throttle(rates.download)

    def __enter__(self) -> Line:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # those accepted have it too
        self._listening.settimeout(0.2)
        self.dial = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                own, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(own,), daemon=True).start()

    def _connect(self, own: socket.socket) -> None:
        try:
            far = _dialled(self.host, self.port)
        except OSError as error:
            log.warning("no connection to %s port %d: %s", self.host, self.port, error)
            own.close()
            return
        for end in (own, far):
            end.settimeout(None)
        back = threading.Thread(target=_pass_on, args=(far, own, self.down), daemon=True)
        back.start()
        _pass_on(own, far, self.up)
        back.join()
        own.close()
        far.close()


def _pass_on(source: socket.socket, sink: socket.socket, throttle: Throttle) -> None:
    with suppress(OSError):
        while content := source.recv(throttle.chunk):
            throttle.take(len(content))
            sink.sendall(content)
    for end in (source, sink):  # if either end hung up, both directions are over
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _dialled(host: str, port: int) -> socket.socket:
    """A connection to the server, through the proxy that the environment names."""
    named = getproxies()
    proxy = next((named[kind] for kind in ("grpc", "https", "http") if kind in named), None)
    if proxy is None or proxy_bypass(host):
        return _socket(host, port)
    where = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    found = _socket(where.hostname or "", where.port or 80)
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    own = "" if where.username is None else f"{unquote(where.username)}:{unquote(where.password or '')}"
    word = base64.b64encode(own.encode()).decode()
    known = f"Proxy-Authorization: Basic {word}\r\n" if own else ""
    found.sendall(f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n{known}\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):  # byte by byte: the next bytes are the server's
        if not (byte := found.recv(1)) or len(answer) > BUFFER:
            raise ConnectionError("the proxy hung up")
        answer += byte
    status = answer.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or status[1] != b"200":
        raise ConnectionError(f"the proxy says {b' '.join(status[1:])[:80]!r}")
    return found


def _socket(host: str, port: int) -> socket.socket:
    found = socket.create_connection((host, port), DIALLING)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    return found
