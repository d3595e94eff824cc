import jax.numpy as jnp
import optax

import fedstrata as fs


def val_loss(x, w, sample):
    return optax.softmax_cross_entropy_with_integer_labels(sample["x"] @ w, sample["y"])


def train_loss(x, w, sample):
    return val_loss(x, w, sample) + 0.5 * jnp.exp(x) * jnp.vdot(w, w)


data = fs.data.digits(clients=20, partition=fs.Dirichlet(0.3), valid_fraction=0.2, seed=0)
problem, method = fs.Bilevel(upper=val_loss, lower=train_loss), fs.FedMSA(alpha=0.05, beta=0.1, K=5)
result = fs.solve(problem, method, data, jnp.array(-3.0), y0=jnp.zeros((64, 10)), rounds=200, seed=0)
print(f"log of the regularisation {result.x:.2f}, validation loss {result.history['upper'][-1]:.3f}")
