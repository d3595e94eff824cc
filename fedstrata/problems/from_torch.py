"""Losses of PyTorch modules: values, gradients and Hessian-vector products come from PyTorch, exactly.

    loss = fs.from_torch(module, torch.nn.functional.cross_entropy)
    result = fs.solve(fs.Minimization(loss), fs.FedAvg(0.1), data, loss.x0, rounds=100)
    module.load_state_dict(loss.state_dict(result.x))

The compiled program calls back to the host for

    V(x, ξ) = the samples' losses                     W(x, ξ, c) = Σ_b c_b ∇ℓ_b(x)
    J(x, ξ, v) = ∇ℓ_b(x)ᵀ v, its derivative along v   H(x, ξ, c, v) = Σ_b c_b ∇²ℓ_b(x) v, that of W

and JAX differentiates through them: reverse mode uses W, and forward mode over reverse mode uses H, which
covers all methods here. Third derivatives, and Hessians by two reverse passes, raise an error.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.term import Seeded, unseeded
from fedstrata.core.types import Array, Function, PyTree
from fedstrata.support.lazy import extra
from fedstrata.support.points import is_torch_module

SEEDS = "\0seeds"  # the key of a batch's seeds among its samples


class TorchError(RuntimeError):
    """A PyTorch module cannot be used as a loss."""


def from_torch(module: Any, loss: Function, *, inputs: str = "x", label: str | None = "y") -> TorchLoss:
    """Make a loss ``f(x, sample)`` from a PyTorch module, for all methods, in every engine.

    The module is copied, including its mode (train or eval), frozen parameters and buffers.

    Args:
        module: a `torch.nn.Module` that maps a batch of inputs to a batch of outputs, sample by sample: it
            must not contain batch normalisation in training mode. Dropout in training mode uses the run's
            seed, see `fedstrata.stochastic`, and then clients run one at a time; evaluations use evaluation
            mode.
        loss: ``loss(outputs, labels)`` of a batch, as in `torch.nn.functional`, or a module such as
            `nn.CrossEntropyLoss`; its mean over the batch is left out (class weights multiply a sample's
            loss). Any other function is called with one sample at a time, as a batch of one.
        inputs: the name of the sample's array that the module takes.
        label: the name of the sample's array that the loss takes; None passes all of them, as a dict.

    Returns:
        The loss. Its ``x0`` has the initial parameters, a dict with their PyTorch names.

    Raises:
        ImportError: if PyTorch is not installed; ``pip install fedstrata[torch]``.
        TorchError: if the module's outputs depend on the other samples of a batch or, without dropout, are
            random.
    """
    with extra("torch", "fs.from_torch"):
        import torch
    if not is_torch_module(module):
        raise TypeError(f"from_torch takes a torch.nn.Module, but module is {module!r}.")
    if not callable(loss):
        raise TypeError(
            "from_torch takes a loss of (outputs, labels) such as torch.nn.functional.cross_entropy, but "
            f"loss is {loss!r}."
        )
    for name, part in module.named_modules():
        if part.training and isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            raise TorchError(
                f"{name or 'The module'} is {type(part).__name__} in training mode: a sample's loss would "
                "depend on the rest of its batch. Replace it by torch.nn.GroupNorm, or keep its statistics "
                "fixed with module.eval()."
            )
    return TorchLoss(module, loss, inputs, label)


@dataclass(eq=False)
class TorchLoss:
    """The result of `from_torch`: ``loss(x, sample)`` with derivatives from PyTorch.

    Attributes:
        module, loss, inputs, label: as given, the module as a copy.
        x0: the module's trainable parameters, name → array.
    """

    module: Any
    loss: Function
    inputs: str = "x"
    label: str | None = "y"

    def __post_init__(self) -> None:
        self.module = copy.deepcopy(self.module)
        self._unreduced = _without_mean(self.loss)
        self._training = [part for part in self.module.modules() if part.training]
        self.draws = any(map(_drops_out, self._training))
        # whether clients run one after another: torch.func.vmap failed, or each has its own seed
        self._in_turn = self.draws
        self._tried: set[Any] = set()
        self._lock = threading.Lock()
        named = dict(self.module.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained:
            raise TorchError("The module has no trainable parameters (requires_grad).")
        self.x0 = {name: jnp.asarray(_numpy(p)) for name, p in trained.items()}
        self._fixed = {
            **{name: p.detach() for name, p in named.items() if not p.requires_grad},
            **dict(self.module.named_buffers()),
        }
        self._device = next(iter(trained.values())).device
        self._each = _differentiable(self)

    def __call__(self, x: PyTree, sample: PyTree) -> Array:
        """The loss of one sample."""
        return self.each_sample(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], sample), x)[0]

    def each_sample(self, samples: PyTree, x: PyTree) -> Array:
        """The losses of stacked samples, in one call of PyTorch, as is their gradient."""
        plain = unseeded(samples)
        self._check(x, plain)
        if isinstance(samples, Seeded):
            draw = jax.vmap(lambda key: jax.random.randint(key, (), 0, 2**31 - 1))
            plain = {**plain, SEEDS: draw(samples.key)}
        return self._each(x, plain)

    def then(self, function: Function, of: Function | None = None) -> Function:
        """A function of this loss that is as fast: PyTorch still gets whole batches.

        A plain function, ``lambda x, sample: loss(x, sample) + …``, has the same values, but computes the
        gradient of each sample separately.

        Args:
            function: ``function(value, *variables)`` of a sample's loss and the variables, in JAX.
            of: ``of(*variables)`` returns the module's parameters; by default the first variable.
        """
        return _Then(self, function, of or _first)

    def state_dict(self, x: PyTree) -> dict[str, Any]:
        """The module's ``state_dict`` with the parameters x: for ``module.load_state_dict``."""
        import torch

        self._check_names(x)
        state = {key: value.clone() for key, value in self.module.state_dict().items()}
        owners = {id(p): name for name, p in self.module.named_parameters()}
        for name, p in self.module.named_parameters(remove_duplicate=False):  # shared ones have two names
            if name in state and (owner := owners[id(p)]) in x:
                state[name] = torch.tensor(np.asarray(x[owner]), dtype=p.dtype, device=p.device)
        return state

    def from_state_dict(self, state_dict: Mapping[str, Any]) -> PyTree:
        """The trainable parameters x of a ``state_dict``."""
        if missing := [name for name in self.x0 if name not in state_dict]:
            raise KeyError(f"The state_dict has no {missing[0]!r}; it has {', '.join(state_dict)}.")
        return {name: jnp.asarray(_numpy(state_dict[name])) for name in self.x0}

    def _check_names(self, x: PyTree) -> None:
        shapes = {name: value.shape for name, value in self.x0.items()}
        shapes_of_x = {n: jnp.shape(v) for n, v in x.items()} if isinstance(x, Mapping) else None
        if shapes_of_x != shapes:
            what = type(x).__name__ if shapes_of_x is None else shapes_of_x
            raise TypeError(f"x must be like loss.x0, {shapes}, but is {what}. Start from loss.x0.")

    def _check(self, x: PyTree, samples: PyTree) -> None:
        """Try the module once on samples of these shapes, before the run."""
        self._check_names(x)
        names = (self.inputs, self.label)
        arrays = list(samples) if isinstance(samples, Mapping) else []
        for name in (n for n in names if n is not None):
            if name not in arrays:
                has = ", ".join(map(repr, arrays)) or type(samples).__name__
                raise TypeError(
                    f"The sample has no array {name!r}, only {has}. Give the names of its arrays: "
                    "from_torch(…, inputs=…, label=…)."
                )
        leaves, structure = jax.tree.flatten(samples)
        form = structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        if form not in self._tried:
            self._try(samples)
            self._tried.add(form)

    def _try(self, samples: PyTree) -> None:
        import torch

        rng = np.random.default_rng(0)

        def draw(leaf: Any) -> np.ndarray:
            shape = (2, *leaf.shape[1:])
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return rng.uniform(size=shape).astype(leaf.dtype)
            return np.zeros(shape, leaf.dtype)

        two = jax.tree.map(draw, samples)
        parameters = self._tensors({name: np.asarray(value) for name, value in self.x0.items()})

        def losses(rows: slice) -> np.ndarray:
            part = self._tensors(jax.tree.map(lambda leaf: leaf[rows], two))
            with torch.no_grad():
                return _numpy(self._losses(parameters, part))

        try:
            both, alone = losses(slice(0, 2)), [losses(slice(i, i + 1)) for i in range(2)]
        except Exception as error:
            shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", two)
            raise TorchError(
                f"The module or its loss fails on a batch {shapes}: {type(error).__name__}: {error}"
            ) from error
        if not np.allclose(both, np.concatenate(alone), rtol=1e-3, atol=1e-5, equal_nan=True):
            raise TorchError(
                "The module's outputs depend on the other samples of a batch, or are random: the losses "
                f"of two samples are {both.tolist()} in one batch and {[float(v[0]) for v in alone]} "
                "separately. A loss must be a function of the parameters and one sample."
            )

    def _tensors(self, arrays: PyTree) -> Any:
        """Writable tensors; integers other than uint8 become int64, which PyTorch's losses need."""
        import torch

        def tensor(leaf: np.ndarray) -> Any:
            new = torch.from_numpy(np.array(leaf, order="C"))
            if new.dtype in (torch.int8, torch.int16, torch.int32):
                new = new.long()
            return new.to(self._device)

        return jax.tree.map(tensor, arrays)

    def _losses(self, x: Any, samples: Any) -> Any:
        """The samples' losses, as tensors; if they have seeds, the first seed is used for the batch."""
        import torch

        seeds = samples.get(SEEDS)
        samples = {name: value for name, value in samples.items() if name != SEEDS}
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, enabled=seeds is not None):
            if seeds is not None:
                torch.manual_seed(int(seeds[0]))
            for part in self._training if self.draws else ():
                part.training = seeds is not None
            outputs = torch.func.functional_call(self.module, {**x, **self._fixed}, (samples[self.inputs],))
        labels = samples if self.label is None else samples[self.label]
        tensors = all(isinstance(value, torch.Tensor) for value in (outputs, labels))
        if self._unreduced is not None and tensors:
            losses = self._unreduced(outputs, labels)
            if losses.shape == labels.shape:  # otherwise two shapes were broadcast, which mixes samples
                return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

        def one(output: Any, label: Any) -> Any:
            alone = functools.partial(torch.utils._pytree.tree_map, lambda leaf: leaf.unsqueeze(0))
            value = self.loss(alone(output), alone(label))
            if value.numel() != 1:
                raise TorchError(
                    f"The loss must return one number for one sample, but returns shape {tuple(value.shape)}."
                )
            return value.reshape(())

        return torch.func.vmap(one)(outputs, labels)

    def _weighted(self, x: Any, samples: Any, c: Any) -> Any:
        """W, the weighted sum of the samples' gradients."""
        import torch

        return torch.func.grad(lambda x: (c * self._losses(x, samples)).sum())(x)

    def _product(self, x: Any, samples: Any, c: Any, v: Any) -> Any:
        gradient = self._weighted(x, samples, c)
        return sum((gradient[name] * v[name]).sum() for name in gradient)

    def _along(self, x: Any, samples: Any, v: Any) -> Any:
        """J, the derivative of the losses along v."""
        import torch

        c = torch.zeros(len(next(iter(samples.values()))), dtype=next(iter(x.values())).dtype)
        # W is linear in c, and J its derivative in c: two reverse passes replace a forward pass
        return torch.func.grad(lambda c: self._product(x, samples, c, v))(c.to(self._device))

    def _curved(self, x: Any, samples: Any, c: Any, v: Any) -> Any:
        """H, the derivative of W along v."""
        import torch

        return torch.func.grad(lambda x: self._product(x, samples, c, v))(x)

    def _run(self, function: Callable[..., Any], axes: int, arguments: list[Any]) -> Any:
        """``function`` over leading axes (clients, directions, …): by torch.func.vmap, else in a loop."""
        if not self._in_turn:
            try:
                return _over(function, axes, arguments, in_turn=False)
            except TorchError:
                raise
            except Exception:
                self._in_turn = True  # vmap lacks some operations; a module's own error recurs below
        return _over(function, axes, arguments, in_turn=True)


