# %% [markdown]
# # How strongly to regularise, without pooling anything
#
# $$\min_x \; f(x, y(x)) \qquad \text{where} \qquad y(x) = \arg\min_y \; h(x, y)$$
#
# A *bilevel* problem, `fs.Bilevel`: x is evaluated by the **upper** function, at the y that is optimal for
# the **lower** one. Here x is the logarithm of a ridge, y the weights of a linear model, h the training
# loss and f the loss on held-out patients. Both are means over clients, and neither the training nor the
# validation data leave their client.
#
# The data are 208 of the diabetes patients that come with scikit-learn, at eight clinics with six patients
# to train on and twenty to validate each: few enough for the ridge to matter.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes

import fedstrata as fs

table, progression = load_diabetes(return_X_y=True)
order = np.random.default_rng(0).permutation(442)[:208]
x = np.float32(table[order] / table.std(0))
t = np.float32((progression[order] - progression.mean()) / progression.std())
clinics = [{"x": x[k : k + 6], "t": t[k : k + 6]} for k in range(0, 48, 6)]
held_out = [{"x": x[k : k + 20], "t": t[k : k + 20]} for k in range(48, 208, 20)]
data = fs.FederatedData.from_clients(clinics, valid=held_out)
print(data)


# %%
def val_loss(x, w, patient):
    return 0.5 * (patient["x"] @ w - patient["t"]) ** 2


def train_loss(x, w, patient):
    return val_loss(x, w, patient) + 0.5 * jnp.exp(x) * w @ w


problem = fs.Bilevel(upper=val_loss, lower=train_loss)

# %% [markdown]
# ## Plan, solve, certify
#
# `fs.FedMSA` updates x, y and the adjoint (the solution of the linear system of the hypergradient)
# simultaneously, without an inner loop to tune and without forming a Hessian. `fs.plan` measures the
# problem's constants and chooses the step sizes; the certificate measures how far the result is from a
# solution, independently of the method.

# %%
x0, y0 = jnp.array(-4.0), jnp.zeros(10)
plan = fs.plan(problem, data, x0, y0, method="FedMSA")
print(plan.method)

result = fs.solve(
    problem,
    plan.method,
    data,
    x0,
    y0=y0,
    rounds=400,
    metrics={"x": lambda x, y: x},
    seed=0,
)
print(f"log ridge {result.x:.3f}, validation loss {result.history['upper'][-1]:.4f}")
print(f"{result.ledger.exchanges} exchanges, {result.ledger.bytes_up / 1e3:.0f} kB up")
print(f"certificate: {result.certificate.verdict}")

# %% [markdown]
# ## The known answer
#
# For a ridge y(x) has a closed form, so that F(x) = f(x, y(x)) can be drawn.

# %%
train, valid = (
    jax.tree.map(lambda leaf: np.asarray(leaf, float), part)
    for part in (data.train, data.valid)
)
gram, moment = (
    train["x"].T @ train["x"] / len(train["t"]),
    train["x"].T @ train["t"] / len(train["t"]),
)


def F(x):
    w = np.linalg.solve(gram + np.exp(x) * np.eye(10), moment)
    return 0.5 * np.mean((valid["x"] @ w - valid["t"]) ** 2)


grid = np.linspace(-6, 2, 801)
curve = np.array([F(x) for x in grid])
best = grid[curve.argmin()]
print(
    f"best on the grid: {best:.3f}, found: {result.x:.3f}; hypergradient there: ",
    end="",
)
print(f"{fs.diagnose(result).hypergradient_norm:.1e}")
assert abs(result.x - best) < 0.03

# %%
figure, axes = plt.subplots()
axes.plot(grid, curve, label="F, exactly")
path = result.history["x"][::20]
axes.plot(
    path, [F(x) for x in path], "o", markersize=3, label="FedMSA, every 20 rounds"
)
axes.axvline(best, linestyle=":", color="grey")
axes.set(title="Validation loss of the best weights", xlabel="log ridge x")
axes.legend()

# %% [markdown]
# ## When not to use this
#
# - **For one number, a grid is cheap.** `fs.sweep` runs a dozen ridges in one compiled program. Bilevel
#   methods pay off from a handful of hyper-parameters on: one ridge per feature or per client, weights of
#   samples, a representation.
# - **A lower level that is not strongly convex in y**: y(x) is then not unique. `fs.Selection` chooses
#   among its optima.
# - **y has a set**: implicit differentiation is wrong there, and the methods that use it refuse.
#   `fs.FedRZOBilevel` uses values of f instead.
# - **The upper level uses the training samples**: the best ridge is then zero. FedStrata warns if the
#   data has no validation part.
