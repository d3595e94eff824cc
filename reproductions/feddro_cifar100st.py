"""FedDRO on CIFAR100-ST: a hundred classes, of which fifty keep 100 of their 500 training images.

The right halves of Figures 1, 2 and 4 of the paper. What it leaves open is settled as in `feddro-cifar10st`.
"""

from fedstrata.lab import Experiment
from reproductions import feddro_cifar10st as ten

EXPERIMENT = Experiment(
    name="feddro-cifar100st",
    title="FedDRO on CIFAR100-ST: fifty rare classes, ResNet20",
    paper="Federated compositional optimization (FedDRO), section 6, Figures 1, 2 and 4",
    description=(
        "ResNet20 on CIFAR-100 with 100 training images of each of the classes 0 to 49: FedDRO and DS-FedDRO "
        "against FastDRO, PDSGD, MBSGD and the average loss, and with more local steps I."
    ),
    problem=ten.EXPERIMENT.problem,
    parameters={**ten.EXPERIMENT.parameters, "data": "cifar100"},
    grid=ten.EXPERIMENT.grid,
    build=ten.build,
    seeds=3,
    table=ten.EXPERIMENT.table,
    plots=ten.EXPERIMENT.plots,
    needs=("cifar100",),
    fallback={"data": "digits"},
    quick=ten.EXPERIMENT.quick,
    quick_seconds=10,
    full_time="about as long as feddro-cifar10st, half an hour on an H200 that ten processes share",
)  # fmt: skip
