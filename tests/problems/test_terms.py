"""What a function reads is kept by everything that is made of it; hand computations over the clients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.term import Term
from fedstrata.problems.dro import DRO, GroupDRO
from fedstrata.problems.terms import on_same_samples
from fedstrata.testing.cases import all_cases

pytestmark = pytest.mark.usefixtures("x64")

rng = np.random.default_rng(0)
CLIENTS = [{"a": rng.normal(size=(4, 3)), "b": rng.normal(size=4)} for _ in range(3)]
DATA = fs.FederatedData.from_clients(CLIENTS)
X, Y, V = np.array([0.5, -1.0, 0.3]), np.array([0.2, 0.7]), np.array([-0.4, 1.1])
same = np.testing.assert_allclose


def spread(x, batch):
    """No mean of anything over samples: it vanishes on one of them."""
    return (batch["a"] @ x).var()


def payoff(x, y, batch):
    return (batch["a"] @ x).var() * y[0] + (batch["b"] * y[1]).std() - y @ y * batch["b"].var()


def sampled(x, y, sample):
    return 0.5 * (sample["a"] @ x - sample["b"]) ** 2 * (1 + y @ y)


def over_clients(f, *args):
    """The clients' mean of a function of a batch, by hand."""
    values = [f(*args, jax.tree.map(jnp.asarray, client)) for client in CLIENTS]
    return jax.tree.map(lambda *v: sum(v) / len(v), *values)


def over_samples(f):
    """A function of a sample as one of a batch, by hand."""

    def mean(*args):
        *rest, batch = args
        each = [f(*rest, {k: v[s] for k, v in batch.items()}) for s in range(4)]
        return jax.tree.map(lambda *v: sum(v) / 4, *each)

    return mean


def measured(problem, x, y=None):
    """The problem's own metrics."""

    def mean(function, *args, part="train"):
        return fs.diagnostics.federated_mean(function, DATA, part)(*args)

    return {name: float(value) for name, value in problem.measure(mean, x, y).items()}


def solved(problem, x, y=None):
    """The same as the engine finds it at a start."""
    method = {
        fs.Bilevel: fs.HypergradientDescent(0.1, 0.1),
        fs.Minimax: fs.LocalSGDA(0.1, 0.1),
        fs.Minimization: fs.FedZO(0.1, 0.1),
        fs.Selection: fs.StRFedAvg("decreasing"),
        fs.MultiSequence: fs.FedMSA(0.1, 0.1),
        fs.Composition: fs.FedMSA(0.1, 0.1),
    }
    fitting = next(m for c, m in method.items() if isinstance(problem, c))
    result = fs.solve(problem, fitting, DATA, x, y0=y, rounds=0, progress=False)
    return {name: float(values[0]) for name, values in result.history.items()}


def mean_of(term, *args):
    return over_clients(term.on_batches(), *args)


def test_a_term_keeps_its_marks_and_is_equal_to_its_like():
    term = fs.per_batch(spread)
    assert term == fs.per_batch(spread)
    assert hash(term) == hash(fs.per_batch(spread))
    assert term != Term(spread)
    assert "spread" in repr(term)
    assert "batch" in repr(term)
    assert fs.per_batch(term) == term
    half = term.then(lambda v: v / 2)
    assert half.reads == "batch"
    same(half(X, CLIENTS[0]), spread(X, CLIENTS[0]) / 2)
    assert jax.tree.leaves(term) == [term]
    problem = fs.Minimization(term)
    assert problem.loss is term
    assert problem == fs.Minimization(fs.per_batch(spread))
    assert dataclasses.replace(problem, project=fs.sets.Ball(1.0)).loss is term
    composition = fs.Composition([fs.per_batch(lambda x, s: x), lambda z, s: z, lambda z: z.sum()])
    assert [level.reads for level in composition.levels] == ["batch", "sample", "nothing"]
    with pytest.raises(TypeError, match="per_batch's argument must be a function"):
        fs.per_batch(3.0)


