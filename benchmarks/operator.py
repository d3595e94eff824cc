"""The hour of an operator: from nothing to a report, on four machines, by the commands of the documentation.

Four network namespaces with an address each stand for a server and three hospitals. Nobody opens a port but
the server; keys are made at the hospitals; each decides for itself what it approves. It needs Linux, root and
`ip`. What a person adds (reading, copying files, deciding) is not in the times: commands are counted.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITES = ("cleveland", "budapest", "zurich")
FILES = {"cleveland": "cleveland.csv", "budapest": "hungary.csv", "zurich": "zurich.csv"}
PORT = 18443


class Machines:
    """Namespaces on a bridge, each with a folder; ended and removed by their names and ids."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, ("server", *SITES)
        self.mark = f"fs{os.getpid() % 10_000}"  # of what this process made
        self.running: list[subprocess.Popen[bytes]] = []
        self.commands = 0

    def __enter__(self) -> Machines:
        self._ip("link", "add", self.mark, "type", "bridge")
        self._ip("link", "set", self.mark, "up")
        for number, name in enumerate(self.names):
            (self.folder / name).mkdir()
            there, near = f"{self.mark}-{name}", f"{self.mark}v{number}"
            self._ip("netns", "add", there)
            self._ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", there)
            self._ip("link", "set", near, "master", self.mark, "up")
            self._ip("-n", there, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", there, "link", "set", device, "up")
        return self

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=20)

    def at(self, name: str, *words: str, stays: bool = False, environment: str = "") -> None:
        """A command of `fedstrata` at a machine, as an operator types it."""
        self.commands += 1
        print(f"{name:10s} {environment} fedstrata {' '.join(words)}", flush=True)
        command = ["ip", "netns", "exec", f"{self.mark}-{name}", sys.executable, "-m", "fedstrata", *words]
        own = dict([environment.split("=")]) if environment else {}
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | own
        folder = self.folder / name
        if not stays:
            subprocess.run(command, cwd=folder, env=env, check=True, timeout=600, stdout=subprocess.DEVNULL)
            return
        with (folder / "log").open("wb") as stream:
            self.running.append(subprocess.Popen(command, cwd=folder, env=env, stdout=stream, stderr=stream))

    def __exit__(self, *error: object) -> None:
        for process in self.running:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", f"{self.mark}-{name}"], check=False, timeout=20)
        subprocess.run(["ip", "link", "del", self.mark], check=False, timeout=20)


def carried(machines: Machines, source: str, target: str, *files: str) -> None:
    """Files that one person gives another, such as by mail."""
    for file in files:
        place = machines.folder / target / file.rpartition(":")[2]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(machines.folder / source / file.partition(":")[0], place)


def walk(machines: Machines) -> Path:
    """What is typed where; the report."""
    hospitals = ROOT / "examples" / "hospitals"
    shutil.copy(hospitals / "hearts.py", machines.folder / "server")
    for site in SITES:
        for file in ("hearts.py", "clinic.py", FILES[site]):
            shutil.copy(hospitals / file, machines.folder / site)
    where = ("--listen", f"0.0.0.0:{PORT}", "--address", f"10.77.0.1:{PORT}")
    machines.at(
        "server", "net", "init", "federation", "--sites", ",".join(SITES), "--experiment", "hearts.py", *where
    )
    carried(machines, "server", "server", "hearts.py:federation/hearts.py")
    machines.at("server", "net", "kits", "federation", "--server-only")
    for site in SITES:
        machines.at(site, "net", "request", "kit", site)
        carried(machines, site, "server", f"kit/request.pem:{site}.pem")
        machines.at("server", "net", "sign", "federation", f"{site}.pem")
        parts = ("authority.pem", "certificate.pem", "federation.toml", "hearts.py")
        carried(machines, "server", site, *(f"federation/kits/{site}/{part}:kit/{part}" for part in parts))
        own = {"environment": f"HEART_FILE={FILES[site]}"}
        machines.at(site, "net", "approve", "kit", "--data", "clinic:samples", "--yes", **own)
        machines.at(site, "net", "site", "kit", "--data", "clinic:samples", stays=True, **own)
    machines.at("server", "net", "run", "hearts.py", "federation/kits/server", "--out", "runs/hearts")
    return machines.folder / "server" / "runs" / "hearts"


def main() -> None:
    """Walk, and tell how long it took."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        print("Left out: this needs Linux, root and ip.\n")
        return
    with tempfile.TemporaryDirectory() as folder, Machines(Path(folder)) as machines:
        began = time.monotonic()
        out = walk(machines)
        taken = time.monotonic() - began
        rows = list(csv.DictReader((out / "history.csv").read_text("utf-8").splitlines()))
        print(f"{machines.commands} commands on four machines, {taken / 60:.1f} minutes")
        print(f"The loss after the last round: {float(rows[-1]['loss']):.4f}")


if __name__ == "__main__":
    main()
