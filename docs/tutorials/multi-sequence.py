# %% [markdown]
# # Standardise and fit, all at once
#
# $$\text{find } x, z^1, \dots, z^N: \qquad \sum_m P^m(x, Z) = 0, \qquad
# \sum_m S^{m,n}(z^{n-1}, z^n) = 0, \qquad z^0 = x$$
#
# `fs.MultiSequence` is the general form of bilevel, minimax and compositional problems: unknowns that
# depend on each other. Usually they are computed one after another. A small example is the standard
# preparation of a regression: the features' means, then their deviations around these means, then the ridge
# regression on standardised features. Three federated computations become one, which updates everything
# simultaneously:
#
# $$S^1 = z^1 - \xi, \qquad S^2 = z^2 - (\xi - z^1)^2, \qquad
# P = \tilde\xi\, (\tilde\xi^\top w + w_0 - t) + \lambda w, \quad \tilde\xi = \frac{\xi - z^1}{\sqrt{z^2}}$$

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

import fedstrata as fs

table, progression = load_diabetes(return_X_y=True, scaled=False)
table = np.float32(
    table / np.array([10, 1, 5, 10, 50, 50, 10, 1, 1, 10])
)  # years to decades and the like
target = np.float32((progression - progression.mean()) / progression.std())
clinics = np.array_split(
    np.argsort(table[:, 0]), 6
)  # six age groups: the clients' means differ
data = fs.FederatedData.from_clients(
    [{"x": table[rows], "t": target[rows]} for rows in clinics]
)
LAM = 0.1


# %%
def P(x, Z, patient):
    mean, variance = Z
    features = (patient["x"] - mean) / jnp.sqrt(jnp.maximum(variance, 1e-2))
    error = features @ x["w"] + x["b"] - patient["t"]
    return {"w": features * error + LAM * x["w"], "b": error}


problem = fs.MultiSequence(
    P,
    [
        lambda x, mean, patient: mean - patient["x"],
        lambda mean, variance, patient: variance - (patient["x"] - mean) ** 2,
    ],
)

# %% [markdown]
# ## Solve it, and the known answer
#
# scikit-learn does the same on the pooled table, in two steps. (The step sizes below were found by hand: the
# rule of `fs.plan` for this class is careful, and asks for far more rounds.)

# %%
x0 = {"w": jnp.zeros(10), "b": jnp.array(0.0)}
start = (jnp.zeros(10), jnp.ones(10))
scaler = StandardScaler().fit(table)
ridge = Ridge(alpha=LAM * len(table)).fit(scaler.transform(table), target)


def error(x, Z):
    return jnp.linalg.norm(
        x["w"] - jnp.asarray(ridge.coef_, jnp.float32)
    ) / np.linalg.norm(ridge.coef_)


def error_of_means(x, Z):
    return jnp.linalg.norm(Z[0] - scaler.mean_.astype("float32")) / np.linalg.norm(
        scaler.mean_
    )


def error_of_deviations(x, Z):
    return jnp.linalg.norm(Z[1] - scaler.var_.astype("float32")) / np.linalg.norm(
        scaler.var_
    )


metrics = {"weights": error, "means": error_of_means, "variances": error_of_deviations}
method = fs.FedMSA(alpha=0.1, beta=0.3, K=5, clients=6)
result = fs.solve(
    problem,
    method,
    data,
    x0,
    y0=start,
    rounds=150,
    weights="size",
    metrics=metrics,
    seed=0,
)
for name in metrics:
    print(f"{name:10} relative error {result.history[name][-1]:.1e}")
print(f"{result.ledger.exchanges} exchanges")
print(f"certificate: {result.certificate.verdict}")
assert all(result.history[name][-1] < 1e-3 for name in metrics)

# %%
figure, axes = plt.subplots()
for name in metrics:
    axes.semilogy(
        result.history["round"], np.maximum(result.history[name], 1e-7), label=name
    )
axes.set(
    title="Relative error against scikit-learn on the pooled table", xlabel="round"
)
axes.legend()

# %% [markdown]
# The variances track the means, and the weights track both, without waiting.
#
# ## When not to use this
#
# - **A specific class fits**: `fs.Bilevel`, `fs.Minimax`, `fs.Composition` write P and S for you, and other
#   methods can be compared. `fs.as_multisequence(problem)` shows what they write.
# - **Means alone**: `fs.data.standardize` is exact in one exchange, since sums are enough. This page shows
#   the form, on something that can be checked.
# - **S is not strongly monotone in its own z**: then z does not converge at any step size.
# - **z^n needs more than z^{n−1}**: add what it needs to z^{n−1}.
