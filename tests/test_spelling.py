"""Misspelt names and arguments are answered with what was meant."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

import fedstrata as fs

DATA = fs.FederatedData.from_clients([{"x": np.eye(3), "y": np.array([0.0, 1.0, 2.0])}] * 2)
PROBLEM = fs.Minimization(lambda x, s: (x**2).sum())


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: fs.FedAvg(gama=0.1), TypeError, r"FedAvg has no argument 'gama'. Did you mean 'gamma'"),
        (
            lambda: fs.FedAvg(lr=0.1),
            TypeError,
            r"no argument 'lr': for the step size, give 'gamma'\. It has gamma, H, batch_size\.",
        ),
        (lambda: fs.FedMSA(learning_rate=0.1), TypeError, "for the step size, give 'alpha' or 'beta'"),
        (lambda: fs.FedDRO(eta=0.1, epochs=5), TypeError, "for the local steps, give 'I'"),
        (lambda: fs.FedRZO(lr=0.1), TypeError, "give 'gamma'"),  # its eta is a radius
        (lambda: fs.FedAvg(0.1, batchsize=2), TypeError, "Did you mean 'batch_size'"),
        (
            lambda: fs.solve(PROBLEM, fs.FedAvg(0.1), DATA, np.ones(1), rounds=1, weight="size"),
            TypeError,
            "solve has no argument 'weight'. Did you mean 'weights'",
        ),
        (
            lambda: fs.sweep(PROBLEM, fs.FedAvg(0.1), DATA, np.ones(1), rounds=1, seed=[1]),
            TypeError,
            "sweep has no argument 'seed'. Did you mean 'seeds'",
        ),
        (lambda: fs.Fedavg, AttributeError, "no attribute 'Fedavg'. Did you mean 'FedAvg'"),
        (lambda: fs.data.digit, AttributeError, "'fedstrata.data' has no attribute 'digit'. .* 'digits'"),
        (lambda: fs.models.MLP, AttributeError, "Did you mean 'mlp'"),
        (lambda: fs.track.Tensorboard, AttributeError, "Did you mean 'TensorBoard'"),
        (lambda: fs.engines.Simulate, AttributeError, "Did you mean 'Simulated'"),
        (lambda: fs.methods.FedAvgs, AttributeError, "Did you mean 'FedAvg'"),
        (lambda: fs.problems.Bilevl, AttributeError, "Did you mean 'Bilevel'"),
        (lambda: fs.sets.box, AttributeError, "Did you mean 'Box'"),
        (lambda: fs.prox.L_1, AttributeError, "Did you mean 'L1'"),
        (lambda: fs.dro.KL, AttributeError, "Did you mean 'kl'"),
        (lambda: fs.diagnostics.stationary, AttributeError, "Did you mean 'stationarity'"),
        (lambda: fs.models.losses.cross, AttributeError, "Did you mean .*'cross_entropy'"),
        (lambda: fs.fairness.__nothing__, AttributeError, r"'fedstrata.problems.fairness' .*__nothing__'\.$"),
        (lambda: fs.models.for_data("softmax", DATA), fs.DataError, r"must be integers.*y\.astype\(int\)"),
        (
            lambda: fs.solve(
                fs.Minimization(fs.models.softmax(3, 3).loss),
                fs.FedAvg(0.1),
                DATA,
                fs.models.softmax(3, 3).init(0),
                rounds=1,
            ),
            TypeError,
            r"Labels of classes must be integers: give y\.astype\(int\)",
        ),
    ],
)
def test_what_was_meant(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_names_that_are_there_are_found_as_before():
    from fedstrata.data import files  # a module of a package with a __getattr__

    assert files.from_csv is fs.data.from_csv
    assert not hasattr(fs.sets, "numpi")


def test_signatures_stay():
    assert list(inspect.signature(fs.FedAvg).parameters) == ["gamma", "H", "batch_size"]
    assert inspect.signature(fs.solve).parameters["rounds"].kind is inspect.Parameter.KEYWORD_ONLY


def test_warnings_point_at_the_caller():
    """At the line that called `solve`, before and after the run."""
    two = fs.Bilevel(lambda x, y, s: (y**2).sum(), lambda x, y, s: ((y - x) ** 2).sum())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fs.solve(PROBLEM, fs.FedAvg(50.0), DATA, np.ones(1), rounds=4, progress=False)
        fs.solve(two, fs.SOBA(0.1, 0.1), DATA, np.ones(1), y0=np.ones(1), rounds=1, progress=False)
        fs.sweep(PROBLEM, fs.FedAvg(50.0), DATA, np.ones(1), rounds=4, progress=False)
    assert {warning.filename for warning in found} == {__file__}
    assert len(found) == 3
