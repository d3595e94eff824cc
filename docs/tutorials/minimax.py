# %% [markdown]
# # The area under the ROC curve, as a game
#
# $$\min_x \; \max_{y} \; f(x, y)$$
#
# A *minimax* problem, `fs.Minimax`. AUC is the chance that an ill patient scores above a healthy one: a
# mean over **pairs**, and the two of a pair may lie in different hospitals. With the square loss it can be
# written without pairs (Ying, Wen, Lyu 2016): with p the part that is ill, a and b the mean scores of both
# groups, and one more player y,
#
# $$\min_{w, a, b} \max_y \; \mathbb{E}\,[(1-p)(s - a)^2 1_{+} + p\,(s - b)^2 1_{-}
# + 2(1 + y)(p\, s\, 1_{-} - (1-p)\, s\, 1_{+})] - p(1-p)\, y^2$$
#
# where $s = w^\top \xi$ is the score of patient ξ, and $1_{+}$, $1_{-}$ say whether he or she is ill.
# Every term sees one patient, so that it can be federated.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedstrata as fs

data = fs.data.heart(seed=0)
ill = np.asarray(data.train["y"]) == 1
p = float(ill.mean())
RIDGE = 0.02


def payoff(x, y, patient):
    w, a, b = x["w"], x["a"], x["b"]
    score, positive = patient["x"] @ w, patient["y"]
    return (
        (1 - p) * (score - a) ** 2 * positive
        + p * (score - b) ** 2 * (1 - positive)
        + 2 * (1 + y) * (p * score * (1 - positive) - (1 - p) * score * positive)
        - p * (1 - p) * y**2
        + RIDGE * w @ w
    )


problem = fs.Minimax(payoff)
print(*fs.applicable(problem).names)

# %% [markdown]
# ## The known answer
#
# The game's value is p(1 − p) times the pairwise square loss, whose minimum is a linear system. `fs.solve`
# never sees a pair; SciPy's answer is made of all of them.

# %%
features = np.asarray(data.train["x"], float)
pairs = (features[ill][:, None, :] - features[~ill][None, :, :]).reshape(-1, 22)
gram = p * (1 - p) * pairs.T @ pairs / len(pairs) + RIDGE * np.eye(22)
answer = np.linalg.solve(gram, p * (1 - p) * pairs.mean(0))


# %% [markdown]
# ## Plan, solve, certify
#
# `fs.plan` measures the game's constants and chooses a method and its step sizes; the certificate computes
# the duality gap with oracles of its own.

# %%
x0 = {"w": jnp.zeros(22), "a": jnp.array(0.0), "b": jnp.array(0.0)}
y0 = jnp.array(0.0)
plan = fs.plan(problem, data, x0, y0, weights="size")
planned = fs.solve(
    problem, plan.method, data, x0, y0=y0, rounds=plan.rounds, weights="size"
)
away = np.linalg.norm(planned.x["w"] - answer) / np.linalg.norm(answer)
print(f"{plan.method}, {plan.rounds} rounds: {planned.certificate.verdict}")
print(f"distance from the answer {away:.1e}")

# %% [markdown]
# ## Local steps
#
# Ten local steps save exchanges only with a correction for the differences between clients.


# %%
def distance(x, y):
    return jnp.linalg.norm(x["w"] - jnp.asarray(answer, jnp.float32)) / np.linalg.norm(
        answer
    )


methods = {
    "LocalSGDA, one step": fs.LocalSGDA(eta_x=0.1, eta_y=1.0, tau=1),
    "LocalSGDA, ten": fs.LocalSGDA(eta_x=0.1, eta_y=1.0, tau=10),
    "FedMSA, ten": fs.FedMSA(alpha=0.1, beta=1.0, K=10, clients=4),
}
results = {
    name: fs.solve(
        problem,
        method,
        data,
        x0,
        y0=y0,
        rounds=300,
        weights="size",
        metrics={"distance": distance},
    )
    for name, method in methods.items()
}
for name, result in results.items():
    print(
        f"{name:20} distance {result.history['distance'][-1]:.1e}, {result.ledger.exchanges} exchanges"
    )
assert results["FedMSA, ten"].history["distance"][-1] < 1e-2

# %% [markdown]
# ## What it is good for


# %%
def auc(w):
    scores, truth = (
        np.asarray(data.test["x"]) @ np.asarray(w),
        np.asarray(data.test["y"]) == 1,
    )
    return np.mean(scores[truth][:, None] > scores[~truth][None, :])


print(
    f"AUC on the test patients: {auc(results['FedMSA, ten'].x['w']):.3f}, exactly {auc(answer):.3f}"
)

figure, axes = plt.subplots()
for name, result in results.items():
    axes.semilogy(result.history["round"], result.history["distance"], label=name)
axes.set(
    title="Distance to the answer made of all pairs, relative to its size",
    xlabel="round",
)
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **A payoff that is not strongly concave in y.** A bilinear game cycles; add a small −μ|y|²/2, or use
#   averages of the iterates.
# - **y is a weight for each client or sample**: [robust and fair learning](robust.md) has that written
#   already, and solves it as a composition.
# - **Y depends on x**: primal-dual methods then fail silently, and FedStrata refuses them.
#   Use `fs.FedRZOMinimax`.
# - **Local steps with heterogeneous clients**: `fs.LocalSGDA` with ten of them converges to another point,
#   as the picture shows.
