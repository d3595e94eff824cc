"""PyTorch without a framework: one client after the other, or all side by side with `torch.func.vmap`.

Samples, parameters and draws are on the GPU where PyTorch sees one; what is returned is on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from ..timing import Run
from . import Case


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def samples(case: Case) -> tuple[Any, Any]:
    """All clients' samples, where they are computed with."""
    return torch.tensor(case.x, device=device()), torch.tensor(case.y, dtype=torch.long, device=device())


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
        rows = torch.randint(0, case.samples, (case.batch,), generator=generator, device=x.device)
        optimizer.zero_grad()
        cross_entropy(x[rows] @ w + b, y[rows]).backward()
        optimizer.step()
    return w.detach(), b.detach()


def loop(case: Case) -> Run:
    x, y = samples(case)

    @one_thread()
    def run() -> Any:
        generator = torch.Generator(x.device).manual_seed(case.seed)
        w, b = (torch.tensor(p, device=x.device) for p in case.start().values())
        for _ in range(case.rounds):
            order = torch.randperm(case.clients, generator=generator, device=x.device)
            chosen = order[: case.participants].tolist()
            ends = [local_steps(case, x[i], y[i], w, b, generator) for i in chosen]
            w, b = (torch.stack(parts).mean(0) for parts in zip(*ends, strict=True))
        return {"w": w.cpu(), "b": b.cpu()}

    return run


def vmapped(case: Case) -> Run:
    x, y = samples(case)
    gradients = vmap(grad(lambda params, xs, ys: cross_entropy(xs @ params["w"] + params["b"], ys)))

    def run() -> Any:
        generator = torch.Generator(x.device).manual_seed(case.seed)
        params = {name: torch.tensor(p, device=x.device) for name, p in case.start().items()}
        for _ in range(case.rounds):
            order = torch.randperm(case.clients, generator=generator, device=x.device)
            chosen = order[: case.participants, None]
            ends = {name: p.expand(case.participants, *p.shape) for name, p in params.items()}
            for _ in range(case.steps):
                draws = (case.participants, case.batch)
                rows = torch.randint(0, case.samples, draws, generator=generator, device=x.device)
                gradient = gradients(ends, x[chosen, rows], y[chosen, rows])
                ends = {name: p - case.gamma * gradient[name] for name, p in ends.items()}
            params = {name: p.mean(0) for name, p in ends.items()}
        return {name: p.cpu() for name, p in params.items()}

    return run
