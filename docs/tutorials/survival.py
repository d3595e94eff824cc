# %% [markdown]
# # Survival at 67 centres
#
# $$\min_{\theta, w} \; \frac1N \sum_{i=1}^m \sum_{j \in \text{centre } i}
# \Big( \sum_{k < k_j} -\log(1 - h_{jk}) - \log h_{jk_j}^{e_j} (1 - h_{jk_j})^{1 - e_j} \Big), \qquad
# \text{logit}\, h_{jk} = \theta_k + u_j^\top w$$
#
# What a patient's features u say about the time until an event, where some are only known to have lived until
# their follow-up ended: the likelihood of discrete times is a mean over patients, so that every method for
# `fs.Minimization` fits it, and risk sets need not be shared. The patients are those of 67 dialysis centres
# in Rio de Janeiro, whose file does not come with the package ([Data](../data.md)); without it the program
# makes up centres of the same form, and its numbers are others.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize

import fedstrata as fs


def made_up(centres=12, features=7):
    rng = np.random.default_rng(0)
    clients = []
    for size in rng.integers(20, 120, centres):
        u = rng.normal(size=(size, features)).astype("float32")
        shift = 0.3 * rng.normal()  # of the centre
        death = rng.geometric(1 / (1 + np.exp(4 - shift - 0.5 * u[:, 0])))
        end = rng.integers(1, 45, size)
        clients.append(
            {
                "x": u,
                "y": (death <= end).astype("int32"),
                "time": np.minimum(death, end).astype("float32"),
            }
        )
    held = [{k: v[::5] for k, v in c.items()} for c in clients]
    test = {k: np.concatenate([h[k] for h in held]) for k in held[0]}
    test["client"] = np.repeat(np.arange(centres), [len(h["y"]) for h in held])
    train = [{k: np.delete(v, np.s_[::5], 0) for k, v in c.items()} for c in clients]
    return fs.FederatedData.from_clients(train, test=test)


try:
    data = fs.data.dialysis(seed=0)
except FileNotFoundError:
    data = made_up()
data = data.with_client_index()
deaths = int(np.sum(data.train["y"]))
print(
    f"{data.clients} centres, {int(data.sizes.sum())} patients, {deaths} deaths, "
    f"{int(data.sizes.min())} to {int(data.sizes.max())} patients each"
)

# %% [markdown]
# ## One model
#
# Intervals of six months. There is no step size: `"auto"` measures the problem and chooses.

# %%
cuts = (6, 12, 18, 24, 30, 36, 42)
model = fs.models.hazard(7, cuts=cuts, lam=1e-3)
problem, x0 = fs.Minimization(model.loss), model.init(0)
result = fs.solve(problem, "auto", data, x0, weights="size")
print(result.certificate.verdict, *result.notes, sep="\n")

# %% [markdown]
# ## The known answer
#
# With all patients in one place the same likelihood is a convex problem that SciPy solves.

# %%
pooled = {name: np.asarray(values, float) for name, values in data.train.items()}


def likelihood(z):
    theta, w = z[: len(cuts)], z[len(cuts) :]
    k = np.minimum(np.searchsorted(cuts, pooled["time"]), len(cuts) - 1)
    died = (pooled["y"] > 0) & (pooled["time"] <= cuts[-1])
    logits = theta + (pooled["x"] @ w)[:, None]
    survived = np.logaddexp(0, logits)
    value = np.where(np.arange(len(cuts)) < k[:, None], survived, 0).sum(1)
    value += np.where(
        died,
        np.logaddexp(0, -logits[np.arange(len(k)), k]),
        survived[np.arange(len(k)), k],
    )
    return value.mean() + 0.5e-3 * w @ w


found = np.concatenate([np.ravel(result.x["theta"]), np.ravel(result.x["w"])])
best = minimize(likelihood, np.zeros(len(found)), method="BFGS")
print(f"likelihood {likelihood(found):.6f}, pooled {best.fun:.6f}")
assert likelihood(found) - best.fun < 1e-4 * (
    likelihood(np.zeros(len(found))) - best.fun
)

