"""Log peers that connect to a server's port without a certificate of the federation.

gRPC does not report a failed handshake. Linux lists the connections of a port; those that never became a
site's stream are logged, with the peer's address, once they are gone or have been silent for too long. On
other systems nothing is logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

log = logging.getLogger("fedstrata.network")
TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
LISTENS, OVER = "0A", "06"  # states of a connection
TOLD = 5  # the most peers in one line
PAUSE = 1.0  # seconds between two looks

Peer = tuple[IPv4Address | IPv6Address, int]


class Knocks:
    """Inspects a port's connections after a peer has connected.

    Args:
        port: the server's port.
        patience: the seconds in which a connection must show its certificate.
    """

    def __init__(self, port: int, patience: float) -> None:
        self.port, self.patience = port, patience
        self.knocked = asyncio.Event()
        self._since: dict[Peer, float] = {}
        self._shown: set[Peer] = set()

    def shown(self, peer: str) -> None:
        """A peer, as gRPC names it, has shown a certificate of the federation's authority."""
        with suppress(ValueError):
            self._shown.add(peer_of(peer))

    async def watch(self) -> None:
        """Log strangers, for ever."""
        while True:
            if not self._since:
                await self.knocked.wait()
            self.knocked.clear()
            there = await asyncio.to_thread(peers_at, self.port)
            now = time.monotonic()
            for peer in there:
                self._since.setdefault(peer, now)
            # A peer that was silent for long is logged once, and stays known until it is gone.
            late = [p for p, since in self._since.items() if since < now - self.patience or p not in there]
            self._tell([p for p in late if self._since[p] > 0 and p not in self._shown])
            self._since = {p: -1.0 if p in late else s for p, s in self._since.items() if p in there}
            self._shown &= there
            await asyncio.sleep(PAUSE)

    def _tell(self, strangers: list[Peer]) -> None:
        if strangers:
            names = ", ".join(f"{address} port {port}" for address, port in strangers[:TOLD])
            more = f" and {len(strangers) - TOLD} more" if len(strangers) > TOLD else ""
            log.warning("connections without a certificate of this federation: %s%s", names, more)


def peer_of(name: str) -> Peer:
    """A peer from gRPC's name of it, ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``.

    >>> peer_of("ipv6:%5B::1%5D:80")
    (IPv6Address('::1'), 80)
    """
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(ip_address(host.strip("[]"))), int(port)


def peers_at(port: int) -> set[Peer]:
    """The peers that are connected to a port of this machine."""
    lines: list[str] = []
    for table in TABLES:
        with suppress(OSError):
            lines += table.read_text().splitlines()[1:]
    return set(_peers(lines, port))


def _peers(lines: Iterable[str], port: int) -> Iterable[Peer]:
    for line in lines:
        _, own, other, state, *_ = line.split()
        if own.endswith(f":{port:04X}") and state not in (LISTENS, OVER):
            address, _, far = other.partition(":")
            yield _plain(_address(address)), int(far, 16)


def _address(words: str) -> IPv4Address | IPv6Address:
    # four bytes at a time, each a number of this machine's byte order
    numbers = (int(words[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(words), 8))
    return ip_address(b"".join(numbers))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return getattr(address, "ipv4_mapped", None) or address