def _drops_out(part: Any) -> bool:
    """Whether a module is random in training mode: dropout, or a module with a dropout rate."""
    import torch

    rate = part.p if isinstance(part, torch.nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0


def _first(*variables: PyTree) -> PyTree:
    return variables[0]


@dataclass(frozen=True)
class _Then:
    loss: TorchLoss
    function: Function
    of: Function

    @property
    def draws(self) -> bool:
        return self.loss.draws

    def __call__(self, *args: PyTree) -> Any:
        *variables, sample = args
        return self.function(self.loss(self.of(*variables), sample), *variables)

    def each_sample(self, samples: PyTree, *variables: PyTree) -> Any:
        values = self.loss.each_sample(samples, self.of(*variables))
        return jax.vmap(lambda value: self.function(value, *variables))(values)


def _over(function: Callable[..., Any], axes: int, arguments: list[Any], in_turn: bool) -> Any:
    """Map over leading axes; an axis of length one is broadcast."""
    import torch

    if axes == 0:
        return function(*arguments)
    leaves, structure = jax.tree.flatten(arguments)
    length = max(leaf.shape[0] for leaf in leaves)
    mapped = [leaf.shape[0] == length and length > 1 for leaf in leaves]
    leaves = [leaf if own else leaf[0] for leaf, own in zip(leaves, mapped, strict=True)]

    def inner(*some: Any) -> Any:
        given = iter(some)
        rest = [next(given) if own else leaf for leaf, own in zip(leaves, mapped, strict=True)]
        return _over(function, axes - 1, jax.tree.unflatten(structure, rest), in_turn)

    varying = [leaf for leaf, own in zip(leaves, mapped, strict=True) if own]
    if length == 1:
        return jax.tree.map(lambda leaf: leaf.unsqueeze(0), inner())
    if not in_turn:
        return torch.func.vmap(inner)(*varying)
    parts = [inner(*(leaf[i] for leaf in varying)) for i in range(length)]
    return jax.tree.map(lambda *parts: torch.stack(parts), *parts)


def _call(loss: TorchLoss, function: Function, shape: PyTree, *args: PyTree, graph: bool = True) -> Any:
    """A pass as a callback; PyTorch maps over the leading axes that JAX adds."""
    axes = [leaf.ndim for leaf in jax.tree.leaves(args)]

    def host(*given: PyTree) -> Any:
        import torch

        arrays = jax.tree.map(np.asarray, given)
        leaves = jax.tree.leaves(arrays)
        front = leaves[0].ndim - axes[0]
        # Programs call from several threads, and functional_call swaps the module's parameters.
        with loss._lock, torch.set_grad_enabled(graph):
            results = loss._run(function, front, list(loss._tensors(arrays)))
        lead = np.broadcast_shapes(*(leaf.shape[:front] for leaf in leaves))
        return jax.tree.map(
            lambda leaf, s: np.broadcast_to(_numpy(leaf), (*lead, *s.shape)).astype(s.dtype), results, shape
        )

    return jax.pure_callback(host, shape, *args, vmap_method="expand_dims")


def _differentiable(loss: TorchLoss) -> Function:
    """``each(x, samples)`` with the derivatives in the module's docstring."""
    call = functools.partial(_call, loss)

    def like(x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)

    def of_samples(x: PyTree, samples: PyTree) -> PyTree:
        (length,) = {leaf.shape[0] for leaf in jax.tree.leaves(samples)}
        return jax.ShapeDtypeStruct((length,), jnp.result_type(*jax.tree.leaves(x)))

    @jax.custom_jvp
    def V(x: PyTree, samples: PyTree) -> Array:
        return call(loss._losses, of_samples(x, samples), x, samples, graph=False)

    @functools.partial(V.defjvp, symbolic_zeros=True)
    def V_along(primals: Any, tangents: Any) -> Any:
        _refuse(tangents[1])
        x, samples = primals
        return V(x, samples), call(loss._along, of_samples(x, samples), x, samples, _dense(tangents[0], x))

    @jax.custom_jvp
    def W(x: PyTree, samples: PyTree, c: Array) -> PyTree:
        return call(loss._weighted, like(x), x, samples, c)

    @functools.partial(W.defjvp, symbolic_zeros=True)
    def W_along(primals: Any, tangents: Any) -> Any:
        _refuse(tangents[1])
        x, samples, c = primals
        parts = []
        if not _all_zero(tangents[0]):
            parts.append(call(loss._curved, like(x), x, samples, c, _dense(tangents[0], x)))
        if not _all_zero(tangents[2]):
            parts.append(W(x, samples, tangents[2]))
        zeros = jax.tree.map(jnp.zeros_like, x)
        return W(x, samples, c), jax.tree.map(lambda *leaves: sum(leaves), zeros, *parts)

    @jax.custom_vjp
    def each(x: PyTree, samples: PyTree) -> Array:
        return V(x, samples)

    def forward(x: PyTree, samples: PyTree) -> Any:
        if any(leaf.perturbed for leaf in jax.tree.leaves(samples, is_leaf=_is_primal)):
            _refuse_now()
        x, samples = (
            jax.tree.map(lambda leaf: leaf.value, part, is_leaf=_is_primal) for part in (x, samples)
        )
        return V(x, samples), (x, samples)

    def backward(kept: Any, c: Any) -> Any:
        x, samples = kept
        gradient = jax.tree.map(jnp.zeros_like, x) if _is_zero(c) else W(x, samples, c)
        return gradient, None

    each.defvjp(forward, backward, symbolic_zeros=True)
    return each


def _without_mean(loss: Function) -> Function | None:
    """The loss with ``reduction="none"``, if its default reduction is the mean; else None."""
    if getattr(loss, "reduction", None) == "mean" and is_torch_module(loss):
        unreduced: Any = copy.deepcopy(loss)
        unreduced.reduction = "none"
        return unreduced
    try:
        reduction = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return (
        None
        if reduction is None or reduction.default != "mean"
        else functools.partial(loss, reduction="none")
    )


def _is_primal(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.SymbolicZero)


def _all_zero(tangents: PyTree) -> bool:
    return all(map(_is_zero, jax.tree.leaves(tangents, is_leaf=_is_zero)))


def _dense(tangents: PyTree, x: PyTree) -> PyTree:
    return jax.tree.map(
        lambda t, leaf: jnp.zeros_like(leaf) if _is_zero(t) else t, tangents, x, is_leaf=_is_zero
    )


def _refuse(tangents: PyTree) -> None:
    if not _all_zero(tangents):
        _refuse_now()


def _refuse_now() -> None:
    raise TypeError(
        "A loss of from_torch has derivatives with respect to the module's parameters, not the sample. To "
        "differentiate with respect to samples, write the model in JAX."
    )


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()