# %% [markdown]
# ## Is it calibrated?
#
# Kaplan and Meier's curve needs the numbers of deaths and of patients at risk in each interval: sums, which
# centres can add up. Beside it stands the mean of the model's curves over the held-out patients.

# %%
survival, test = fs.models.survival, data.test
total = survival.counts(cuts, test["time"], test["y"])
curve = survival.kaplan_meier(total)
of_model = np.asarray(survival.survival(model.predict(result.x, test["x"]))).mean(0)
figure, axes = plt.subplots()
axes.step(
    (0, *cuts), [1, *curve], where="post", label="Kaplan–Meier, held-out patients"
)
axes.plot((0, *cuts), [1, *of_model], "o-", label="the model's mean")
axes.set(title="Alive", xlabel="months", ylim=(0, 1))
axes.legend(loc="lower left")
print("largest difference", f"{np.abs(curve - of_model).max():.3f}")

# %% [markdown]
# ## Fair to the worst centres, and a baseline for each
#
# Three ways to treat centres that differ. *Fair*: the centres' losses are weighted towards the largest,
# `fs.dro.group` with λ between the mean (λ = ∞) and the maximum (λ = 0). *Own baselines*: every centre keeps
# hazards θ of its own, and only w is common, `fs.FedRep`. They are compared by the held-out likelihood of all
# patients, that of the worst tenth of the centres with ten or more held-out patients, and concordance within
# centres.

# %%
fair = fs.dro.group(
    model.loss, groups=data.clients, lam=0.3, group_of=lambda s: s["client"]
)
to_worst = fs.solve(fair, "auto", data, x0, rounds=2000)


def own(w, theta, patient):
    return model.loss({"theta": theta, "w": w}, patient)


baselines = fs.solve(
    fs.Bilevel(own, own, local=True, same_samples=True),
    fs.FedRep(gamma=0.3, eta=0.3, tau=5),
    data,
    x0["w"],
    y0=result.x["theta"],
    rounds=100,
    weights="size",
)

# %%
centre = np.asarray(test["client"])
large = [i for i in range(data.clients) if np.sum(centre == i) >= 10]


def judged(parameters):
    losses, agree = [], []
    for i in large:
        mine = {k: np.asarray(v)[centre == i] for k, v in test.items()}
        at = parameters(i)
        losses.append(jax.vmap(model.loss, (None, 0))(at, mine).mean())
        agree.append(survival.concordance(mine["time"], mine["y"], mine["x"] @ at["w"]))
    worst = np.sort(losses)[-max(1, len(losses) // 10) :].mean()
    return np.mean(losses), worst, np.nanmean(agree)


rows = {
    "one model": lambda i: result.x,
    "fair to the worst": lambda i: to_worst.x,
    "baselines of their own": lambda i: {
        "theta": baselines.y[i],
        "w": baselines.x,
    },
}
print(f"{'':24}{'loss':>8}{'worst tenth':>13}{'concordance':>13}")
for name, parameters in rows.items():
    mean, worst, agree = judged(parameters)
    print(f"{name:24}{mean:8.3f}{worst:13.3f}{agree:13.3f}")

# %% [markdown]
# ## When not to use this
#
# - Hazards within an interval are taken as constant: choose intervals by what is asked, not by what is
#   recorded. For effects that change with time, interact the features with the interval.
# - Cox's partial likelihood compares patients with each other, so that risk sets stay within a centre:
#   `fs.models.survival.cox` with `fs.per_batch`, for clients of equal size or minibatches.
# - With a handful of events at a centre, a baseline of its own soon fits noise: after 300 rounds in place of
#   100 the loss of the last row is 0.745. And the worst of many small centres is also the unluckiest one.
#   Look at a table like this one before you choose either.
