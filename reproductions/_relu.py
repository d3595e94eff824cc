"""Networks of one layer of ReLUs for even against odd classes: section 6.1 of the FedRZO paper.

The page `fedrzo-relu` says what the paper leaves open; a client's sum over samples is their mean here.
"""

from typing import Any

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.lab import Setting, Task
from fedstrata.lab.experiments.data import federated
from fedstrata.models import Model, relu_network
from fedstrata.models.model import squares

PROBLEM = (
    "min over (Z, w) of 1/m Σ_i mean over client i's samples of ½(v − Σ_q w_q σ(Z_q·u))² + λ/2 (‖Z‖² + ‖w‖²) "
    "with σ = max(0, ·)"
)


def network(s: Setting, beta: float | None = None) -> tuple[fs.FederatedData, Model]:
    """The clients' data, split by the seed, and the network for it."""
    data = federated(s.data, s.clients, seed=s.seed)
    return data, relu_network(data.train["x"].shape[-1], s.neurons, s.lam, beta)


def sum_of_squares(x: PyTree, y: PyTree) -> Any:
    return squares(x)


def build(s: Setting) -> Task:
    data, model = network(s)

    def derive(result: fs.Result) -> dict[str, Any]:
        fit = result.history["loss"] - s.lam / 2 * result.history["squares"]
        return {"local_steps": s.H * result.history["round"], "fit": fit}

    return Task(
        fs.Minimization(model.loss), fs.FedRZO(gamma=s.gamma, eta=s.eta, H=s.H, batch_size=s.batch_size),
        data, model.init(s.seed), rounds=s.rounds, eval_every=max(1, s.rounds // s.evaluations),
        metrics={**model.metrics, "squares": sum_of_squares}, derive=derive,
    )  # fmt: skip
