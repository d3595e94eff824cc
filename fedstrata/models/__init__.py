"""Small models: initial parameters, scores, a loss of one sample, predictions.

    model = fs.models.for_data("mlp", data)              # or fs.models.mlp(64, 10)
    problem = fs.Minimization(model.loss)
    result = fs.solve(problem, fs.FedAvg(0.1), data, model.init(0), rounds=100)
    model.predict(result.x, inputs), model.score(result.x, data.test)

A sample is ``{"x": input, "y": label}``. Every constructor returns the same object for the same arguments,
so that compiled programs are reused. `MODELS` and `LOSSES` list them by name.
"""

from typing import TYPE_CHECKING

from fedstrata.models import losses, survival
from fedstrata.models.images import cnn, resnet, resnet20
from fedstrata.models.losses import LOSSES, Loss
from fedstrata.models.model import Metric, Model
from fedstrata.models.networks import mlp, relu_network
from fedstrata.models.registry import MODELS, for_data, options
from fedstrata.models.regression import linear, logistic, softmax
from fedstrata.models.survival import hazard
from fedstrata.support.words import misspelt

__all__ = [
    "LOSSES",
    "MODELS",
    "Loss",
    "Metric",
    "Model",
    "cnn",
    "for_data",
    "hazard",
    "linear",
    "logistic",
    "losses",
    "mlp",
    "options",
    "relu_network",
    "resnet",
    "resnet20",
    "softmax",
    "survival",
]

if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
