"""A SuperLink of Flower and SuperNodes on loopback, started and ended by their ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class System:
    """SuperLink and SuperNodes without TLS, each a process with its own group.

    Args:
        folder: for their logs and configuration.
        nodes: the ``--node-config`` of each SuperNode, or "".
        environment: what they and their apps have besides this process's own.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.folder, self.nodes, self.port = folder, nodes, free_port()
        home = folder / "home"
        home.mkdir()
        link = f'[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(link, "utf-8")
        own = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(home)}
        self.env = {
            **os.environ,
            **own,
            **(environment or {}),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> System:
        self._start("superlink", "--port", str(self.port))
        for config in self.nodes:
            words = ["--node-config", config] if config else []
            self._start(
                "supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()), *words
            )
        return self

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}-{len(self.processes)}.log").open("wb") as stream:
            command = [str(BIN / f"flower-{program}"), "--insecure", "--host", "127.0.0.1", *words]
            if program == "superlink":
                command.append("--disable-runtime-dependency-installation")  # apps run with what is here
            process = subprocess.Popen(
                command, env=self.env, stdout=stream, stderr=stream, start_new_session=True
            )
            self.processes.append(process)

    def run(self, app: Path, *words: str) -> str:
        """Submit an app, as soon as the SuperLink is up; what Flower says."""
        command = [str(BIN / "flwr"), "run", str(app), "loopback", *words]
        for _ in range(30):
            done = subprocess.run(
                command, env=self.env, capture_output=True, text=True, check=False, timeout=60
            )
            if not done.returncode:
                return done.stdout
            time.sleep(1.0)
        raise SystemExit(f"Flower takes no app: {done.stdout} {done.stderr}")

    def logs(self) -> str:
        """What all processes said."""
        return "".join(
            file.read_text("utf-8", errors="replace") for file in sorted(self.folder.glob("*.log"))
        )

    def __exit__(self, *error: Any) -> None:
        for process in reversed(self.processes):
            os.killpg(process.pid, signal.SIGTERM)  # with the processes of its apps
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
