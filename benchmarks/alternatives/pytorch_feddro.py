"""FedDRO and FedAvg on CIFAR10-ST in plain PyTorch: ResNet20, the clients' models in turn."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np


class Setting(NamedTuple):
    """What is timed: rounds of I local steps."""

    clients: int = 8
    I: int = 4
    batch: int = 16
    beta: float = 0.2
    lam: float = 1.0
    seed: int = 0


def timed(setting: Setting, arrays: Any, turns: Any, out: Any) -> None:
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

    order = np.random.default_rng(setting.seed).permutation(len(arrays["y_train"]))
    size = len(order) // setting.clients
    rows = torch.tensor(
        np.stack([order[k * size : (k + 1) * size] for k in range(setting.clients)]), device=device
    )
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

    models, befores, server = ([resnet20() for _ in range(setting.clients)] for _ in range(3))
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
        return rows[k, torch.randint(size, (setting.batch,), device=device)]

    embedding = torch.tensor(2.0, device=device)  # log ȳ

    def fedavg_round(call: list[Any]) -> None:
        assign(models, average)
        for k, model in enumerate(models):
            for _ in range(setting.I):
                descend(model, losses(call[k], draw(k)).mean())
        average_of(models)

    def feddro_round(call: list[Any]) -> None:
        assign(models, average)
        for _ in range(setting.I):
            places = [draw(k) for k in range(setting.clients)]
            with torch.no_grad():
                now = torch.stack(
                    [
                        torch.logsumexp(losses(call[k], places[k]) / setting.lam, 0)
                        for k in range(setting.clients)
                    ]
                )
                old = torch.stack(
                    [
                        torch.logsumexp(losses(befores[k], places[k]) / setting.lam, 0)
                        for k in range(setting.clients)
                    ]
                )
                a, b = (torch.logsumexp(v, 0) - np.log(setting.clients * setting.batch) for v in (old, now))
                ratio = 1 + (1 - setting.beta) * (torch.exp(embedding - b) - torch.exp(a - b))
                embedding.copy_(b + torch.log(torch.clamp(ratio, min=setting.beta)))
            for k, model in enumerate(models):
                assign([befores[k]], model)
                value = losses(call[k], places[k])
                descend(model, setting.lam * torch.exp(value / setting.lam - embedding).mean())
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
                        "images per second": setting.clients * setting.I * setting.batch / best,
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
