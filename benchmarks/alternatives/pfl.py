"""pfl: `FederatedAveraging` with the simulated backend in one process; what is timed has no evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch.nn.functional import cross_entropy

from ..timing import Run
from . import Case
from .pytorch import one_thread, samples


class Softmax(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.w, self.b = (torch.nn.Parameter(torch.tensor(p)) for p in case.start().values())

    def loss(self, x: Any, y: Any) -> Any:
        return cross_entropy(x @ self.w + self.b, y)

    def metrics(self, x: Any, y: Any) -> Any:
        return {"loss": Weighted.from_unweighted(self.loss(x, y).item())}


class WithReplacement(Dataset):
    """A client's samples, in ``steps`` batches drawn with replacement."""

    def __init__(self, x: Any, y: Any, steps: int, generator: Any) -> None:
        super().__init__((x, y))
        self.steps, self.generator = steps, generator

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        if batch_size is None:
            raise ValueError("A batch size is needed.")
        x, y = self.raw_data
        for _ in range(self.steps):
            rows = torch.randint(0, len(x), (batch_size,), generator=self.generator, device=x.device)
            yield x[rows], y[rows]


def simulated(case: Case) -> Run:
    x, y = samples(case)  # pfl has its model on a GPU where there is one
    rng, generator = np.random.default_rng(case.seed), torch.Generator(x.device).manual_seed(case.seed)
    clients = [WithReplacement(xs, ys, case.steps, generator) for xs, ys in zip(x, y, strict=True)]

    def users() -> Iterator[int]:
        while True:
            yield from rng.choice(case.clients, case.participants, replace=False)

    data = FederatedDataset(lambda user: clients[user], users().__next__)
    backend = SimulatedBackend(training_data=data, val_data=data)
    module = Softmax(case)
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    training = NNTrainHyperParams(
        local_num_epochs=None,
        local_num_steps=case.steps,
        local_learning_rate=case.gamma,
        local_batch_size=case.batch,
    )
    algorithm = FederatedAveraging()
    start = MappedVectorStatistics(
        {name: torch.tensor(p, device=x.device) for name, p in case.start().items()}
    )
    done = 0

    @one_thread()
    def run() -> Any:
        # The algorithm counts on from run to run: only its very first round, which warms up, is evaluated.
        nonlocal done
        done += case.rounds
        model.set_parameters(start)
        params = NNAlgorithmParams(
            central_num_iterations=done,
            evaluation_frequency=10**9,
            train_cohort_size=case.participants,
            val_cohort_size=None,
        )
        algorithm.run(params, backend, model, training, training, send_metrics_to_platform=False)
        return {name: p.detach().cpu().clone() for name, p in model.variable_map.items()}

    return run
