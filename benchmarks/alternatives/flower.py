"""Flower: `FedAvg` in its simulation engine, clients in PyTorch in processes of Ray, one for each core.

The simulation stays up from run to run, so that a run is messages, local steps and averages, and no start of
processes.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import flwr.simulation
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from ..timing import Run
from . import Case
from .pytorch import local_steps


@functools.cache
def samples(folder: str) -> tuple[Any, Any]:
    """All clients' samples, mapped into a process once."""
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("x", "y"))
    return torch.from_numpy(x), torch.from_numpy(y)


def client_app(case: Case, folder: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        x, y = samples(folder)
        w, b = map(torch.from_numpy, message.content["arrays"].to_numpy_ndarrays(keep_input=True))
        draws = case.seed, int(message.content["config"]["server-round"]), i
        seed = int(np.random.SeedSequence(draws).generate_state(1)[0])
        ends = local_steps(case, x[i], y[i], w, b, torch.Generator().manual_seed(seed))
        content = {
            "arrays": ArrayRecord([end.numpy() for end in ends]),
            "metrics": MetricRecord({"num-examples": case.samples}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


@contextmanager
def simulation(case: Case) -> Iterator[Run]:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    asked: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        while asked.get():
            strategy = FedAvg(
                fraction_train=case.participants / case.clients,
                fraction_evaluate=0.0,
                min_train_nodes=case.participants,
                min_available_nodes=case.clients,
            )
            start = ArrayRecord(list(case.start().values()))
            w, b = strategy.start(grid, start, num_rounds=case.rounds).arrays.to_numpy_ndarrays()
            answers.put({"w": w, "b": b})

    def simulate(folder: str) -> None:
        try:
            # What clients get by message must be small; they find the samples in the folder.
            light = replace(case, x=np.empty((case.clients, case.samples, 0)), y=np.empty(0))
            flwr.simulation.run_simulation(
                server,
                client_app(light, folder),
                num_supernodes=case.clients,
                backend_config={"client_resources": {"num_cpus": 1}},
            )
        finally:
            answers.put(None)

    def run() -> Any:
        asked.put(True)
        answer = answers.get()
        if answer is None:
            raise RuntimeError("Flower's simulation ended; its log says why.")
        return answer

    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", case.x)
        np.save(Path(folder) / "y.npy", case.y.astype(np.int64))
        thread = threading.Thread(target=simulate, args=(folder,))
        thread.start()
        try:
            yield run
        finally:
            asked.put(False)
            thread.join()
