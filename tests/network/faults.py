"""A federation of real processes for the tests: started, killed, stopped and ended by their ids."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedstrata as fs

ROOT = Path(__file__).parents[2]
SITES = ("berlin", "lyon", "turin")

EXPERIMENT = """
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.lab.experiments.base import Experiment, Task
from fedstrata.lab.report import Column, TableSpec


def samples(seed, n):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(n, 3)) / 2, "b": rng.normal(size=n)}


DATA = fs.FederatedData.from_clients([samples(i, n) for i, n in enumerate((4, 7, 5))])


def loss(x, sample):
    boom = Path(os.environ.get("FAULTS_BOOM", "/nonexistent"))
    if boom.exists():  # a site's own trouble, once
        boom.unlink()
        raise ZeroDivisionError("patient 17")
    return 0.5 * (sample["a"] @ x - sample["b"]) ** 2


PROBLEM = fs.Minimization(loss)


def final(result):
    found = {f"x{j}": float(v) for j, v in enumerate(np.asarray(result.x))}
    found |= {"gradients": result.ledger.gradients, "up": result.ledger.bytes_up}
    return {name: [value] * len(result.history["round"]) for name, value in found.items()}


def build(s):
    method = {"SCAFFOLD": fs.SCAFFOLD(eta_l=0.1, eta_g=1.0, K=3, batch_size=2), "FedAvg": fs.FedAvg(0.1, H=2)}
    return Task(PROBLEM, method[s.method], DATA, jnp.zeros(3), rounds=s.rounds, derive=final)


EXPERIMENT = Experiment(
    name="faults", title="Faults", description="A small problem.", grid={"method": ["SCAFFOLD"]},
    parameters={"rounds": 200}, build=build, seeds=1, table=TableSpec((Column("x0"),)),
)
"""


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return dict(os.environ) | own


class Federation:
    """Three sites and a server on 127.0.0.1."""

    def __init__(
        self, folder: Path, policy: str = "", words: tuple[str, ...] = (), federation: str = ""
    ) -> None:
        from fedstrata.engines.network.kits import make

        self.folder, self.out, self.words = folder, folder / "out", words
        self.experiment = folder / "faults.py"
        self.experiment.write_text(EXPERIMENT)
        self.port = free_port()
        make(folder / "kits", (*SITES, "paris"), ["localhost", "127.0.0.1"])  # paris is not taken in
        names = ", ".join(f'"{name}"' for name in SITES)
        text = (
            f'[server]\nlisten = "127.0.0.1:{self.port}"\naddress = "localhost:{self.port}"\n'
            'hosts = ["localhost"]\n'
            f'[federation]\nsites = [{names}]\nexperiment = "{self.experiment}"\n{federation}\n'
            f"[policy]\n{policy}\n"
        )
        for party in ("server", *SITES):
            (folder / "kits" / party / "federation.toml").write_text(text)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as stream:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedstrata", "net", *words], cwd=self.folder,
                env=environment() | {"FAULTS_BOOM": str(self.folder / f"boom-{name}")},
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def start_site(self, name: str, *more: str) -> None:
        self._start(name, "site", f"kits/{name}", "--simulated", *self.words, *more)

    def start_server(self, *more: str) -> None:
        self._start("server", "run", str(self.experiment), "kits/server", "--out", "out", *self.words, *more)

    def start(self) -> None:
        for name in SITES:
            self.start_site(name)
        self.start_server()

    def command(self, *words: str, fails: bool = False) -> str:
        """Run a command to its end; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "fedstrata", "net", *words], cwd=self.folder, env=environment(),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stderr
        return done.stdout + done.stderr

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    @contextmanager
    def slowed(self, name: str) -> Iterator[None]:
        """A few rounds a second meanwhile: the site sleeps, and wakes up often enough to count as there."""
        over = threading.Event()

        def nap() -> None:
            while not over.wait(0.05):
                self.signal(name, signal.SIGSTOP)
                over.wait(1.0)
                self.signal(name, signal.SIGCONT)

        thread = threading.Thread(target=nap)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, true, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, {name: self.log(name)[-1500:] for name in ("server", *SITES)}
            assert self.processes["server"].poll() in (None, 0), self.log("server")[-3000:]
            time.sleep(0.02)

    def round(self) -> int:
        """The round that the server last told of, or −1."""
        try:
            found = json.loads((self.out / "network.json").read_text())["round"]
        except (OSError, ValueError):
            return -1
        return -1 if found is None else found

    def finish(self, seconds: float = 150.0) -> dict[str, float]:
        """Wait for the server; the last values of the history."""
        self.until(lambda: self.processes["server"].poll() is not None, seconds)
        assert self.processes["server"].returncode == 0, self.log("server")[-3000:]
        return self.result()

    def result(self) -> dict[str, float]:
        return self.history()[-1]

    def history(self) -> list[dict[str, float]]:
        """The rows of the only run's history."""
        return history(self.out)

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def history(out: Path) -> list[dict[str, float]]:
    """The rows of the only run in a folder."""
    (file,) = (out / "finished").glob("*.json")
    rows = csv.DictReader(json.loads(file.read_text())["history"].splitlines())
    return [{k: float(v) for k, v in row.items() if k != "label"} for row in rows]


def _text(**parameters) -> tuple[Any, Any]:
    from fedstrata.lab.experiments.base import Setting

    module = types.ModuleType("faults_text")
    sys.modules["faults_text"] = module
    exec(EXPERIMENT, module.__dict__)
    return module, module.build(
        Setting(module.EXPERIMENT.parameters | parameters, {"method": "SCAFFOLD"}, seed=0)
    )


def simulated(**parameters) -> dict[str, float]:
    """What the same run comes to without a network."""
    import fedstrata as fs

    module, task = _text(**parameters)
    result = fs.solve(
        task.problem, task.method, task.data, task.x0, rounds=task.rounds, seed=0, progress=False
    )
    return {name: values[-1] for name, values in module.final(result).items()}


def forgetting(client: int, r: int) -> np.ndarray:
    """Where the same run comes to when a client has forgotten everything before round ``r``."""
    from fedstrata.engines.engine import Job
    from fedstrata.engines.simulated import Simulated
    from fedstrata.solving.pose import pose

    _, task = _text()
    run = pose(task.problem, task.method, task.data, task.x0, rounds=task.rounds)
    engine = Simulated()
    data, carry = engine.place(run.data), engine.place_carry(run.carry)
    first = carry.memory
    for begin, end in ((0, r), (r, task.rounds)):
        if begin:
            memory = jax.tree.map(lambda m, f: m.at[client].set(f[client]), carry.memory, first)
            carry = carry._replace(memory=memory)
        rounds = np.array([end - begin], np.int32)
        carry = engine.advance(Job(run.setup, run.method, 0, data), carry, begin, rounds).carry
    return np.asarray(carry.state.x)


def without(client: int, away: Container[int], **parameters: Any) -> np.ndarray:
    """Where the same run comes to when a client takes no part in these rounds."""
    _, task = _text(**parameters)
    there = np.ones((task.rounds, task.data.clients), bool)
    there[[r for r in range(task.rounds) if r in away], client] = False
    options = {"default_metrics": False, "progress": False, "certify": False}
    found = fs.solve(
        task.problem, task.method, task.data, task.x0, rounds=task.rounds, eval_every=task.rounds,
        dropouts=fs.Dropouts(trace=there), **options,
    )  # fmt: skip
    return np.asarray(found.x)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
