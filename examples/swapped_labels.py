"""One of four hospitals has swapped "ill" and "well" in its training records. Which hospital can be trusted?

Each hospital has checked a tenth of its patients. A bilevel problem learns a weight for each hospital's
records: the upper level is the loss on checked patients, the lower level the weighted training loss. It is
compared with FedAvg on all records and with FedAvg on the checked patients alone. Five folds test each of the
920 patients once. With a fifth of the patients checked (CHECKED = 0.2), FedAvg on those alone is as good or
better: the second level pays where little was checked.

    python examples/swapped_labels.py [picture.svg]
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedstrata as fs

HOSPITALS = ("Cleveland", "Hungary", "Long Beach", "Zurich")
WAYS = ("FedAvg, all records", "FedAvg, checked patients only", "bilevel, learnt weights")
FOLDS, ROUNDS, RIDGE = 5, 300, 0.03
CHECKED = 0.1  # of the patients


def scored(w, patient):
    return patient["x"] @ w[:-1] + w[-1]


def loss(w, patient):
    return optax.sigmoid_binary_cross_entropy(scored(w, patient), patient["y"])


def penalised(w, patient, weight=1.0):
    return weight * loss(w, patient) + RIDGE / 2 * jnp.vdot(w[:-1], w[:-1])


PLAIN = fs.Minimization(penalised)
TRUST = fs.Bilevel(
    upper=lambda x, w, patient: loss(w, patient),
    lower=lambda x, w, patient: penalised(w, patient, 2 * jax.nn.sigmoid(x[patient["client"]])),
)


def learnt(data):
    """The model of each way to learn."""
    arguments = {"rounds": ROUNDS, "eval_every": ROUNDS, "progress": False}
    checked = fs.FederatedData.from_clients([data.client(i, "valid") for i in range(4)])
    w0, fedavg = jnp.zeros(23), fs.FedAvg(gamma=0.3, H=5)
    fedmsa = fs.FedMSA(alpha=20.0, beta=0.3, K=5, clients=4)
    return [
        fs.solve(PLAIN, fedavg, data, w0, **arguments).x,
        fs.solve(PLAIN, fedavg, checked, w0, **arguments).x,
        fs.solve(TRUST, fedmsa, data, jnp.zeros(4), y0=w0, **arguments).y,
    ]


def right(swapped):
    """Way → for every patient, whether the model that was not trained on it is right."""
    found = []
    for k in range(FOLDS):
        data = fs.data.heart(valid_fraction=CHECKED, fold=(k, FOLDS), seed=0).with_client_index()
        y = jnp.where(data.train["client"] == swapped, 1 - data.train["y"], data.train["y"])
        models = learnt(replace(data, train=data.train | {"y": np.asarray(y)}))
        found.append([(jax.vmap(scored, (None, 0))(w, data.test) > 0) == data.test["y"] for w in models])
    return np.concatenate(found, axis=1)


def interval(ours, theirs):
    """By how much one is right more often than the other, and 95 % around it (Agresti and Min, paired)."""
    won, lost, n = (ours & ~theirs).sum() + 0.5, (theirs & ~ours).sum() + 0.5, ours.size + 2
    half = 1.96 * np.sqrt(won + lost - (won - lost) ** 2 / n) / n
    return (won - lost) / n - half, (won - lost) / n + half


def draw(rows, file):
    """Accuracies with their 95 % intervals."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    from fedstrata.lab.report.plots import STYLE, to_svg

    mpl.rcParams.update(STYLE)
    figure, axes = plt.subplots(figsize=(7.0, 3.2), layout="constrained")
    for k, (way, colour) in enumerate(zip(WAYS, ("#d55e00", "#8c959f", "#0072b2"), strict=True)):
        mean = np.asarray([found[k].mean() for found in rows.values()])
        half = 1.96 * np.sqrt(mean * (1 - mean) / 920)
        height = np.arange(len(rows)) + 0.18 * (k - 1)
        axes.errorbar(100 * mean, height, xerr=100 * half, fmt="o", color=colour, label=way)
    axes.set_yticks(range(len(rows)), [f"swapped: {name}" for name in rows])
    axes.invert_yaxis()
    axes.set_xlabel("% right on held-out patients, with 95 % intervals")
    figure.legend(loc="outside upper center", ncols=3)
    Path(file).write_bytes(to_svg(figure))


if __name__ == "__main__":
    rows = {}
    print(f"{'swapped':12}{'FedAvg':>8}{'checked':>9}{'bilevel':>9}   bilevel − FedAvg    bilevel − checked")
    for i, name in enumerate(("nobody", *HOSPITALS), start=-1):
        rows[name] = found = right(i)
        gains = [interval(found[2], found[k]) for k in (0, 1)]
        shown = "".join(f"   {100 * low:+5.1f} to {100 * high:+5.1f}" for low, high in gains)
        print(f"{name:12}" + "".join(f"{one.mean():>8.1%} " for one in found) + shown, flush=True)
    if sys.argv[1:]:
        draw(rows, sys.argv[1])
