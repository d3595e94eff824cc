# %% [markdown]
# # A score that patients answer to
#
# $$\min_x \; \mathbb{E} f(x, y(x, \xi), \xi) \qquad
# \text{where} \quad y(x, \xi) \;\; \text{solves} \;\; \mathrm{VI}(Y(\xi), G(x, \cdot, \xi))$$
#
# A *mathematical program with equilibrium constraints*, `fs.MPEC`: a leader chooses x, and every sample has
# followers who answer it. Here the leader is a triage score that four hospitals publish. Some of what it
# weighs only the patient can tell: pain on exertion, the kind of chest pain. Who wants to be seen may tell
# more than is so. Patient ξ chooses what is told, y, from the truth to the top of the scale, gains by the
# score and pays by the square of what was added:
#
# $$y(x, \xi) = \arg\max_{\xi_T \le y \le \mathrm{top}} \; x_T^\top y - \frac{c}{2} \lVert y - \xi_T \rVert^2
# \qquad \Longleftrightarrow \qquad G(x, y, \xi) = c\,(y - \xi_T) - x_T$$
#
# A score that was trained on honest answers is biased once patients respond to it; this one is trained
# on the responses. The behaviour is an assumption of this page, the patients are real.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from scipy.optimize import minimize

import fedstrata as fs

full = fs.data.heart(seed=0)
names = list(full.preparation.features)
told = [names.index("exang"), names.index("cp=none")]
seen = [names.index(name) for name in ("age", "sex", "thalach", "oldpeak")]
hospitals = [full.client(i) for i in range(full.clients)]
data = fs.FederatedData.from_clients(
    [{"told": s["x"][:, told], "seen": s["x"][:, seen], "y": s["y"]} for s in hospitals]
)
top = data.train["told"].max(0)
COST = 0.5


# %%
def score(x, answer, patient):
    return answer @ x[:2] + patient["seen"] @ x[2:6] + x[6]


def leader(x, answer, patient):
    return (
        optax.sigmoid_binary_cross_entropy(score(x, answer, patient), patient["y"])
        + 0.01 * x @ x
    )


problem = fs.MPEC(
    leader,
    follower=lambda x, answer, patient: COST * (answer - patient["told"]) - x[:2],
    project_y=lambda answer, x, patient: jnp.clip(answer, patient["told"], top),
    solution=lambda x, patient: jnp.clip(
        patient["told"] + x[:2] / COST, patient["told"], top
    ),
)

# %% [markdown]
# ## Plan, solve, certify
#
# y(x, ξ) has kinks where an answer reaches the truth or the top, so `fs.FedRZOTwoStage` asks for values only:
# it moves x a little to both sides, lets every patient answer, and compares. The answers are computed where
# the patient is, and never travel. The closed form (`solution`) is used for the metric alone; the solver
# finds the equilibrium from G.

# %%
x0, y0 = jnp.zeros(7), jnp.zeros(2)
plan = fs.plan(problem, data, x0, y0, weights="size")
print(plan.method)

result = fs.solve(
    problem,
    plan.method,
    data,
    x0,
    y0=y0,
    rounds=plan.rounds,
    weights="size",
    seed=0,
)
print(
    f"leader's loss {result.history['leader'][-1]:.4f} after {result.ledger.exchanges} exchanges"
)
print(f"certificate: {result.certificate.verdict}")

# %% [markdown]
# ## The known answer
#
# Here y(x, ξ) has a closed form, so SciPy can minimise over x, from several starts, on the pooled data.

# %%
every = jax.tree.map(lambda leaf: np.asarray(leaf, float), data.train)


def loss_of(x, answers):
    margin = (2 * every["y"] - 1) * (answers @ x[:2] + every["seen"] @ x[2:6] + x[6])
    return np.logaddexp(0, -margin).mean() + 0.01 * x @ x


def at_equilibrium(x):
    return loss_of(x, np.clip(every["told"] + x[:2] / COST, every["told"], top))


rng = np.random.default_rng(0)
starts = [rng.normal(size=7) / 2 for _ in range(5)]
best = min(
    (minimize(at_equilibrium, s, method="Powell", tol=1e-8) for s in starts),
    key=lambda r: r.fun,
)
honest = minimize(lambda x: loss_of(x, every["told"]), np.zeros(7)).x
found = np.asarray(result.x, float)
print(f"exact {best.fun:.4f}, found {at_equilibrium(found):.4f}")
print(
    f"trained honestly: {loss_of(honest, every['told']):.4f}, once they answer {at_equilibrium(honest):.4f}"
)
assert at_equilibrium(found) < best.fun + 2e-3

# %%
figure, axes = plt.subplots()
axes.plot(result.history["round"], result.history["leader"], label="FedRZOTwoStage")
axes.axhline(best.fun, linestyle=":", color="grey", label="exact")
axes.axhline(
    at_equilibrium(honest),
    linestyle="--",
    color="C1",
    label="trained on honest patients",
)
axes.set(title="Loss of the score once patients answer to it", xlabel="round")
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **The followers are the clients' own models**, one for each client and not for each sample: that is
#   [personalised](personalised.md).
# - **One lower problem for everybody**, a mean over all clients' samples: that is [bilevel](bilevel.md). An
#   MPEC's lower level is solved sample by sample.
# - **G is not monotone**: the equilibrium may not be unique, or not be found. Check the residual of the
#   lower level.
# - **x is large.** Values tell one direction at a time, so the work grows with the number of weights; here
#   there are seven.
