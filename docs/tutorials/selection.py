# %% [markdown]
# # Which of many equally good models?
#
# $$\min_x \; f(x) \qquad \text{over} \quad x \in \arg\min h$$
#
# A *selection*, `fs.Selection`: the primary loss h has many minimisers, and the secondary function f
# selects one. This is common. A coded column with four kinds of chest pain becomes four columns that add
# up to one, so a linear model has directions along which predictions do not change. The heart data has
# four such columns.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs

data = fs.data.heart(seed=0)
features = np.column_stack(
    [np.asarray(data.train["x"], float), np.ones(len(data.train["y"]))]
)
target = 2.0 * np.asarray(data.train["y"]) - 1
print(f"{features.shape[1]} weights, rank {np.linalg.matrix_rank(features, tol=1e-3)}")


def residual(w, patient):
    return 0.5 * (patient["x"] @ w[:-1] + w[-1] - (2.0 * patient["y"] - 1)) ** 2


def length(w):
    return 0.5 * w @ w


problem = fs.Selection(
    primary=residual, secondary=length
)  # of the least-squares solutions the shortest

# %% [markdown]
# ## The known answer
#
# The pseudo-inverse gives the least-squares solution of least norm. It differs from ridge regression, which
# trades some of the fit for a smaller norm; a selection does not.

# %%
answer = np.linalg.lstsq(features, target, rcond=1e-4)[0]


def distance(w, _):
    return jnp.linalg.norm(w - jnp.asarray(answer, jnp.float32)) / np.linalg.norm(
        answer
    )


# %% [markdown]
# Gradient descent from zero finds the least-norm solution anyway. We start elsewhere, as from a
# model that was trained before. `fs.plan` chooses the rule by which η falls. (h is divided by its curvature,
# which is estimated before the first round; otherwise the rule's step sizes would be too large.)

# %%
rng = np.random.default_rng(0)
x0 = jnp.asarray(rng.normal(size=23), jnp.float32)
plan = fs.plan(problem, data, x0, method="StRFedAvg", weights="size")
print(plan.method)

methods = {
    "StRFedAvg, as planned": (problem, plan.method),
    "FedAvg on h alone": (fs.Minimization(residual), fs.FedAvg(gamma=0.15)),
    "FedAvg on h + 0.1 f": (
        fs.Minimization(lambda w, s: residual(w, s) + 0.1 * length(w)),
        fs.FedAvg(gamma=0.15),
    ),
}
results = {
    name: fs.solve(
        p,
        method,
        data,
        x0,
        rounds=plan.rounds,
        eval_every=10,
        weights="size",
        metrics={"distance": distance},
    )
    for name, (p, method) in methods.items()
}


def fit(w):
    return 0.5 * np.mean((features @ np.asarray(w, float) - target) ** 2)


best = fit(answer)
for name, result in results.items():
    excess, size = fit(result.x) - best, np.linalg.norm(result.x)
    print(
        f"{name:22} distance {result.history['distance'][-1]:.1e}   h − h* {excess:.0e}   length {size:.2f}"
    )
print(f"{'pseudo-inverse':22} {'':32} length {np.linalg.norm(answer):.2f}")
assert results["StRFedAvg, as planned"].history["distance"][-1] < 0.02

# %% [markdown]
# The certificate finds such a solution by itself, in float64, without the pseudo-inverse. The samples are
# float32, so that collinear columns are collinear but for their rounding: directions along which h bends by
# less than the square of that count as flat.

# %%
selected = results["StRFedAvg, as planned"]
print(selected.certificate)

# %%
figure, axes = plt.subplots()
for name, result in results.items():
    axes.semilogy(result.history["round"], result.history["distance"], label=name)
axes.set(
    title="Distance to the shortest least-squares solution, relative to its size",
    xlabel="round",
)
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **h has one minimiser**: then f has no effect. Check the rank first, as above.
# - **You would give up a little of h for f**: then minimise h + ηf and say how much, with
#   `fs.Minimization`.
# - **h is ill-conditioned**: "equally good" then depends on the precision, and every method of this class
#   is slow. Rescale first (`fs.data.standardize`).
# - **h is not convex**: its minimisers need not form a convex set, and the theory does not apply.
