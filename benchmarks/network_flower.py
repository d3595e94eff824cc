"""Flower's own messages beside `benchmarks.network`: three SuperNodes that send back what they get.

Without TLS, which is in Flower's favour. A message is one process of the client's app at each node, as Flower
starts them by default.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write(folder: Path, port: int) -> None:
    """The app, and where its SuperLink is."""
    app = folder / "app" / "echo"
    app.mkdir(parents=True)
    (app / "__init__.py").touch()
    (app.parent / "pyproject.toml").write_text(PROJECT, "utf-8")
    (app / "client.py").write_text(CLIENT, "utf-8")
    out = str(folder / "times.json")
    (app / "server.py").write_text(SERVER.format(nodes=NODES, sizes=SIZES, rounds=ROUNDS, out=out), "utf-8")
    home = folder / "home"
    home.mkdir()
    link = f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(link, "utf-8")


def main() -> None:
    """Start SuperLink and SuperNodes, run the app, end them by their ids."""
    bin_ = Path(sys.executable).parent
    if not (bin_ / "flower-superlink").exists():
        print("Left out, as Flower is not installed here: pip install 'flwr>=1.41,<1.42'\n")
        return
    folder = Path(tempfile.mkdtemp())
    port = free_port()
    write(folder, port)
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "home"), "PATH": path}
    processes: list[subprocess.Popen[bytes]] = []

    def start(program: str, *words: str) -> None:
        with (folder / f"{len(processes)}.log").open("wb") as stream:
            command = [str(bin_ / program), "--insecure", "--host", "127.0.0.1", *words]
            processes.append(
                subprocess.Popen(command, env=env, stdout=stream, stderr=stream, start_new_session=True)
            )

    try:
        start("flower-superlink", "--port", str(port))
        for _ in range(NODES):
            start("flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
        command = [str(bin_ / "flwr"), "run", str(folder / "app"), "loopback"]
        for _ in range(30):  # until the SuperLink is up
            if not subprocess.run(command, env=env, capture_output=True, check=False).returncode:
                break
            time.sleep(1.0)
        end = time.monotonic() + PATIENCE
        while not (folder / "times.json").exists():
            if time.monotonic() > end:
                raise SystemExit(f"Flower did not finish in {PATIENCE:.0f} s; its logs are in {folder}.")
            time.sleep(1.0)
        found = json.loads((folder / "times.json").read_text("utf-8"))
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)  # with the processes of its apps
            process.wait()
    shutil.rmtree(folder)
    print("A message to three of Flower's SuperNodes on loopback and back, without TLS, median s")
    for name, seconds in found.items():
        print(
            f"{name:8s}{median(seconds):10.1f}   {ROUNDS} messages, {min(seconds):.1f} to {max(seconds):.1f}"
        )


if __name__ == "__main__":
    main()