@pytest.mark.slow
def test_terms_on_the_same_samples():
    one, other = on_same_samples(Term(sampled), fs.per_batch(payoff))
    assert one.reads == other.reads == "batch"
    same(one(X, Y, CLIENTS[0]), over_samples(sampled)(X, Y, CLIENTS[0]))
    assert on_same_samples(one, Term(jnp.log, "nothing"))[1].reads == "nothing"
    assert on_same_samples(Term(sampled), Term(spread)) == (Term(sampled), Term(spread))
    log = fs.LogMeanExp(lambda x, s: s["a"] @ x).on_batches()
    same(log(X, CLIENTS[0]), np.log(np.exp(CLIENTS[0]["a"] @ X).mean()))
    with pytest.raises(TypeError, match="every sample's is needed"):
        fs.per_batch(spread).each(CLIENTS[0], X)


@pytest.mark.parametrize("measured", [measured, solved])
@pytest.mark.slow
def test_every_class_evaluates_a_whole_batch(measured):
    assert measured(fs.Minimization(fs.per_batch(spread)), X)["loss"] == pytest.approx(
        float(over_clients(spread, X))
    )
    found = measured(fs.Bilevel(fs.per_batch(payoff), sampled, same_samples=True), X, Y)
    assert found["upper"] == pytest.approx(float(over_clients(payoff, X, Y)))
    assert found["lower"] == pytest.approx(float(over_clients(over_samples(sampled), X, Y)))
    assert measured(fs.Minimax(fs.per_batch(payoff)), X, Y)["payoff"] == pytest.approx(
        float(over_clients(payoff, X, Y))
    )
    found = measured(fs.Selection(fs.per_batch(spread), lambda x: x @ x), X)
    assert (found["primary"], found["secondary"]) == pytest.approx((float(over_clients(spread, X)), X @ X))

    @fs.per_batch
    def vector(x, batch):
        return jnp.stack([(batch["a"] @ x).std(), batch["b"].max() * x[0]])

    z = over_clients(vector, X)
    problem = fs.Composition([vector, lambda z: z @ z], plain=fs.per_batch(spread))
    assert measured(problem, X)["objective"] == pytest.approx(float(z @ z + over_clients(spread, X)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ZOHFL. the clients. models have not converged:UserWarning")  # one round
def test_a_personal_problem_evaluates_whole_batches():
    data = fs.FederatedData.from_clients(CLIENTS, server=CLIENTS[0])
    problem = fs.Personalized(
        fs.per_batch(spread),
        lambda x, y: 0.1 * ((x[:2] - y) ** 2).sum(),
        fs.per_batch(lambda x, y, b: (b["a"][:, :2] @ y - b["b"]).var() + (y - x[:2]) @ (y - x[:2])),
    )
    result = fs.solve(problem, fs.ZOHFL(0.1, 0.1, 1, 0.1), data, X, y0=Y, rounds=1, progress=False)
    assert result.history["server"][0] == pytest.approx(float(spread(X, CLIENTS[0])))
    assert result.history["client"][0] == pytest.approx(float(over_clients(problem.client, X, Y)))
    # F(x) = server + 1/m Σ coupling at the clients' own solutions, each a linear system
    found = fs.diagnose(result)
    total = spread(result.x, CLIENTS[0])
    for client in CLIENTS:
        A, b = client["a"][:, :2] - client["a"][:, :2].mean(0), client["b"] - client["b"].mean()
        y = np.linalg.solve(A.T @ A / 4 + np.eye(2), A.T @ b / 4 + np.asarray(result.x[:2]))
        total += 0.1 * ((np.asarray(result.x[:2]) - y) ** 2).sum() / 3
    assert found.objective == pytest.approx(float(total), rel=1e-6)
    with pytest.raises(TypeError, match="without a sample"):
        fs.Personalized(spread, fs.per_batch(lambda x, y: 0.0), sampled)


@pytest.mark.slow
@pytest.mark.parametrize("upper", [fs.per_batch(payoff), sampled])
@pytest.mark.parametrize("lower", [fs.per_batch(lambda x, y, b: payoff(x, y, b) + 2 * y @ y), sampled])
def test_a_bilevel_problem_as_sequences(upper, lower):
    f, g = (t if isinstance(t, Term) else over_samples(t) for t in (upper, lower))
    problem = fs.as_multisequence(fs.Bilevel(upper, lower, same_samples=True))
    x, w, v = map(jnp.asarray, (X, Y, V))
    mixed = jax.jvp(lambda w: jax.grad(over_clients, 1)(g, x, w), (w,), (v,))[1]
    slope, product = jax.jvp(lambda w: jax.grad(over_clients, 2)(g, x, w), (w,), (v,))
    f_x, f_w = jax.grad(over_clients, (1, 2))(f, x, w)
    same(mean_of(problem.P, x, ((w, v),)), f_x - mixed, rtol=1e-10)
    for found, expected in zip(mean_of(problem.S[0], x, (w, v)), (slope, product - f_w), strict=True):
        same(found, expected, rtol=1e-10)
    at = measured(problem, X, ((Y, V),))
    assert at["P"] == pytest.approx(float(jnp.linalg.norm(f_x - mixed)))


@pytest.mark.slow
def test_a_minimax_problem_as_others():
    problem = fs.Minimax(fs.per_batch(payoff))
    x, y = jnp.asarray(X), jnp.asarray(Y)
    by_x, by_y = jax.grad(over_clients, (1, 2))(payoff, x, y)
    sequences, bilevel = fs.as_multisequence(problem), fs.as_bilevel(problem)
    assert bilevel == fs.as_bilevel(fs.Minimax(fs.per_batch(payoff)))
    same(mean_of(sequences.P, x, (y,)), by_x, rtol=1e-10)
    same(mean_of(sequences.S[0], x, y), -by_y, rtol=1e-10)
    found = measured(bilevel, X, Y)
    value = float(over_clients(payoff, X, Y))
    assert (found["upper"], found["lower"]) == pytest.approx((value, -value))


def vector(x, batch):
    return jnp.stack([(batch["a"] @ x).std(), batch["b"].max() * x[0]])


def each(x, sample):
    return jnp.stack([(sample["a"] @ x) ** 2, sample["b"] * x[1]])


def outer(z, batch):
    return (z * batch["b"][:2]).var() + z @ z


@pytest.mark.slow
@pytest.mark.parametrize("inner", [fs.per_batch(vector), each])
@pytest.mark.parametrize("last", [fs.per_batch(outer), lambda z, s: z[0] * s["b"] + z @ z, lambda z: z @ z])
@pytest.mark.parametrize("plain", [fs.per_batch(spread), lambda x, s: (s["a"] @ x) ** 2, None])
def test_a_composition_as_others(inner, last, plain):
    problem = fs.Composition([inner, last], plain)

    def by_hand(term):
        return (lambda z, b: term(z)) if term.reads == "nothing" else term.on_batches()

    g, f = (by_hand(level) for level in problem.levels)
    h = (lambda x, b: 0.0 * x.sum()) if plain is None else by_hand(problem.plain)
    x, y, a = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(V)
    jacobian = jax.jacobian(lambda x: over_clients(g, x))(x)
    sequences = fs.as_multisequence(problem)
    same(
        mean_of(sequences.P, x, (((y,), (a,)),)),
        a @ jacobian + jax.grad(over_clients, 1)(h, x),
        rtol=1e-10,
    )
    (gap,), (adjoint,) = mean_of(sequences.S[0], x, ((y,), (a,)))
    same(gap, y - over_clients(g, x), rtol=1e-10)
    same(adjoint, a - jax.grad(over_clients, 1)(f, y), rtol=1e-10)

    bilevel = fs.as_bilevel(problem)
    assert measured(bilevel, X, Y)["upper"] == pytest.approx(float(over_clients(f, y) + over_clients(h, x)))
    slope = jax.grad(over_clients, 2)(Term.of(bilevel.lower).on_batches(), x, y)
    same(slope, y - over_clients(g, x), rtol=1e-10)


@pytest.mark.slow
def test_a_logarithmic_level_beside_a_batch():
    problem = fs.Composition(
        [fs.LogMeanExp(lambda x, s: s["a"] @ x), lambda u: 0.5 * u], plain=fs.per_batch(spread)
    )
    x, u, a = jnp.asarray(X), jnp.asarray(0.3), jnp.asarray(0.5)

    def mean_exp(x):
        return over_clients(over_samples(lambda x, s: jnp.exp(s["a"] @ x)), x)

    sequences = fs.as_multisequence(problem)
    expected = a * jax.grad(mean_exp)(x) / jnp.exp(u) + jax.grad(over_clients, 1)(spread, x)
    same(mean_of(sequences.P, x, (((u,), (a,)),)), expected, rtol=1e-10)
    value = 0.5 * np.log(mean_exp(x)) + over_clients(spread, x)
    batches = Term.of(problem.levels[0]).on_batches()
    same(fs.diagnostics.federated_mean(batches, DATA)(x), np.log(mean_exp(x)))
    assert measured(problem, X)["objective"] == pytest.approx(float(value))
    assert solved(problem, X)["objective"] == pytest.approx(float(value))


BATCH = fs.per_batch(spread)
REFUSED = {
    "kl": lambda: fs.dro.kl(BATCH, 1.0),
    "chi2": lambda: fs.dro.chi2(BATCH, 1.0),
    "chi2, nonnegative": lambda: fs.dro.chi2(BATCH, 1.0, nonnegative=True),
    "cvar": lambda: fs.dro.cvar(BATCH, 0.5),
    "kl_cvar": lambda: fs.dro.kl_cvar(BATCH, 0.5, 1.0),
    "chi2_ball": lambda: fs.dro.chi2_ball(BATCH, 0.5),
    "mean_semideviation": lambda: fs.dro.mean_semideviation(BATCH, 0.5),
    "risk_averse": lambda: fs.risk_averse(BATCH),
    "group": lambda: fs.dro.group(BATCH, 2, 1.0),
    "bounded_group_loss": lambda: fs.fairness.bounded_group_loss(BATCH, 2, 1.0),
    "equal_opportunity": lambda: fs.fairness.equal_opportunity(BATCH, spread, 2),
    "worst_violation": lambda: fs.fairness.worst_violation(BATCH, 2),
    "LogMeanExp": lambda: fs.LogMeanExp(BATCH),
    "leader": lambda: fs.MPEC(fs.per_batch(payoff), sampled),
    "follower": lambda: fs.MPEC(sampled, fs.per_batch(payoff)),
    "solution": lambda: fs.MPEC(sampled, sampled, solution=BATCH),
    "loss_tuning": lambda: fs.loss_tuning(BATCH),
    "hypercleaning": lambda: fs.hypercleaning(BATCH, 1.0),
    "hyperrepresentation": lambda: fs.hyperrepresentation(BATCH, 1.0),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_what_needs_every_sample_refuses_a_batch_when_it_is_built(build):
    with pytest.raises(TypeError, match="cannot be marked per_batch: "):
        build()


@pytest.mark.slow
def test_a_penalised_batch():
    """h and g of a whole batch, as composition and as minimax problem."""
    inner = fs.per_batch(lambda x, batch: (batch["b"] * x[0]).std())
    rho, lam = 2.0, 0.1

    def linear(data, weights):
        return lambda x, sample: jnp.stack([sample["b"] * x[0] - 0.1])

    options = {"count": 1, "rho": rho, "lam": lam, "linear": linear}
    problem = fs.fairness.penalised(BATCH, inner, lambda g: g[None] - 0.2, **options)
    g, h = over_clients(inner, X), over_clients(spread, X)
    found = measured(problem, X)
    assert found["objective"] == pytest.approx(float(h + rho * lam * jnp.logaddexp(0, (g - 0.2) / lam)))
    assert (found["loss"], found["violation"]) == pytest.approx((float(h), max(0.0, float(g - 0.2))))
    dual = problem.minimax(DATA)
    q = np.array([0.4, 0.6])
    violation = np.mean([client["b"].mean() for client in CLIENTS]) * X[0] - 0.1
    expected = h + rho * (q[1] * violation - lam * (q * np.log(q)).sum())
    assert measured(dual.problem, X, q)["payoff"] == pytest.approx(float(expected))


def test_the_loss_beside_fair_constraints_may_see_a_batch():
    clients = [{**c, "y": (c["b"] > 0).astype(int), "group": np.arange(4) % 2} for c in CLIENTS]
    data = fs.FederatedData.from_clients(clients)
    problem = fs.fairness.equal_opportunity(lambda x, s: s["a"] @ x, BATCH, 2)
    result = fs.solve(problem, fs.FedMSA(0.1, 0.1), data, X, rounds=0, progress=False)
    assert result.history["loss"][0] == pytest.approx(float(over_clients(spread, X)))


@pytest.mark.slow
def test_a_black_box_of_a_batch():
    def by_numpy(x, batch):
        return float(np.var(batch["a"] @ x))

    for loss in (fs.per_batch(fs.black_box(by_numpy)), fs.black_box(fs.per_batch(by_numpy))):
        assert loss.reads == "batch"
        assert "by_numpy" in repr(loss)
        assert solved(fs.Minimization(loss), X)["loss"] == pytest.approx(float(over_clients(spread, X)))


def on_batches(problem):
    """The same problem, its functions as ones of whole batches."""

    def convert(value):
        if isinstance(value, tuple):
            return tuple(convert(part) for part in value)
        return Term.of(value, known=True).on_batches() if callable(value) else value

    names = {f.name for f in dataclasses.fields(problem) if f.metadata.get("function")}
    names |= {f.name for f in dataclasses.fields(problem)} & {"levels", "S", "primary", "secondary"}
    return dataclasses.replace(problem, **{name: convert(getattr(problem, name)) for name in names})


def of_equal_size(data):
    def first(part):
        return [jax.tree.map(lambda leaf: leaf[:2], data.client(i, part)) for i in range(data.clients)]

    valid = None if data.valid is None else first("valid")
    return fs.FederatedData.from_clients(first("train"), valid, server=data.server)


CASES = [c for c in all_cases() if not isinstance(c.problem, fs.MPEC | DRO | GroupDRO)]
QUICK = {"fedavg"}
# One row for each way to read a term: gradients, control variates, values, products, maps, personal models.
READERS = {
    "fedavg", "scaffold", "fedzo", "fedrzo", "fedrzo-bilevel", "ditto", "pdsgd", "fedmsa", "fednest",
    "fedf2sa", "local-sgda", "afl", "zohfl", "strfedavg",
}  # fmt: skip


def when(name):
    """A row that reads its terms as another one does is for the night."""
    return () if name in QUICK else pytest.mark.slow if name in READERS else pytest.mark.long


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=when(c.name)) for c in CASES])
def test_methods_keep_what_a_function_reads(case):
    """A mean over samples, written as a function of the batch, gives the same iterates."""
    data = of_equal_size(case.data)
    plain = case.run(data=data)
    batched = dataclasses.replace(case, problem=on_batches(case.problem)).run(data=data)
    for name in ("x", "y"):
        leaves = (jax.tree.leaves(getattr(run, name)) for run in (plain, batched))
        for a, b in zip(*leaves, strict=True):
            same(a, b, rtol=1e-6, atol=1e-9)
    assert plain.ledger == batched.ledger
