# %% [markdown]
# # One model for four hospitals
#
# $$\min_x \; \sum_{i=1}^m w_i \, \mathbb{E}_{\xi \sim D_i} f_i(x, \xi)$$
#
# The simplest problem, `fs.Minimization`: one level, one variable, the mean loss of all clients. The
# clients are heterogeneous: Cleveland, Budapest, Long Beach and Zurich have different patients, of whom
# between 36 % and 93 % are ill.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from scipy.optimize import minimize

import fedstrata as fs

data = fs.data.heart(seed=0)
for i, name in enumerate(data.names):
    print(
        f"{name:12} {data.sizes[i]:4d} patients for training, {data.client(i)['y'].mean():.0%} ill"
    )

# %% [markdown]
# The loss sees **one patient**. A little ridge makes the answer unique (coded columns add up to a constant,
# so without it there are many).


# %%
def loss(w, patient):
    logit = patient["x"] @ w[:-1] + w[-1]
    return optax.sigmoid_binary_cross_entropy(logit, patient["y"]) + 0.05 * w @ w


problem = fs.Minimization(loss)
print(fs.applicable(problem))

# %% [markdown]
# ## The answer, to compare with
#
# In this tutorial we may pool the data and use SciPy. With `weights="size"` the federated objective is the
# same: every patient has equal weight.

# %%
features = np.column_stack(
    [np.asarray(data.train["x"], float), np.ones(len(data.train["y"]))]
)
signs = 2 * np.asarray(data.train["y"], float) - 1


def pooled(w):
    margins = signs * (features @ w)
    gradient = features.T @ (-signs / (1 + np.exp(margins))) / len(signs) + 0.1 * w
    return np.logaddexp(0, -margins).mean() + 0.05 * w @ w, gradient


answer = minimize(pooled, np.zeros(23), jac=True, tol=1e-12).x

# %% [markdown]
# ## Plan, solve, certify
#
# `fs.plan` measures the problem's constants and chooses a method and its step size; the certificate measures
# how far the result is from a solution, without knowing the answer above.

# %%
x0 = jnp.zeros(23)
plan = fs.plan(problem, data, x0, weights="size")
result = fs.solve(
    problem, plan.method, data, x0, rounds=plan.rounds, weights="size", seed=0
)
away = np.linalg.norm(result.x - answer) / np.linalg.norm(answer)
print(f"{plan.method}, {plan.rounds} rounds: {result.certificate.verdict}")
print(f"distance from SciPy's answer {away:.1e}")
assert away < 0.01

# %% [markdown]
# ## Local steps drift, control variates do not
#
# Ten local steps between two averages save exchanges. `fs.FedAvg` then converges to another point, because
# each hospital moves towards its own optimum; `fs.SCAFFOLD` and `fs.Scaffnew` correct for the difference
# between a hospital's gradient and the mean.


# %%
def distance(w, _):
    return jnp.linalg.norm(w - jnp.asarray(answer, jnp.float32)) / jnp.linalg.norm(
        jnp.asarray(answer, jnp.float32)
    )


methods = {
    "FedAvg, one local step": fs.FedAvg(gamma=0.5, H=1),
    "FedAvg, ten": fs.FedAvg(gamma=0.5, H=10),
    "SCAFFOLD, ten": fs.SCAFFOLD(eta_l=0.5, K=10),
}
results = {
    name: fs.solve(
        problem,
        method,
        data,
        jnp.zeros(23),
        rounds=60,
        weights="size",
        metrics={"distance": distance},
        seed=0,
    )
    for name, method in methods.items()
}
for name, result in results.items():
    print(
        f"{name:24} distance {result.history['distance'][-1]:.1e}   {result.ledger.bytes_up / 1e3:.0f} kB up"
    )
assert results["SCAFFOLD, ten"].history["distance"][-1] < 1e-4
assert results["FedAvg, ten"].history["distance"][-1] > 1e-2

# %%
figure, axes = plt.subplots()
for name, result in results.items():
    axes.semilogy(result.history["round"], result.history["distance"], label=name)
axes.set(title="Distance to the pooled optimum, relative to its size", xlabel="round")
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **The mean is not the goal.** If one hospital must not pay for the others, see [robust and fair
#   learning](robust.md); if each should have its own model, see [personalised models](personalised.md).
# - **A number in the loss is itself to be learned** (a regularisation, a weight): then it is
#   [bilevel](bilevel.md), and minimising over both at once would choose no regularisation at all.
# - **The loss has no gradient**: `fs.FedRZO` and `fs.FedZO` need only values, but many more rounds.
