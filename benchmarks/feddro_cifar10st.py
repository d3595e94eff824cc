"""FedDRO on CIFAR10-ST with ResNet20 on a GPU: the experiment's whole table, and speed beside plain PyTorch.

    python -m benchmarks.feddro_cifar10st run runs.json            # on the GPU; CIFAR-10 in FEDSTRATA_DATA
    python -m benchmarks.feddro_cifar10st report runs.json folder  # tables and plots

`run` first times FedStrata's ways of writing a round (clients side by side or one by one, two convolutions)
and the same rounds in plain PyTorch, where that is installed: all are compiled side by side, then timed one
at a time. The table is then run in the fastest way, in several processes, which compile side by side; how
many local steps fit into ``--seconds`` follows from the timing. Every method gets the step, of those the
paper chose among, that has the highest training accuracy after a tenth of the local steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COMPILING = 120.0  # seconds that programs wait for each other before they are timed
CLIENTS, BATCH, BETA, LAM, BOUND, SEED = 8, 16, 0.2, 1.0, 0.5, 0
WORK = {"average loss": 3, "FedDRO": 5, "DS-FedDRO": 5, "MBSGD": 4, "FastDRO": 4, "PDSGD": 7}  # passes a step
TABLE = [(name, 1) for name in ("average loss", "FastDRO", "PDSGD", "MBSGD")] + [
    (name, I) for I in (1, 4, 16) for name in ("FedDRO", "DS-FedDRO")
]
VARIANTS = [
    ("lax", None),
    ("patches", None),
    ("lax", 1),
]  # the convolution; clients side by side or one by one


def load(limit: int | None = None) -> dict[str, np.ndarray]:
    """CIFAR10-ST and the test images; ``limit`` of each, for trials."""
    import fedstrata as fs
    from fedstrata.experiments import _cifar10st as st

    arrays = dict(fs.data.load("cifar10"))
    chosen = st.keep_last(arrays["y_train"])
    arrays |= {name: arrays[name][chosen] for name in ("x_train", "y_train")}
    return {name: array[:limit] for name, array in arrays.items()}


class Turns(NamedTuple):
    """Programs that are timed one at a time, once all of them are compiled."""

    ready: Any
    lock: Any

    def wait(self) -> None:
        """Until the others are compiled, or until one of them has not made it."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.ready.wait(timeout=COMPILING)


def timed(options: Any, arrays: Any, variant: tuple[str, int | None], turns: Turns, out: Any) -> None:
    """Images a second with I = 4 for one way of writing it."""
    import fedstrata as fs
    from fedstrata.experiments import _cifar10st as st

    conv, chunk = variant
    data, model = st.federated(arrays, CLIENTS, SEED), st.network(options.network, conv)
    engine = fs.engines.Simulated(chunk=chunk)

    def go(name: str, rounds: int) -> float:
        began = time.perf_counter()
        fs.solve(
            st.problems(model, LAM, BOUND)[name],
            st.method(name, 0.01, 4, BETA, BATCH),
            data,
            model.init(SEED),
            rounds=rounds,
            eval_every=max(rounds, 1),
            engine=engine,
            default_metrics=False,
            progress=False,
        )
        return time.perf_counter() - began

    names = ("FedDRO", "average loss")
    compiled = {name: go(name, 1) for name in names}
    turns.wait()
    for name in names:
        with turns.lock:
            few, many = (
                min(go(name, 2) for _ in range(2)),
                min(go(name, 2 + options.timing) for _ in range(2)),
            )
        if many <= few:
            out.put(
                {"program": f"FedStrata {name}", "conv": conv, "error": "too few rounds (--timing) to time"}
            )
            continue
        seconds = (many - few) / options.timing
        rate = CLIENTS * 4 * BATCH / seconds
        out.put(
            {
                "program": f"FedStrata {name}",
                "conv": conv,
                "clients": "one by one" if chunk else "side by side",
                "seconds per round": seconds,
                "images per second": rate,
                "compiling": compiled[name],
            }
        )


