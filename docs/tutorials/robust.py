# %% [markdown]
# # Robust to the worst patients, fair to the worst hospital
#
# $$\min_x \max_{q} \; \mathbb{E}[q\,\ell(x, \xi)] - \lambda\, \mathbb{E}[q \log q] \;\; =
# \;\; \min_x \; \lambda \log \mathbb{E} \exp\!\left(\frac{\ell(x, \xi)}{\lambda}\right)$$
#
# A small average can hide large losses of some. *Robust* learning lets an adversary reweigh the patients,
# subject to a penalty; *fair* learning lets it reweigh groups. Both are compositions that `fs.dro` and
# `fs.fairness` provide. The example is heart disease in four very different hospitals.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from scipy.optimize import minimize

import fedstrata as fs

data = fs.data.heart(seed=0)
sites = [{**data.client(i), "hospital": np.full(data.sizes[i], i)} for i in range(4)]
data = fs.FederatedData.from_clients(sites, test=data.test)
NAMES = ("Cleveland", "Hungary", "Long Beach", "Zurich")


def loss(w, patient):
    logit = patient["x"] @ w[:-1] + w[-1]
    return optax.sigmoid_binary_cross_entropy(logit, patient["y"]) + 0.01 * w @ w


mean = fs.Minimization(loss)
patients = fs.dro.kl(loss, lam=1.0)  # the worst patients
groups = fs.dro.group(
    loss, groups=4, lam=0.05, group_of=lambda patient: patient["hospital"]
)  # the worst hospital

# %% [markdown]
# ## Plan, solve, certify all three
#
# The change from one to the other is one line. `fs.plan` measures each problem and chooses a method and its
# step size; the certificate minimises the risk with oracles of its own.

# %%
problems = {
    "mean": mean,
    "worst patients (KL)": patients,
    "worst hospital (groups)": groups,
}
x0, results = jnp.zeros(23), {}
for name, problem in problems.items():
    plan = fs.plan(problem, data, x0, weights="size")
    every = max(1, plan.rounds // 50)
    results[name] = fs.solve(
        problem,
        plan.method,
        data,
        x0,
        rounds=plan.rounds,
        eval_every=every,
        weights="size",
        seed=0,
    )
    verdict, chosen = results[name].certificate.verdict, type(plan.method).__name__
    print(f"{name:24} {chosen}, {plan.rounds} rounds: {verdict}")

# %% [markdown]
# ## The known answers
#
# On the pooled data SciPy minimises λ log E exp(ℓ/λ) over patients, and over the four hospitals' mean losses.

# %%
features = np.column_stack(
    [np.asarray(data.train["x"], float), np.ones(len(data.train["y"]))]
)
signs = 2.0 * np.asarray(data.train["y"]) - 1
where = np.asarray(data.train["hospital"])


def losses(w):
    return np.logaddexp(0, -signs * (features @ w)) + 0.01 * w @ w


def by_hospital(w):
    return np.array([losses(np.asarray(w, float))[where == i].mean() for i in range(4)])


def kl(values, lam):
    return lam * np.log(np.mean(np.exp((values - values.max()) / lam))) + values.max()


exact = {
    "mean": lambda w: losses(w).mean(),
    "worst patients (KL)": lambda w: kl(losses(w), 1.0),
    "worst hospital (groups)": lambda w: kl(by_hospital(w), 0.05),
}
for name, objective in exact.items():
    least = minimize(objective, np.asarray(results[name].x, float), tol=1e-8).fun
    found = objective(np.asarray(results[name].x, float))
    print(f"{name:24} found {found:.5f}, exact {least:.5f}")
    assert found < least + 2e-3

# %% [markdown]
# ## What it changes

# %%
print(
    f"{'':24}"
    + "".join(f"{name:>12}" for name in NAMES)
    + f"{'mean':>12}{'largest':>12}"
)
figure, axes = plt.subplots()
for k, (name, result) in enumerate(results.items()):
    each, every = by_hospital(result.x), losses(np.asarray(result.x, float))
    print(
        f"{name:24}"
        + "".join(f"{value:12.3f}" for value in each)
        + f"{every.mean():12.3f}{every.max():12.3f}"
    )
    axes.bar(np.arange(4) + 0.27 * (k - 1), each, 0.25, label=name)
axes.set_xticks(range(4), NAMES)
axes.set(title="Mean training loss in each hospital")
axes.legend()

# %% [markdown]
# The group-fair model has lower losses in the two worst hospitals, and higher losses in the other two. The
# model that is robust to patients has a far smaller largest loss, and a higher mean in every hospital. This
# trade-off follows from the objective, not from the method.
#
# ## When not to use this
#
# - **Wrong labels.** The worst patients may be the mislabelled ones, and robust learning then fits the
#   mistakes. A larger λ reduces their weight.
# - **The worst hospital has harder patients, not fewer.** Weights do not help there; the others only
#   get worse.
# - **You need a guarantee for a rate** (equal opportunity): use a constraint,
#   `fs.fairness.equal_opportunity`.
# - **A tiny λ.** The objective is then the largest loss, which one patient determines.
