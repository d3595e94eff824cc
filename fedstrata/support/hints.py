"""Hints about errors that a user's function raises while JAX traces it."""

from __future__ import annotations

import jax


def hint(error: Exception) -> str:
    """A hint about an error of a user's function."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    if "fedstrata.problems.from_torch" in frames:
        return "That is a loss of fs.from_torch."
    if any(name.partition(".")[0] == "torch" for name in frames) or "must be Tensor" in str(error):
        return (
            "A function of PyTorch needs a bridge: fs.from_torch(module, loss) gives a loss with values and "
            "derivatives from PyTorch; see the page For PyTorch users."
        )
    if "batch_stats" in str(error):  # of Flax linen
        return (
            "A loss of one sample cannot use batch statistics, and a mean of them over clients is not that "
            "of a batch. Use group or layer normalisation (nn.GroupNorm)."
        )
    values = "; or, where only values are needed, fs.black_box(function) takes any Python."
    match error:
        case jax.errors.TracerBoolConversionError():
            return (
                "A Python `if`, `while`, `and`, `or` or `not` cannot look at values while JAX compiles: "
                f"write jnp.where(condition, a, b) or jax.lax.cond{values}"
            )
        case jax.errors.TracerArrayConversionError():
            return f"NumPy cannot see values while JAX compiles: use jax.numpy (jnp.sin for np.sin){values}"
        case jax.errors.TracerIntegerConversionError() | jax.errors.ConcretizationTypeError():
            return (
                "A value that JAX compiles with cannot become a Python number (int(), float(), an index of a "
                f"list, a shape): keep it an array, jnp.asarray(list)[i]{values}"
            )
        case jax.errors.NonConcreteBooleanIndexError():
            return f"A mask makes a shape depend on values: write jnp.where(mask, a, 0), not a[mask]{values}"
    if "subdtype of <class 'numpy.integer'>" in str(error):
        return "Labels of classes must be integers: give y.astype(int) in the data."
    if "PRNG key" in str(error) and "NoneType" in str(error):
        return (
            "Evaluations take a loss marked fs.stochastic without randomness, with None for the key: give it "
            "a branch for that, or fs.stochastic(loss, evaluate=…)."
        )
    if isinstance(error, KeyError):
        return f"{error} is not in what is shown above: x0 (and y0), and a sample of the data."
    if isinstance(error, TypeError) and "positional argument" in str(error):
        return "It is called with the arguments that are shown above, the sample being the last of them."
    return (
        "A function sees ONE sample, without the sample axis; check the shapes of x0 (and y0) against the "
        "data."
    )