def timed_torch(options: Any, arrays: Any, turns: Turns, out: Any) -> None:
    """The same rounds in plain PyTorch: the clients' models in turn, eager and with torch.compile."""
    try:
        import torch
        from torch import nn
        from torch.nn import functional as F
    except ImportError:
        out.put(
            {"program": "PyTorch", "error": "is not installed here, so there is nothing beside FedStrata"}
        )
        turns.wait()
        return

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cudnn.benchmark = True

    class Block(nn.Module):
        def __init__(self, before: int, channels: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)])
            self.stride, self.extra = stride, channels - before

        def forward(self, u: Any) -> Any:
            v = F.relu(self.norms[0](self.first(u)))
            v = self.norms[1](self.second(v))
            if self.stride == 2:
                u = F.pad(u[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra))
            return F.relu(u + v)

    def resnet20() -> Any:
        layers: list[Any] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
        before = 16
        for stage in range(3):
            for block in range(3):
                layers.append(Block(before, 16 * 2**stage, 2 if stage > 0 and block == 0 else 1))
                before = 16 * 2**stage
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
        return nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)

    order = np.random.default_rng(SEED).permutation(len(arrays["y_train"]))
    size = len(order) // CLIENTS
    rows = torch.tensor(np.stack([order[k * size : (k + 1) * size] for k in range(CLIENTS)]), device=device)
    mean = torch.tensor([125.3, 123.0, 113.9], device=device)[None, :, None, None]
    images = (
        torch.tensor(arrays["x_train"], device=device)
        .permute(0, 3, 1, 2)
        .contiguous(memory_format=torch.channels_last)
    )
    labels = torch.tensor(arrays["y_train"].astype(np.int64), device=device)

    def losses(model: Any, place: Any) -> Any:
        x = (images[place].float() - mean) / 63.0
        return F.cross_entropy(model(x), labels[place], reduction="none")

    models, befores, server = ([resnet20() for _ in range(CLIENTS)] for _ in range(3))
    average = server[0]

    def assign(targets: list[Any], source: Any) -> None:
        with torch.no_grad():
            for target in targets:
                torch._foreach_copy_(list(target.parameters()), list(source.parameters()))

    def average_of(all_models: list[Any]) -> None:
        with torch.no_grad():
            for mine, *theirs in zip(
                average.parameters(), *(m.parameters() for m in all_models), strict=True
            ):
                mine.copy_(torch.stack([t.data for t in theirs]).mean(0))

    def descend(model: Any, objective: Any) -> None:
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), gradients, alpha=-0.01)

    def draw(k: int) -> Any:
        return rows[k, torch.randint(size, (BATCH,), device=device)]

    embedding = torch.tensor(2.0, device=device)  # log ȳ

    def fedavg_round(call: list[Any]) -> None:
        assign(models, average)
        for k, model in enumerate(models):
            for _ in range(4):
                descend(model, losses(call[k], draw(k)).mean())
        average_of(models)

    def feddro_round(call: list[Any]) -> None:
        assign(models, average)
        for _ in range(4):
            places = [draw(k) for k in range(CLIENTS)]
            with torch.no_grad():
                now = torch.stack(
                    [torch.logsumexp(losses(call[k], places[k]) / LAM, 0) for k in range(CLIENTS)]
                )
                old = torch.stack(
                    [torch.logsumexp(losses(befores[k], places[k]) / LAM, 0) for k in range(CLIENTS)]
                )
                a, b = (torch.logsumexp(v, 0) - np.log(CLIENTS * BATCH) for v in (old, now))
                ratio = 1 + (1 - BETA) * (torch.exp(embedding - b) - torch.exp(a - b))
                embedding.copy_(b + torch.log(torch.clamp(ratio, min=BETA)))
            for k, model in enumerate(models):
                assign([befores[k]], model)
                value = losses(call[k], places[k])
                descend(model, LAM * torch.exp(value / LAM - embedding).mean())
        average_of(models)

    turns.wait()
    for words, call in (("eager", models), ("torch.compile", None)):
        if call is None:
            if not cuda:
                continue
            call = [torch.compile(model) for model in models]
        for name, once in (("average loss", fedavg_round), ("FedDRO", feddro_round)):
            try:
                began = time.perf_counter()
                once(call)
                compiling = time.perf_counter() - began
                with turns.lock:
                    once(call)
                    _ = cuda and torch.cuda.synchronize()
                    best = np.inf
                    for _ in range(3):
                        began = time.perf_counter()
                        once(call)
                        _ = cuda and torch.cuda.synchronize()
                        best = min(best, time.perf_counter() - began)
                out.put(
                    {
                        "program": f"PyTorch {name}",
                        "conv": words,
                        "clients": "one by one",
                        "seconds per round": best,
                        "images per second": CLIENTS * 4 * BATCH / best,
                        "compiling": compiling,
                    }
                )
            except Exception as error:  # a machine without a compiler has no torch.compile; the rest goes on
                out.put(
                    {
                        "program": f"PyTorch {name}",
                        "conv": words,
                        "error": f"{type(error).__name__}: {error}"[:300],
                    }
                )


