"""Losses of PyTorch modules against the same network in JAX, and what is refused."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.term import Term
from fedstrata.models.losses import cross_entropy, squared

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedstrata[torch]'")

from fedstrata.problems.from_torch import TorchError  # noqa: E402

RNG = np.random.default_rng(0)
SAMPLES = {"x": RNG.normal(size=(6, 4)).astype(np.float32), "y": np.array([0, 1, 2, 1, 0, 2], np.int32)}
DATA = fs.FederatedData.from_clients(
    [{name: leaf[:4] for name, leaf in SAMPLES.items()}, {name: leaf[4:] for name, leaf in SAMPLES.items()}]
)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def native(x, sample):
    inner = jnp.tanh(x["0.weight"] @ sample["x"] + x["0.bias"])
    return cross_entropy(x["2.weight"] @ inner + x["2.bias"], sample["y"])


@pytest.fixture(scope="module")
def loss():
    return fs.from_torch(network(), torch.nn.functional.cross_entropy)


def close(a, b, **tolerance):
    jax.tree.map(
        lambda p, q: np.testing.assert_allclose(p, q, **{"atol": 2e-6, "rtol": 1e-5} | tolerance), a, b
    )


def along(f, x, v):
    return jax.jvp(jax.grad(f), (x,), (v,))[1]


@pytest.mark.slow
def test_values_and_derivatives_are_those_of_the_network(loss):
    x, v = loss.x0, jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape), float), loss.x0)
    samples = jax.tree.map(jnp.asarray, SAMPLES)

    def at_once(x):
        return Term.of(loss).over(samples, None, x)

    def one_by_one(x):  # as where a user's function is written around it
        return jax.vmap(lambda s: loss(x, s))(samples).mean()

    def expected(x):
        return jax.vmap(lambda s: native(x, s))(samples).mean()

    several = jax.tree.map(lambda a, b: jnp.stack([a, a + b, a - b]), x, v)

    @functools.partial(jax.jit, static_argnums=0)
    def everything(f, x, v, several):
        by_direction = jax.vmap(lambda v: along(f, x, v))(several)
        return f(x), jax.grad(f)(x), along(f, x, v), jax.vmap(jax.grad(f))(several), by_direction

    reference = everything(expected, x, v, several)
    close(everything(at_once, x, v, several), reference)
    close(everything(one_by_one, x, v, several), reference)
    assert not loss._in_turn


@pytest.mark.slow
def test_a_run_is_that_of_the_native_loss(loss):
    method = fs.FedAvg(0.3, H=2, batch_size=2)
    runs = [
        fs.solve(fs.Minimization(f), method, DATA, loss.x0, rounds=3, progress=False) for f in (loss, native)
    ]
    close(runs[0].x, runs[1].x)
    close(runs[0].history["loss"], runs[1].history["loss"])
    assert runs[0].ledger.oracle_calls == runs[1].ledger.oracle_calls


@pytest.mark.slow
def test_a_function_after_it_keeps_the_batch_together(loss):
    def added(value, x, y):
        return value + x * sum((leaf**2).sum() for leaf in y.values())

    term = Term.of(loss.then(added, of=lambda x, y: y))
    samples = jax.tree.map(jnp.asarray, SAMPLES)
    found = jax.grad(lambda y: term.over(samples, None, 0.1, y))(loss.x0)
    expected = jax.grad(lambda y: jax.vmap(lambda s: added(native(y, s), 0.1, y))(samples).mean())(loss.x0)
    close(found, expected)
    one = jax.tree.map(lambda leaf: leaf[0], samples)
    close(term(0.1, loss.x0, one), added(native(loss.x0, one), 0.1, loss.x0))


@pytest.mark.slow
@pytest.mark.parametrize("method", [fs.FedMSA(0.05, 0.1, K=2), fs.FedRZO(0.01, 0.1, H=2)])
def test_every_order_of_oracle_serves(loss, method):
    """A bilevel problem with second derivatives, and a method that asks for values alone."""

    def problem(f):
        if isinstance(method, fs.FedRZO):
            return fs.Minimization(f)
        return fs.Bilevel(
            lambda x, y, s: f(y, s),
            lambda x, y, s: f(y, s) + 0.5 * jnp.exp(x) * sum((leaf**2).sum() for leaf in y.values()),
            same_samples=True,
        )

    two = isinstance(problem(loss), fs.Bilevel)
    start = {"x0": 0.0, "y0": loss.x0} if two else {"x0": loss.x0}
    runs = [fs.solve(problem(f), method, DATA, **start, rounds=3, progress=False) for f in (loss, native)]
    close(runs[0].x, runs[1].x, rtol=1e-4)
    close(runs[0].y, runs[1].y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["debug", "sharded", "streamed"])
def test_every_engine_finds_the_same(loss, engine):
    problem, method = fs.Minimization(loss), fs.FedAvg(0.3, H=2, batch_size=None)
    runs = [
        fs.solve(problem, method, DATA, loss.x0, rounds=2, engine=name, progress=False)
        for name in ("simulated", engine)
    ]
    close(runs[0].x, runs[1].x)


def test_parameters_go_out_and_in_as_a_state_dict():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.second = torch.nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.frozen = torch.nn.Linear(4, 3)
            self.frozen.requires_grad_(False)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, u):
            return self.frozen(self.second(self.first(u)) + self.shift)

    torch.manual_seed(1)
    module = Tied()
    loss = fs.from_torch(module, torch.nn.CrossEntropyLoss())
    assert list(loss.x0) == ["first.weight"]
    x = {"first.weight": 2 * loss.x0["first.weight"]}
    module.load_state_dict(loss.state_dict(x))
    close(loss.from_state_dict(module.state_dict()), x)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            module(torch.tensor(SAMPLES["x"])), torch.tensor(SAMPLES["y"]).long()
        )
    close(Term.of(loss).over(jax.tree.map(jnp.asarray, SAMPLES), None, x), expected.numpy())
    with pytest.raises(KeyError, match=r"has no 'first\.weight'"):
        loss.from_state_dict({})
    with pytest.raises(TypeError, match=r"x must be like loss\.x0"):
        loss.state_dict({"first.weight": jnp.ones(3)})


@pytest.mark.slow
def test_what_cannot_be_mapped_is_taken_in_turn():
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 1.5]))

        def forward(self, u):
            return u @ self.w * (1 if float(self.w.detach().sum()) > 0 else -1)

    loss = fs.from_torch(Branching(), torch.nn.functional.mse_loss)
    several = {"w": jnp.stack([loss.x0["w"], -loss.x0["w"]])}
    samples = {"x": jnp.asarray(SAMPLES["x"]), "y": jnp.ones(6)}

    def expected(w):
        return ((samples["x"] @ w * jnp.where(w.sum() > 0, 1, -1) - 1) ** 2).mean()

    found = jax.vmap(jax.grad(lambda x: Term.of(loss).over(samples, None, x)))(several)
    close(found["w"], jax.vmap(jax.grad(expected))(several["w"]))
    assert loss._in_turn


def test_losses_are_those_of_single_samples():
    linear = torch.nn.Linear(4, 1)
    one = jax.tree.map(jnp.asarray, {"x": SAMPLES["x"], "y": SAMPLES["y"].astype(np.float32)})
    scores = SAMPLES["x"] @ linear.weight.detach().numpy()[0] + float(linear.bias.detach()[0])
    # (6, 1) and (6,): PyTorch would broadcast to (6, 6), and warns of it
    with pytest.warns(UserWarning, match="target size"):
        close(
            fs.from_torch(linear, torch.nn.functional.mse_loss).each_sample(one, _parameters(linear)),
            (scores - SAMPLES["y"]) ** 2,
        )
    mine = fs.from_torch(linear, lambda outputs, labels: 0.5 * (outputs[:, 0] - labels).square().sum())
    close(mine.each_sample(one, mine.x0), jax.vmap(squared)(jnp.asarray(scores), one["y"]))
    whole = fs.from_torch(linear, lambda outputs, s: (outputs[:, 0] - s["y"]).abs().mean(), label=None)
    close(whole.each_sample(one, whole.x0), np.abs(scores - SAMPLES["y"]))
    weights = torch.tensor([1.0, 2.0, 4.0])
    weighted = fs.from_torch(network(), torch.nn.CrossEntropyLoss(weight=weights))
    samples = jax.tree.map(jnp.asarray, SAMPLES)
    plain = jax.vmap(native, in_axes=(None, 0))(weighted.x0, samples)
    close(weighted.each_sample(samples, weighted.x0), weights.numpy()[SAMPLES["y"]] * plain)


def _parameters(module):
    return {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}


class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, u):
        return self.linear(u - u.mean(0))


CE = torch.nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.BatchNorm1d(4), r"BatchNorm1d in training mode.*GroupNorm.*module\.eval\(\)"),
        (lambda: torch.nn.Tanh(), "no trainable parameters"),
    ],
)
def test_modules_that_are_no_function_of_a_sample_are_refused(make, message):
    with pytest.raises(TorchError, match=message):
        fs.from_torch(make(), CE)


@pytest.mark.parametrize(
    ("loss", "x0", "message"),
    [
        (lambda: fs.from_torch(Centred(), CE), None, "depend on the other samples of a batch"),
        (lambda: fs.from_torch(torch.nn.Linear(5, 3), CE), None, r"fails on a batch.*float32\[2, 4\]"),
        (lambda: fs.from_torch(network(), CE, label="z"), None, "The sample has no array 'z', only 'x', 'y'"),
        (lambda: fs.from_torch(network(), CE), {"w": np.zeros(2)}, r"x must be like loss\.x0"),
        (lambda: lambda x, s: CE(network()(s["x"]), s["y"]), np.zeros(2), r"fs\.from_torch\(module, loss\)"),
        (network, np.zeros(2), r"fs\.from_torch\(module, loss\)"),
        (lambda: native, network(), r"x0 is a PyTorch module\..*loss\.x0"),
        (lambda: native, list(network().parameters()), r"x0\[0\] is a PyTorch parameter\..*loss\.x0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(loss, x0, message):
    made = loss()
    with pytest.raises(TypeError, match=message):
        fs.solve(
            fs.Minimization(made),
            fs.FedAvg(0.1),
            DATA,
            made.x0 if x0 is None else x0,
            rounds=1,
            progress=False,
        )


def test_samples_are_no_variables(loss):
    sample = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), SAMPLES)
    with pytest.raises(TypeError, match="module's parameters, not the sample"):
        jax.grad(lambda u: loss(loss.x0, {**sample, "x": u}))(sample["x"])


def test_arguments_that_are_none_say_so(monkeypatch):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        fs.from_torch(lambda u: u, CE)
    with pytest.raises(TypeError, match="takes a loss of"):
        fs.from_torch(network(), "cross_entropy")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'fedstrata\[torch\]'"):
        fs.from_torch(None, functools.partial)
