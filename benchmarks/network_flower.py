"""Flower's own messages beside `benchmarks.network`: three SuperNodes that send back what they get.

Without TLS, which is in Flower's favour. A message is one process of the client's app at each node, as Flower
starts them by default.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.flower_system import BIN, System

SIZES = {"10 KB": 2_560, "1 MB": 262_144, "10 MB": 2_621_440}
ROUNDS = 3
NODES = 3
PATIENCE = 480.0  # seconds for all of it

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "echo"
version = "1.0.0"
description = "Sends back what it gets"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"
"""

CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    return Message(content=message.content, reply_to=message)
"""

SERVER = """
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < {nodes}:
        time.sleep(0.5)
    found = {{}}
    for name, size in {sizes}.items():
        found[name] = []
        for _ in range({rounds}):
            content = RecordDict({{"x": ArrayRecord([np.zeros(size, np.float32)])}})
            began = time.perf_counter()
            asked = [Message(content=content, message_type=MessageType.TRAIN, dst_node_id=n) for n in nodes]
            got = list(grid.send_and_receive(asked))
            found[name].append(time.perf_counter() - began)
            assert len(got) == {nodes} and not any(message.has_error() for message in got)
    Path({out!r} + ".part").write_text(json.dumps(found))
    Path({out!r} + ".part").rename({out!r})
"""


def write(folder: Path) -> None:
    """The app."""
    app = folder / "app" / "echo"
    app.mkdir(parents=True)
    (app / "__init__.py").touch()
    (app.parent / "pyproject.toml").write_text(PROJECT, "utf-8")
    (app / "client.py").write_text(CLIENT, "utf-8")
    out = str(folder / "times.json")
    (app / "server.py").write_text(SERVER.format(nodes=NODES, sizes=SIZES, rounds=ROUNDS, out=out), "utf-8")


def main() -> None:
    """Start SuperLink and SuperNodes, run the app, end them by their ids."""
    if not BIN.joinpath("flower-superlink").exists():
        print("Left out, as Flower is not installed here: pip install 'flwr>=1.41,<1.42'\n")
        return
    folder = Path(tempfile.mkdtemp())
    write(folder)
    with System(folder, [""] * NODES) as system:
        system.run(folder / "app")
        end = time.monotonic() + PATIENCE
        while not (folder / "times.json").exists():
            if time.monotonic() > end:
                raise SystemExit(f"Flower did not finish in {PATIENCE:.0f} s; its logs are in {folder}.")
            time.sleep(1.0)
        found = json.loads((folder / "times.json").read_text("utf-8"))
    shutil.rmtree(folder)
    print("A message to three of Flower's SuperNodes on loopback and back, without TLS, median s")
    for name, seconds in found.items():
        print(
            f"{name:8s}{median(seconds):10.1f}   {ROUNDS} messages, {min(seconds):.1f} to {max(seconds):.1f}"
        )


if __name__ == "__main__":
    main()
