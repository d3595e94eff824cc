import jax.numpy as jnp
import optax

import fedstrata as fs


def val_loss(x, w, patient):
    return optax.sigmoid_binary_cross_entropy(patient["x"] @ w, patient["y"])


def train_loss(x, w, patient):
    return val_loss(x, w, patient) + 0.5 * jnp.exp(x) * jnp.vdot(w, w)


data = fs.data.heart(valid_fraction=0.2)  # four hospitals
problem = fs.Bilevel(upper=val_loss, lower=train_loss)
result = fs.solve(problem, "auto", data, jnp.array(0.0), y0=jnp.zeros(22))
print(f"log of the regularisation {result.x:.2f}, validation loss {result.history['upper'][-1]:.3f}")
