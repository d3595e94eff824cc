# %% [markdown]
# # A function of means is not a mean of functions
#
# $$\min_x \; h(x) + f(g(x)), \qquad g(x) = \frac1m \sum_{i=1}^m \mathbb{E} \, g_i(x, \xi)$$
#
# A *composition*, `fs.Composition`. A client alone has no unbiased gradient of f(g(x)), because f is applied
# after the mean over **all** clients. An example: predict the progression of diabetes such that errors are
# small *and* alike. That is the mean of the loss plus its standard deviation,
#
# $$\min_w \; \mathbb{E}\,\ell + \sqrt{\mathbb{E}\,\ell^2 - (\mathbb{E}\,\ell)^2}$$
#
# with g = (E ℓ, E ℓ²) and f(u) = u₁ + √(u₂ − u₁²). The 442 patients come with scikit-learn; the clients are
# six clinics, from the one with the mildest cases to the one with the most severe.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes

import fedstrata as fs

table, progression = load_diabetes(return_X_y=True)
x = np.float32(table / table.std(0))
t = np.float32((progression - progression.mean()) / progression.std())
clinics = np.array_split(np.argsort(progression), 6)
data = fs.FederatedData.from_clients([{"x": x[rows], "t": t[rows]} for rows in clinics])


def moments(w, patient):
    loss = 0.5 * (patient["x"] @ w[:-1] + w[-1] - patient["t"]) ** 2 + 0.01 * w @ w
    return jnp.stack([loss, loss**2])


def mean_plus_deviation(u):
    return u[0] + jnp.sqrt(
        jnp.maximum(u[1] - u[0] ** 2, 0.01)
    )  # on the way u need not be anyone's moments


problem = fs.Composition(
    [moments, mean_plus_deviation]
)  # from the innermost to the outermost

# %% [markdown]
# ## The known answer, a plan, and four ways by hand
#
# `fs.plan` measures the problem, and chooses a method and its step size; the certificate judges the result.
# The others show what local steps do.
#
# `fs.CompositionalFedAvg` is FedAvg on each client's own composition: the obvious method, which is biased
# for heterogeneous clients. `fs.FedDRO` exchanges the two numbers g in every step; its x still drifts if it
# takes several steps between averages. `fs.FedMSA` tracks g and its adjoint as sequences, corrects the local
# steps, and does not drift.


# %%
def exact(w):
    losses = 0.5 * (x @ w[:-1] + w[-1] - t) ** 2 + 0.01 * w @ w
    return losses.mean() + np.sqrt(losses.var())


answer = minimize(exact, np.zeros(11), tol=1e-9).x


def excess(w, _, data):
    losses = (
        0.5 * (data.train["x"] @ w[:-1] + w[-1] - data.train["t"]) ** 2 + 0.01 * w @ w
    )
    return losses.mean() + jnp.sqrt(losses.var()) - exact(answer)


x0 = jnp.zeros(11)
plan = fs.plan(problem, data, x0, weights="size")
planned = fs.solve(
    problem, plan.method, data, x0, rounds=plan.rounds, weights="size", seed=0
)
print(f"{plan.method}, {plan.rounds} rounds: {planned.certificate.verdict}")
print(f"above the least {exact(np.asarray(planned.x)) - exact(answer):.1e}")

methods = {
    "CompositionalFedAvg, 5 steps": fs.CompositionalFedAvg(eta=0.05, I=5),
    "FedDRO, 5 steps": fs.FedDRO(eta=0.05, beta=1.0, I=5),
    "FedDRO, 1 step": fs.FedDRO(eta=0.1, beta=1.0, I=1),
    "FedMSA, 5 steps": fs.FedMSA(alpha=0.02, beta=0.3, K=5, clients=6),
}
results = {
    name: fs.solve(
        problem,
        method,
        data,
        x0,
        rounds=400,
        weights="size",
        metrics={"excess": excess},
        seed=0,
    )
    for name, method in methods.items()
}
for name, result in results.items():
    print(
        f"{name:30} above the least {result.history['excess'][-1]:.1e}, {result.ledger.exchanges} exchanges"
    )
print(f"the least value {exact(answer):.4f}")
assert results["FedMSA, 5 steps"].history["excess"][-1] < 1e-3
assert results["CompositionalFedAvg, 5 steps"].history["excess"][-1] > 1e-2

# %%
figure, axes = plt.subplots()
for name, result in results.items():
    axes.semilogy(
        result.history["round"], np.maximum(result.history["excess"], 1e-7), label=name
    )
axes.set(title="Mean plus deviation, above its least value", xlabel="round")
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **f is linear**: then it is a mean, and [minimisation](minimisation.md) is simpler and cheaper.
# - **A known robust objective** (KL, χ², CVaR, groups): [robust and fair learning](robust.md) has them ready,
#   in numerically stable forms.
# - **g is large.** FedDRO and FedMSA upload g in every step or round, which suits a few numbers, not
#   a matrix.
# - **Small minibatches with a curved f**: the bias of f(g_B) is of the order of 1/B unless g is followed over
#   time (`beta` below 1).
