"""An NVIDIA FLARE system of real processes on 127.0.0.1: provisioned, started and ended by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER, ADMIN = "localhost", "admin@fedstrata.test"

PROJECT = """
api_version: 3
name: trial
participants:
  - {{name: {server}, type: server, org: fed, fed_learn_port: {port}}}
{sites}
  - {{name: "{admin}", type: admin, org: fed, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class System:
    """FLARE's server and sites.

    Args:
        folder: for its kits and logs.
        sites: their names.
        environment: of its processes.
    """

    def __init__(self, folder: Path, sites: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, dict(environment)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        lines = "\n".join(f"  - {{name: {name}, type: client, org: fed}}" for name in sites)
        project = PROJECT.format(server=SERVER, port=port, sites=lines, admin=ADMIN)
        (folder / "project.yml").write_text(project, "utf-8")
        command = "from nvflare.cli import main; main()"
        self.python("-c", command, "provision", "-p", "project.yml", "-w", "provisioned")
        self.kits = folder / "provisioned" / "trial" / "prod_00"
        self.parties = (SERVER, *sites)

    def python(self, *words: str, fails: bool = False, seconds: float = 400.0) -> str:
        """Run a command to its end; what it prints."""
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        told = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, told[-5000:]
        return told

    def start(self, party: str, **environment: str) -> None:
        """As FLARE's start.sh does, without its loop of restarts."""
        role, more = ("server", ()) if party == SERVER else ("client", (f"uid={party}",))
        words = ["-u", "-m", f"nvflare.private.fed.app.{role}.{role}_train", "-m", str(self.kits / party)]
        words += [
            "-s",
            f"fed_{role}.json",
            "--set",
            "secure_train=true",
            *more,
            "org=fed",
            "config_folder=config",
        ]
        with (self.folder / f"{party}.log").open("ab") as stream:
            self.processes[party] = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=self.environment | environment, stdout=stream,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self, party: str) -> None:
        """A party with the processes of its jobs, each by its id."""
        import psutil  # comes with nvflare

        process = self.processes.pop(party)
        own = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End what is running."""
        for party in list(self.processes):
            if self.processes[party].poll() is None:
                self.kill(party)
