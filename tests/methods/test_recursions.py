"""Rounds of newer methods against NumPy: several local steps, clients of unlike size, two of four a round.

Each recursion is written from the pseudo-code of the method's docstring. Of sizes 2, 3, 9 and 2, a cohort of
two with weights by size has the third client for certain, which counts for 9, and one other, for 7.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.core.cohorts import by_weight, threshold

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.slow]  # rows of methods fail as well

SEED, ROUNDS, N, P = 5, 3, 3, 2
SIZES, M = (2, 3, 9, 2), 4
RNG = np.random.default_rng(0)


def matrices(k, n, definite=True):
    a = RNG.normal(size=(k, n, n)) / np.sqrt(2 * n)
    return a @ a.transpose(0, 2, 1) + 0.3 * np.eye(n) if definite else (a + a.transpose(0, 2, 1)) / 2


def client(k):
    lower = matrices(k, N + P, definite=False)
    lower[:, N:, N:] = matrices(k, P)
    normal = {"b": (N,), "u": (N + P,), "l": (N + P,), "G": (P, N), "g": (P,), "w": (P,)}
    drawn = {name: RNG.normal(size=(k, *shape)) for name, shape in normal.items()}
    return {"A": matrices(k, N), "U": matrices(k, N + P), "L": lower, "W": matrices(k, P), **drawn}


CLIENTS = [client(k) for k in SIZES]
DATA = fs.FederatedData.from_clients(CLIENTS)
MEANS = [{name: values.mean(0) for name, values in own.items()} for own in CLIENTS]
X0, Y0 = np.array([0.7, -0.4, 0.2]), np.array([0.3, -0.6])


def quadratic(H, b):
    return lambda x, y, s: (z := jnp.concatenate([x, y])) @ s[H] @ z / 2 - s[b] @ z


LOSS = fs.Minimization(lambda x, s: x @ s["A"] @ x / 2 - s["b"] @ x + 5)
UPPER, LOWER = quadratic("U", "u"), quadratic("L", "l")
HEADS = fs.Bilevel(UPPER, UPPER, same_samples=True, local=True)
OWN = fs.Bilevel(UPPER, LOWER, same_samples=True, local=True)
INNER = fs.Composition(
    [lambda x, s: s["G"] @ x - s["g"], lambda z, s: z @ s["W"] @ z / 2 - s["w"] @ z], local=True
)


def f(i, x):
    return x @ MEANS[i]["A"] @ x / 2 - MEANS[i]["b"] @ x + 5


def df(i, x):
    return MEANS[i]["A"] @ x - MEANS[i]["b"]


def upper(i, x, y):
    return MEANS[i]["U"] @ np.r_[x, y] - MEANS[i]["u"]


def lower(i, x, y):
    return MEANS[i]["L"] @ np.r_[x, y] - MEANS[i]["l"]


def keys(r):
    """Of the round's clients, and the method's own."""
    return jax.random.split(jax.random.fold_in(jax.random.key(SEED), r))


def cohort(r):
    sizes = jnp.asarray(SIZES, jnp.int32)
    return [int(i) for i in by_weight(keys(r)[0], sizes, 2, threshold(sizes, 2))]


def mean(S, values):
    return np.tensordot([9 / 16 if i == 2 else 7 / 16 for i in S], np.array(values), 1)


def of_all(values):
    return np.tensordot(np.array(SIZES) / 16, np.array(values), 1)


def ditto(x, y):
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            z = x
            for _ in range(2):
                z = z - 0.2 * df(i, z)
            for _ in range(3):
                y[i] = y[i] - 0.15 * (df(i, y[i]) + 0.6 * (y[i] - x))
            ends.append(z)
        x = mean(S, ends)
    return x, y


def pfedme(x, y):
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            w = x
            for _ in range(2):
                for _ in range(3):
                    y[i] = y[i] - 0.2 * (df(i, y[i]) + 1.4 * (y[i] - w))
                w = w - 0.3 * 1.4 * (w - y[i])
            ends.append(w)
        x = 0.2 * x + 0.8 * mean(S, ends)
    return x, y


def per_fedavg(x, y):
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            z, y[i] = x, x - 0.3 * df(i, x)
            for _ in range(2):
                g = df(i, z - 0.3 * df(i, z))
                z = z - 0.2 * (g - 0.3 * MEANS[i]["A"] @ g)
            ends.append(z)
        x = mean(S, ends)
    return x, y


def fedrep(x, y):
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            for _ in range(3):
                y[i] = y[i] - 0.15 * upper(i, x, y[i])[N:]
            z = x
            for _ in range(2):
                z = z - 0.1 * upper(i, z, y[i])[:N]
            ends.append(z)
        x = mean(S, ends)
    return x, y


def onto_simplex(v):
    level = np.sort(v)[::-1]
    level = (np.cumsum(level) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - level.max(), 0)


def drfa(x, weights):
    """A client of the cohort stands for 1/π_i, which is 1 for the third, 7/n_i for others."""
    for r in range(ROUNDS):
        S, moved, kept = cohort(r), 0.0, 0.0
        key_kept, _, key_drawn, _ = jax.random.split(keys(r)[1], 4)
        t = int(jax.random.randint(key_kept, (), 1, 4))
        for i in S:
            way = [x]
            for _ in range(3):
                way.append(way[-1] - 0.1 * df(i, way[-1]))
            share = weights[i] * (1 if i == 2 else 7 / SIZES[i])
            moved, kept = moved + share * (way[3] - x), kept + share * (way[t] - x)
        drawn = jax.random.choice(key_drawn, jnp.arange(M), (2,), replace=False)
        v = np.array([M / 2 * f(i, x + kept) if i in drawn else 0.0 for i in range(M)])
        x, weights = x + moved, onto_simplex(weights + 0.02 * 3 * v)
    return x, weights


def fedapd(x, weights):
    before = np.array([f(i, x) for i in range(M)])
    for _ in range(ROUNDS):
        F = np.array([f(i, x) for i in range(M)])
        weights = onto_simplex((weights + 0.02 * (1.7 * F - 0.7 * before)) / (1 + 0.02 * 0.5 * M))
        c, before, ends = weights @ [df(i, x) for i in range(M)], F, []
        for i in range(M):
            u = x
            for _ in range(3):
                u = u - 0.05 * (df(i, u) - df(i, x) + c)
            ends.append(u - x)
        x = x + 0.9 * weights @ ends
    return x, weights


def fedgdro(x, _):
    u = np.array([f(i, x) for i in range(M)])
    w = np.log(of_all(np.exp(u / 2)))
    for r in range(ROUNDS):
        S, ends, parts = cohort(r), [], []
        for i in S:
            z = x
            for _ in range(2):
                u[i] = 0.3 * u[i] + 0.7 * f(i, z)
                q = np.exp(u[i] / 2 - w)
                z = z - 0.05 * q * df(i, z)
            ends.append(z)
            parts.append(q)
        x, w = mean(S, ends), w + np.log(1 - 0.6 + 0.6 * mean(S, parts))
    return x, w


def normals(key, count):
    draws = [optax.tree.random_like(k, X0, jax.random.normal) for k in jax.random.split(key, count)]
    return np.array(draws)


def hiso(x, _):
    """With ν = 1 it is DeComFL."""
    H, mu, eta = np.ones(N), 0.1, 0.05
    for r in range(ROUNDS):
        S, sent = cohort(r), []
        key = jax.random.fold_in(keys(r)[1], 0x7365)
        U = [normals(jax.random.fold_in(key, k), 2) / np.sqrt(H) for k in range(2)]
        for i in S:
            z, s = x, np.zeros((2, 2))
            for k in range(2):
                s[k] = [(f(i, z + mu * u) - f(i, z)) / mu for u in U[k]]
                z = z - eta / 2 * s[k] @ U[k]
            sent.append(s)
        s = mean(S, sent)
        x = x - eta / 2 * (s[0] @ U[0] + s[1] @ U[1])
        H = 0.8 * H + 0.2 * (s[1] @ U[1] / 2) ** 2
    return x, None


def fedkseed(x0, _):
    Z = np.array([normals(jax.random.fold_in(jax.random.key(0), j), 1)[0] for j in range(5)])
    A = np.zeros(5)
    for r in range(ROUNDS):
        S, sent = cohort(r), []
        for i in S:
            x, a, key = x0 - A @ Z, np.zeros(5), jax.random.fold_in(keys(r)[1], i)
            for k in range(3):
                key_j = jax.random.split(jax.random.fold_in(key, k))[1]
                j = int(jax.random.randint(key_j, (), 0, 5))
                s = 0.05 * (f(i, x + 0.1 * Z[j]) - f(i, x - 0.1 * Z[j])) / 0.2
                x, a[j] = x - s * Z[j], a[j] + s
            sent.append(a)
        A = A + mean(S, sent)
    return x0 - A @ Z, None


def fedf2sa(x, y):
    y, z, lam = y.copy(), y.copy(), 4.0
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            u = x
            for _ in range(2):
                f_y, f_z, h_y, h_z = (g(i, u, v) for g in (upper, lower) for v in (y[i], z[i]))
                u = u - 0.02 * ((f_y + f_z) / 2 + lam / 2 * (h_y - h_z))[:N]
                y[i], z[i] = y[i] - 0.15 * (h_y + f_y / lam)[N:], z[i] - 0.15 * (h_z - f_z / lam)[N:]
            ends.append(u)
        x = mean(S, ends)
    return x, (y + z) / 2


def maps(i, x, Z):
    y, v, H = Z[:P], Z[P:], MEANS[i]["L"]
    u = upper(i, x, y)
    return np.r_[u[:N] - H[:N, N:] @ v, lower(i, x, y)[N:], H[N:, N:] @ v - u[N:]]


def fedstorm(x, y):
    """Clients that were away first correct their estimates for the change of x."""
    Z, step = np.c_[y, np.zeros((M, P))], np.r_[[0.05] * N, [0.1] * 2 * P]
    q, seen = np.array([maps(i, x, Z[i])[N:] for i in range(M)]), [x] * M
    h = of_all([maps(i, x, Z[i])[:N] for i in range(M)])
    for r in range(ROUNDS):
        S, ends, lefts, now = cohort(r), [], [], []
        for i in S:
            q[i] += (maps(i, x, Z[i]) - maps(i, seen[i], Z[i]))[N:]
            point, estimate = np.r_[x, Z[i]], np.r_[h, q[i]]
            for t in range(3):
                left = 0.7 * (estimate - maps(i, point[:N], point[N:]))
                point = point - step * estimate
                estimate = maps(i, point[:N], point[N:]) + left if t < 2 else left
            Z[i], q[i] = point[N:], estimate[N:]
            ends.append(point[:N])
            lefts.append(estimate[:N])
        x = mean(S, ends)
        for i in S:
            new = maps(i, x, Z[i])
            now.append(new[:N])
            q[i], seen[i] = q[i] + new[N:], x
        h = mean(S, lefts) + mean(S, now)
    return x, Z[:, :P]


def local_scgdm(x, _):
    u, d = None, None
    for r in range(ROUNDS):
        S, ends = cohort(r), []
        for i in S:
            own, value, way = x, u, d
            its = MEANS[i]
            for _ in range(3):
                new = its["G"] @ own - its["g"]
                value = new if value is None else 0.4 * value + 0.6 * new
                p = its["G"].T @ (its["W"] @ value - its["w"])
                way = p if way is None else 0.6 * way + 0.4 * p
                own = own - 0.05 * way
            ends.append(np.r_[own, value, way])
        x, u, d = np.split(mean(S, ends), [N, N + P])
    return x, u


def each(point):
    return np.array([point] * M)


EVEN = np.full(M, 1 / M)
ROWS = {
    "ditto": (fs.Ditto(0.2, 0.15, lam=0.6, H=2, s=3), LOSS, None, ditto, each(X0)),
    "pfedme": (fs.PFedMe(0.3, 0.2, lam=1.4, beta=0.8, R=2, K=3), LOSS, None, pfedme, each(X0)),
    "per-fedavg": (fs.PerFedAvg(0.2, 0.3, H=2, order="second"), LOSS, None, per_fedavg, each(X0)),
    "fedrep": (fs.FedRep(0.1, 0.15, H=2, tau=3), HEADS, Y0, fedrep, each(Y0)),
    "drfa": (fs.DRFA(0.1, 0.02, tau=3), LOSS, None, drfa, EVEN),
    "fedapd": (fs.FedAPD(0.05, 0.02, theta=0.7, J=3, eta_g=0.9, rho=0.5), LOSS, None, fedapd, EVEN),
    "fedgdro": (fs.FedGDRO(0.05, 2.0, eta=0.6, beta=0.7, I=2), LOSS, None, fedgdro, None),
    "hiso": (fs.HiSo(0.05, 0.1, nu=0.8, K=2, P=2), LOSS, None, hiso, None),
    "fedkseed": (fs.FedKSeed(0.05, 0.1, K=5, tau=3), LOSS, None, fedkseed, None),
    "fedf2sa": (fs.FedF2SA(0.02, 0.15, lam=4.0, H=2, order=2), OWN, Y0, fedf2sa, each(Y0)),
    "fedstorm": (fs.FedSTORM(0.05, 0.1, c=0.3, I=3), OWN, Y0, fedstorm, each(Y0)),
    "local-scgdm": (fs.LocalSCGDM(0.05, 0.6, 0.4, I=3), INNER, None, local_scgdm, None),
}


@pytest.mark.parametrize("name", ROWS)
def test_rounds_by_hand(name):
    method, problem, y0, recursion, y = ROWS[name]
    found = fs.solve(
        problem, method, DATA, X0, y0=y0, rounds=ROUNDS, seed=SEED, weights="size", eval_every=ROUNDS,
        participation=M if method.full_participation else 2, progress=False, default_metrics=False,
    )  # fmt: skip
    x, y = recursion(X0, None if y is None else y.copy())
    np.testing.assert_allclose(found.x, x, rtol=1e-9)
    assert np.abs(x - X0).max() > 1e-3
    if y is not None:
        second = found.y[0] if isinstance(found.y, tuple) else found.y
        np.testing.assert_allclose(second, y, rtol=1e-9)
