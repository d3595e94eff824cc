"""PyTorch without a framework: one client after the other, or all side by side with `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from ..timing import Run
from . import Case


@contextmanager
def one_thread() -> Iterator[None]:
    """Arrays of one client are too small to be shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def local_steps(case: Case, x: Any, y: Any, w: Any, b: Any, generator: Any) -> tuple[Any, Any]:
    """A client's steps on its ``x`` and ``y``."""
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    optimizer = torch.optim.SGD([w, b], lr=case.gamma)
    for _ in range(case.steps):
        rows = torch.randint(0, case.samples, (case.batch,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(x[rows] @ w + b, y[rows]).backward()
        optimizer.step()
    return w.detach(), b.detach()


def loop(case: Case) -> Run:
    x, y = torch.tensor(case.x), torch.tensor(case.y, dtype=torch.long)

    @one_thread()
    def run() -> Any:
        generator = torch.Generator().manual_seed(case.seed)
        w, b = (torch.tensor(p) for p in case.start().values())
        for _ in range(case.rounds):
            chosen = torch.randperm(case.clients, generator=generator)[: case.participants]
            ends = [local_steps(case, x[i], y[i], w, b, generator) for i in chosen]
            w, b = (torch.stack(parts).mean(0) for parts in zip(*ends, strict=True))
        return {"w": w, "b": b}

    return run


def vmapped(case: Case) -> Run:
    x, y = torch.tensor(case.x), torch.tensor(case.y, dtype=torch.long)
    gradients = vmap(grad(lambda params, xs, ys: cross_entropy(xs @ params["w"] + params["b"], ys)))

    def run() -> Any:
        generator = torch.Generator().manual_seed(case.seed)
        params = {name: torch.tensor(p) for name, p in case.start().items()}
        for _ in range(case.rounds):
            chosen = torch.randperm(case.clients, generator=generator)[: case.participants, None]
            ends = {name: p.expand(case.participants, *p.shape) for name, p in params.items()}
            for _ in range(case.steps):
                rows = torch.randint(0, case.samples, (case.participants, case.batch), generator=generator)
                gradient = gradients(ends, x[chosen, rows], y[chosen, rows])
                ends = {name: p - case.gamma * gradient[name] for name, p in ends.items()}
            params = {name: p.mean(0) for name, p in ends.items()}
        return params

    return run