def table_worker(
    options: Any, arrays: Any, tasks: Any, steps: int, conv: str, chunk: int | None, out: Any
) -> None:
    """Settings from a queue: the step is chosen in a tenth of the steps, then all of them are made."""
    import fedstrata as fs
    from fedstrata.experiments import _cifar10st as st

    data, model = st.federated(arrays, CLIENTS, SEED), st.network(options.network, conv)
    engine = fs.engines.Simulated(chunk=chunk)
    while (task := tasks.get()) is not None:
        name, I = task
        began = time.perf_counter()
        problem = st.problems(model, LAM, BOUND)[name]

        def go(
            eta: float,
            x0: Any,
            local_steps: int,
            seed: int,
            evaluations: int = 1,
            name: str = name,
            I: int = I,
            problem: Any = problem,
        ) -> Any:
            rounds = max(local_steps // I, 1)
            return fs.solve(
                problem,
                st.method(name, eta, I, BETA, BATCH),
                data,
                x0,
                rounds=rounds,
                seed=seed,
                engine=engine,
                eval_every=max(1, -(-rounds // evaluations)),
                metrics=st.metrics(model),
                default_metrics=False,
                progress=False,
            )

        try:
            reached = {}
            for eta in st.RATES:
                try:
                    reached[eta] = float(
                        go(eta, model.init(SEED), steps // 10, SEED).history["train_accuracy"][-1]
                    )
                except fs.Diverged:
                    reached[eta] = 0.0
            eta = max(reached, key=lambda rate: reached[rate])
            first = go(eta, model.init(SEED), steps * 3 // 4, SEED, 6)
            x = first.x.x if isinstance(first.x, fs.dro.Lifted) else first.x
            last = go(eta / 10, x, steps // 4, SEED + 1, 2)
            out.put(
                {
                    "label": name,
                    "seed": SEED,
                    "setting": {"I": I, "eta": eta, "steps": steps},
                    "history": {k: _joined(k, first.history[k], last.history[k]) for k in first.history},
                    "ledger": {
                        k: v + last.ledger.to_dict()[k]
                        for k, v in first.ledger.to_dict().items()
                        if k != "levels"
                    },
                    "seconds": time.perf_counter() - began,
                    "method": type(first.method).__name__,
                    "tried": reached,
                }
            )
        except Exception as error:
            out.put({"label": name, "setting": {"I": I}, "error": f"{type(error).__name__}: {error}"[:500]})
    out.put(None)


def _joined(name: str, first: np.ndarray, last: np.ndarray) -> list[float]:
    """A series of two runs, one after the other; what is counted goes on."""
    counted = name in ("round", "exchanges", "bytes_up", "bytes_down", "seconds")
    return [*first.tolist(), *(last[1:] + (first[-1] if counted else 0)).tolist()]


def machine() -> dict[str, str]:
    """What it ran on."""
    import jax

    facts = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
    }
    try:
        import torch

        facts["torch"] = torch.__version__
    except ImportError:
        pass
    return facts


def run(options: Any) -> None:
    """Timing, then the table."""
    began = time.perf_counter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "/tmp/fedstrata-jax-cache")
    context = mp.get_context("spawn")
    arrays, out = load(options.limit), context.Queue()
    variants = VARIANTS[: options.variants]
    turns = Turns(context.Barrier(len(variants) + 1), context.Lock())
    starts = [context.Process(target=timed, args=(options, arrays, v, turns, out)) for v in variants]
    starts.append(context.Process(target=timed_torch, args=(options, arrays, turns, out)))
    rates = _collect(starts, out, options.timing_seconds)
    for row in rates:
        print(json.dumps(row), flush=True)
    feddro = [row for row in rates if row["program"] == "FedStrata FedDRO" and "error" not in row]
    if not feddro:
        raise SystemExit("No variant of FedDRO could be timed.")
    best = max(feddro, key=lambda row: row["images per second"])
    chunk = 1 if best["clients"] == "one by one" else None
    per_pass = best["seconds per round"] / 4 / WORK["FedDRO"]
    passes = 1.4 * sum(WORK[name] for name, _ in TABLE)
    steps = max(int(options.seconds / (passes * per_pass)) // 160 * 160, 160)
    print(f"{best['conv']}, {best['clients']}: {steps} local steps a run", flush=True)

    tasks = context.Queue()
    for task in [*TABLE, *[None] * options.workers]:
        tasks.put(task)
    workers = [
        context.Process(target=table_worker, args=(options, arrays, tasks, steps, best["conv"], chunk, out))
        for _ in range(options.workers)
    ]
    runs = _collect(workers, out, options.table_seconds, ends=options.workers)
    content = {
        "command": " ".join(["python", "-m", "benchmarks.feddro_cifar10st", *sys.argv[1:]]),
        "machine": machine(),
        "clients": CLIENTS,
        "batch_size": BATCH,
        "beta": BETA,
        "lam": LAM,
        "bound": BOUND,
        "network": options.network,
        "steps": steps,
        "timing": rates,
        "runs": runs,
        "seconds": time.perf_counter() - began,
    }
    Path(options.target).write_text(json.dumps(content, indent=1))
    for found in runs:
        last = {k: round(v[-1], 4) for k, v in found.get("history", {}).items() if "accuracy" in k}
        print(found["label"], found["setting"], last or found.get("error"), flush=True)
    print(f"{len(runs)} runs, {content['seconds']:.0f} s in all: {options.target}")


def _collect(processes: list[Any], out: Any, seconds: float, ends: int = 0) -> list[dict[str, Any]]:
    """What processes put into a queue, until all are done or the time is up."""
    for process in processes:
        process.start()
    found, ended, until = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < until and (
        ended < ends if ends else any(p.is_alive() for p in processes) or not out.empty()
    ):
        try:
            item = out.get(timeout=1.0)
        except Exception:
            if not any(p.is_alive() for p in processes) and out.empty():
                break
            continue
        if item is None:
            ended += 1
        else:
            found.append(item)
    for process in processes:
        if process.is_alive():
            process.terminate()
    return found


def report(options: Any) -> None:
    """The experiment's tables and plots from the runs of a GPU."""
    from fedstrata.experiments.feddro_cifar10st import EXPERIMENT as e
    from fedstrata.experiments.runner import fit_plot, fit_table
    from fedstrata.report import Run, write_report

    content = json.loads(Path(options.source).read_text())
    runs = [
        Run(r["label"], r["setting"], r["seed"], r["history"], r["ledger"], r["seconds"], r["method"])
        for r in content["runs"]
        if "error" not in r
    ]
    config = {"what": e.description, "machine": content["machine"], "timing": content["timing"]}
    page = write_report(
        options.target,
        e.title,
        runs,
        config=config,
        table=fit_table(e.table, runs),
        plots=[fit_plot(plot, runs) for plot in e.plots],
        command=content["command"],
    )
    print(page)


def main() -> None:
    """Read the arguments."""
    if len(sys.argv) == 1:
        found = (
            subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
            if _has("nvidia-smi")
            else None
        )
        words = "a GPU is here" if found and found.returncode == 0 else "it needs a GPU"
        print(f"feddro_cifar10st: {words}; see its first lines for the commands.")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("target")
    running.add_argument("--network", default="resnet20")
    running.add_argument("--seconds", type=float, default=100.0, help="of computing for the table")
    running.add_argument("--timing", type=int, default=50, help="rounds that are timed")
    running.add_argument("--timing-seconds", type=float, default=150.0, help="at most, for the timing")
    running.add_argument("--table-seconds", type=float, default=260.0, help="at most, for the table")
    running.add_argument("--workers", type=int, default=10)
    running.add_argument("--variants", type=int, default=len(VARIANTS))
    running.add_argument("--limit", type=int, default=None, help="images, for trials")
    running.set_defaults(go=run)
    reporting = commands.add_parser("report")
    reporting.add_argument("source")
    reporting.add_argument("target")
    reporting.set_defaults(go=report)
    options = parser.parse_args()
    options.go(options)


def _has(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in os.environ.get("PATH", "").split(os.pathsep))


if __name__ == "__main__":
    main()
