"""A site's end of gRPC: it dials out, so that it needs no open port, and redials for ever."""

from __future__ import annotations

import logging
import queue
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from fedstrata.engines.network import wire
from fedstrata.engines.network.answering import Ended, Party
from fedstrata.engines.network.grpc_server import LARGEST, METHOD, PROCESS, PROTOCOLS, SERVICE, options
from fedstrata.engines.network.kits import KitError, read
from fedstrata.engines.network.line import UNLIMITED, Line, Rates

log = logging.getLogger("fedstrata.network")
LONGEST_PAUSE = 30.0


def serve(
    host: Party, kit: Path, address: str, limit: int = wire.LIMIT, ended: Callable[[], bool] = lambda: False,
    resting: Callable[[], bool] = lambda: False, rates: Rates = UNLIMITED,
) -> None:  # fmt: skip
    """Answer the server until it announces the end, also if the connection breaks in between.

    Args:
        host: the party that answers.
        kit: the site's folder with its certificate.
        address: the server's address.
        limit: the most bytes of a message.
        ended: returns whether to stop; called before each dial.
        resting: returns whether the site does not answer at this time, and so is not connected.
        rates: the bandwidth for sending and receiving.
    """
    if rates == UNLIMITED:
        _serve(host, kit, address, address, options(limit), limit, ended, resting)
        return
    with Line(address, rates) as line:
        # the server's certificate has the server's name; the line goes through the proxy, if there is one
        own = [*options(limit), ("grpc.ssl_target_name_override", line.host), ("grpc.enable_http_proxy", 0)]
        _serve(host, kit, address, line.dial, own, limit, ended, resting)


def _serve(
    host: Party, kit: Path, address: str, dial: str, own: list[tuple[str, Any]], limit: int,
    ended: Callable[[], bool], resting: Callable[[], bool],
) -> None:  # fmt: skip
    """The same over a channel to ``dial`` with these options."""
    # The server takes a new connection for an old one of the same process, and refuses another process.
    pause, process = 0.25, secrets.token_hex(8)
    while not ended():
        began = time.monotonic()
        if resting():
            time.sleep(1.0)
            continue
        try:
            authority, certificate, key = read(kit)  # at each dial: a renewed certificate needs no restart
            credentials = grpc.ssl_channel_credentials(authority, key, certificate)
            with grpc.secure_channel(dial, credentials, own) as channel:
                _answer(host, channel, limit, process, resting)
        except Ended:
            log.info("the server says that all is done")
            return
        except (KitError, OSError) as error:  # while it is being renewed
            log.warning("no connection: %s", error)
        except grpc.RpcError as error:
            details = f"{error.code().name}: {error.details()}"
            strange = "handshake failed" in details.lower()
            hint = "; was its kit made by the same `net kits` as the server's?" if strange else ""
            log.warning("no connection to %s (%s)%s", address, details, hint)
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
                pause = LONGEST_PAUSE  # refused by name or protocol, which do not change within a second
        if time.monotonic() - began > 10:  # it had been connected, so this counts as a first attempt
            pause = 0.25
        time.sleep(pause * random.uniform(0.5, 1.0))  # sites that lost one server do not dial in step
        pause = min(2 * pause, LONGEST_PAUSE)


def _answer(
    host: Party, channel: grpc.Channel, limit: int, process: str, resting: Callable[[], bool]
) -> None:
    """One connection."""
    outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    dial = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    told = {PROCESS: process, PROTOCOLS: str(wire.VERSION), LARGEST: str(limit)}
    stream = dial(iter(outbox.get, None), metadata=tuple(told.items()))
    try:
        for message in stream:
            if resting():
                log.info("disconnecting: the site does not answer at this time")
                return
            outbox.put(host.answer(message, limit))
    finally:
        outbox.put(None)
        stream.cancel()
