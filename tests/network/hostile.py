"""A site with a good certificate and the right text that lies, once every few rounds, in every way there is.

`python -m tests.network.hostile KIT`
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np

from fedstrata.engines.network import wire
from fedstrata.engines.network.grpc_server import METHOD, SERVICE, options
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.kits import name_of, read
from fedstrata.lab.experiments.net import plan_of
from fedstrata.lab.experiments.networked import opener, terms_of
from fedstrata.lab.experiments.settings import settings_of

EVERY = 6  # rounds
LIMIT = 2**20  # of the server's messages; this site's own is larger


def altered(change: Callable[[wire.Header, wire.Arrays], tuple[wire.Header, wire.Arrays]]):
    """An answer to the right message, with something else in it."""

    def alter(reply: bytes, before: bytes) -> list[bytes]:
        header, arrays = wire.unpack(reply)
        return [wire.pack(*change(header, [np.array(array) for array in arrays]))]

    return alter


# What it sends in place of an answer, from that and the one before; and what the server says of it.
ATTACKS = {
    "nan": (altered(lambda h, a: (h, [np.full_like(u, np.nan) for u in a])), "its upload is not finite"),
    "shape": (altered(lambda h, a: (h, [u[None] for u in a])), "where the text has"),
    "dtype": (altered(lambda h, a: (h, [u.astype(np.float64) for u in a])), "where the text has"),
    "fewer": (altered(lambda h, a: (h, a[:-1])), "where the text has"),
    "counts": (altered(lambda h, a: ({**h, "counts": {"gradients": -5}}, a)), "its counts are not valid"),
    "number": (altered(lambda h, a: ({**h, "seq": None}, a)), "it does not say what it answers"),
    "truncated": (lambda reply, before: [reply[:-8]], "shorter than its header says"),
    "noise": (lambda reply, before: [b"noise"], "not a message of FedStrata"),
    "version": (lambda reply, before: [reply[:3] + b"\x09" + reply[4:]], "protocol version 9"),
    "replayed": (lambda reply, before: [before, before, reply], "a message that nobody asked for"),
    "reordered": (lambda reply, before: [], "late: no answer in"),  # and after the next one, this one
    "oversized": (lambda reply, before: [bytes(LIMIT + 1)], f"was larger than {LIMIT} bytes"),
    "flood": (lambda reply, before: [reply] * 2000, "it sent too much that nobody asked for"),
}


class Liar:
    """Answers as the text says, but for the attacks."""

    def __init__(self, host: Host) -> None:
        self.host, self.left = host, list(ATTACKS)
        self.rounds, self.before, self.held = 0, b"", b""

    def replies(self, message: bytes) -> Iterator[bytes]:
        header, _ = wire.unpack(message)
        reply = self.host.answer(message)
        is_round = header["op"] == "exchange" and header["what"][0] == "round"
        self.rounds += is_round
        if is_round and self.left and self.rounds % EVERY == 0:
            name = self.left.pop(0)
            print(f"attack: {name}", flush=True)
            if name == "reordered":
                self.held = reply
            yield from ATTACKS[name][0](reply, self.before)
        else:
            yield reply
            if self.held and is_round:
                yield self.held
                self.held = b""
        if is_round:
            self.before = reply


def serve(liar: Liar, kit: Path, address: str) -> None:
    """Dial for ever."""
    authority, certificate, key = read(kit)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    while True:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            with grpc.secure_channel(address, credentials, options(2**28)) as channel:
                for message in channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(outbox.get, None)):
                    for reply in liar.replies(message):
                        outbox.put(reply)
        except grpc.RpcError as error:
            print(f"cut off: {error.code().name}", flush=True)
        outbox.put(None)
        time.sleep(0.2)


def main(kit: Path) -> None:
    settings, name = settings_of(kit), name_of(kit)
    names = settings.sites
    definition = plan_of(settings.experiment, kit, False, None, None).experiment
    opens = opener(definition, None, (names.index(name), len(names)))
    serve(Liar(Host(terms_of(definition), opens, kit / "state")), kit, settings.address)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
