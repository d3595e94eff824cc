"""Small methods that together use every verb in every way, for the tests of engines.

Each has a few exchanges on a quadratic, so that a run compiles in about a second; `CONFORMANCE` has a row for
every kind of participation and weights. The methods are not registered.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.channel import Channel, Dropouts, Poisson
from fedstrata.channels.clipping import Adaptive
from fedstrata.channels.compression import TopK
from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import METHODS, BatchSize, Count, LocalSteps, Method, Positive, Reveals, method
from fedstrata.core.term import stochastic
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.data.federated import FederatedData
from fedstrata.engines.metrics import per_client
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Minimization, Personalized
from fedstrata.testing.cases import Case, samples

MethodT = TypeVar("MethodT", bound=type[Method])


@dataclass_transform(frozen_default=True)
def kit_method(cls: MethodT) -> MethodT:
    """`fedstrata.core.method.method` without the entry in `METHODS`, which are the users' methods."""
    made = method(cls)
    METHODS.pop(cls.__name__)
    return made


class Point(NamedTuple):
    """The state: one point."""

    x: PyTree


class Small(Method[Minimization, Point]):
    """Base of the small methods."""

    solves = (Minimization,)

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Point:
        return Point(x0)

    def slope(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        """Phase: the gradient over all of the client's samples."""
        return gradient(client.mean(problem.loss, key, None), x)


@kit_method
class Averaging(Small):
    """The mean of the clients' points after local steps, `around` their start."""

    gamma: Positive
    H: LocalSteps = 2
    batch_size: BatchSize = None

    def steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        """Phase: local steps; if ``H`` is an array, a client takes its own number."""

        def step(z: PyTree, key: Key) -> PyTree:
            return tree.axpy(-self.gamma, gradient(client.mean(problem.loss, key, self.batch_size), z), z)

        return loop(steps_of(self.H, client), step, key, x)

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """One average; clients without steps have weight zero."""
        return Point(fed.average(self.steps, key, state.x, weights=fed.at_work(self.H), around=state.x))


@kit_method
class Gathering(Small):
    """Gathered replies of the cohort, of some clients by number, and of a single client."""

    gamma: Positive

    def reveals_on(self, problem: Minimization) -> Reveals:
        return "replies"

    def tell(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> dict[str, Any]:
        """Phase: a direction, and integers."""
        return {"slope": self.slope(problem, client, key, x), "index": client.index, "size": client.size}

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """Directions weighted by hand, and also those of clients 1 and 4 and of client 2."""
        every = fed.gather(self.tell, key, state.x)
        weights = fed.cohort_weights * every["size"] * (1 + every["index"])
        mean = jax.tree.map(lambda g: jnp.tensordot(weights / weights.sum(), g, 1), every["slope"])
        some = fed.gather(self.slope, key, state.x, of=jnp.array([1, 4]))
        apart = jax.tree.map(lambda g: g[1] - 2 * g[0], some)
        single = fed.average(self.tell, key, state.x, of=jnp.array([2]))  # the mean of an integer is real
        given = fed.average(self.tell, key, state.x, of=jnp.array([0, 3]), weights=jnp.array([3, 1]))
        lone = tree.scale(0.1 * single["size"], single["slope"])
        directions = (mean, tree.scale(0.1, apart), lone, tree.scale(given["index"], given["slope"]))
        return Point(tree.axpy(-self.gamma, jax.tree.map(lambda *g: sum(g), *directions), state.x))


@kit_method
class Remembering(Small):
    """Clients remember the last direction and a count, and reply with these."""

    gamma: Positive

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> dict[str, Any]:
        return {"last": tree.zeros_like(x0), "calls": jnp.zeros((), jnp.int32)}

    def output(self, state: Point, memory: PyTree) -> tuple[PyTree, PyTree]:
        """See `Method.output`: y is the clients' memory."""
        return state.x, memory

    def learn(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        """Phase: remember the mean of the memory and a noisy direction; upload the change."""
        drawn = gradient(client.mean(problem.loss, key, 2), x)
        new = tree.lerp(0.5, client.memory["last"], drawn)
        return Remember(
            tree.sub(new, client.memory["last"]), {"last": new, "calls": client.memory["calls"] + 1}
        )

    def recall(self, problem: Minimization, client: Client, key: Key) -> PyTree:
        """Phase: upload the memory, unchanged, without a message."""
        return client.memory["last"]

    def start(self, problem: Minimization, fed: Fed, key: Key, state: Point) -> Point:
        """All clients learn once before the first round."""
        return Point(tree.axpy(-self.gamma, fed.average(self.learn, key, state.x), state.x))

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """The cohort learns, then clients 0 and 3 again; then all clients recall."""
        changed = fed.average(self.learn, key, state.x)
        fed.average(self.learn, jax.random.fold_in(key, 1), state.x, of=jnp.array([0, 3]))
        with fed.everybody():
            mean = fed.average(self.recall, key)
        return Point(tree.axpy(-self.gamma, tree.axpy(fed.cohort_share, changed, mean), state.x))


@kit_method
class Repeating(Small):
    """Loops with exchanges, of known, traced and open length, with memory and levels in the ledger."""

    gamma: Positive

    def reveals_on(self, problem: Minimization) -> Reveals:
        return "replies"

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Array:
        """See `Method.memory`: the number of calls of a client."""
        return jnp.zeros((), jnp.int32)

    def output(self, state: Point, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, memory

    def call(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        """Phase: a direction whose length grows with the number of calls."""
        slope = self.slope(problem, client, key, x)
        return Remember(tree.scale(1 + 0.1 * client.memory, slope), client.memory + 1)

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """Two turns, r turns, and turns with gathered replies until the point is near."""

        def turn(t: Integer, x: PyTree) -> PyTree:
            with fed.level("lower"):
                mean = fed.average(self.call, jax.random.fold_in(key, t), x, of=jnp.array([1, 3]))
            return tree.axpy(-self.gamma, mean, x)

        def last(t: Integer, x: PyTree) -> PyTree:
            with fed.level("step"):
                every = fed.gather(self.call, jax.random.fold_in(key, t), x)
            return tree.axpy(-self.gamma, jax.tree.map(lambda g: g.mean(0), every), x)

        x = fed.repeat(2, turn, state.x)
        x = fed.repeat(r, turn, x)
        x = fed.repeat(3, last, x, until=lambda x: x["w"][0] < 0.35)
        return Point(tree.axpy(-self.gamma, fed.average(self.slope, key, x, around=x), x))


@kit_method
class Drawing(Small):
    """Second draws: some of the cohort, a new cohort, and the whole cohort."""

    gamma: Positive
    draws: Count = 3

    def noisy(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        """Phase: a gradient on two validation samples."""
        return gradient(client.valid.mean(problem.loss, key, 2), x)

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """A step along the mean of each draw."""
        draws = (lambda key: fed.sample(key, 2), fed.redraw, lambda key: fed.sample(key, fed.participants))
        x = state.x
        for own, draw in zip(jax.random.split(key, self.draws), draws, strict=False):
            x = tree.axpy(-self.gamma, fed.average(self.noisy, own, x, of=draw(own)), x)
        return Point(x)


@kit_method
class Personalizing(Method[Personalized, Point]):
    """A personal model of each client, which metrics read; the server has its own samples."""

    gamma: Positive

    solves = (Personalized,)

    def init(self, problem: Personalized, x0: PyTree, y0: PyTree) -> Point:
        return Point(x0)

    def memory(self, problem: Personalized, x0: PyTree, y0: PyTree) -> PyTree:
        return y0

    def output(self, state: Point, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, memory

    def fit(self, problem: Personalized, client: Client, key: Key, x: PyTree) -> Remember:
        """Phase: a step of the personal model; upload its distance vector from x, and the coupling."""
        slope = gradient(client.mean(problem.client, key, None), x, client.memory, wrt=1)
        y = tree.axpy(-self.gamma, slope, client.memory)
        return Remember((tree.sub(x, y), problem.couple(x, y, client)), y)

    def round(self, problem: Personalized, fed: Fed, key: Key, r: Integer, state: Point) -> Point:
        """A step on the server's samples, and towards the personal models by their coupling."""
        assert fed.server is not None
        pull, coupling = fed.average(self.fit, key, state.x)
        slope = gradient(fed.server.mean(problem.server, key, 2), state.x)
        return Point(tree.axpy(-self.gamma, tree.axpy(jnp.tanh(coupling), pull, slope), state.x))


def loss(x: PyTree, sample: PyTree) -> Array:
    """Half the squared distance to the sample."""
    return 0.5 * ((x["w"] - sample["a"]) ** 2).sum() + 0.5 * (x["c"] - sample["b"]) ** 2


def coupling(x: PyTree, y: PyTree, client: Client) -> Array:
    """A coupling that differs between clients."""
    return client.fraction * ((x["w"] - y["w"]) ** 2).sum() + 0.1 * client.index * (x["c"] - y["c"]) ** 2


def falling(r: Integer) -> Real:
    """A decreasing step size."""
    return 0.1 / (r + 1)


@stochastic
def noisy(x: PyTree, sample: PyTree, key: Key | None) -> Array:
    """The same with a random gradient noise."""
    noise = 0.0 if key is None else jax.random.normal(key)
    return loss(x, sample) + 0.1 * noise * (x["w"].sum() - x["c"])


def shifted(sample: PyTree, key: Key) -> PyTree:
    """A sample with a random shift."""
    return {**sample, "a": sample["a"] + 0.1 * jax.random.normal(key, sample["a"].shape)}


quadratic = Minimization(loss)
personal = Personalized(loss, coupling, lambda x, y, s: loss(y, s) + 0.5 * (x["c"] - y["c"]) ** 2)
clients = samples(0, sizes=(1, 7, 3, 2, 4), features=2)  # padded in three groups
data = FederatedData.from_clients(clients)
validated = FederatedData.from_clients(clients, valid=samples(1, sizes=(2, 1, 3, 2, 5), features=2))
served = FederatedData.from_clients(clients, server=samples(2, features=2)[0])
x0 = {"w": np.array([1.0, -1.0]), "c": np.array(0.5)}


def row(name: str, method: Method, data: FederatedData = data, **solve: Any) -> Case:
    """A case whose participation and weights are those of the run."""
    return Case(name, method, quadratic, data, x0, participation=None, solve=solve)


_drawn = Case(
    "noise and augmentation", Averaging(0.1), Minimization(noisy),
    data.augmented(shifted), x0, participation=None, solve={"participation": 3},
)  # fmt: skip


CONFORMANCE = (
    row("minibatches of some", Averaging(0.1, batch_size=2), participation=3),
    _drawn,
    row("everyone by size", Averaging(0.1), weights="size"),
    row("some by size", Averaging(falling, np.array([0, 1, 2, 1, 0])), participation=3, weights="size"),
    row("replies", Gathering(0.05), participation=3, metrics={"apart": per_client(loss, each=True)}),
    row("memories", Remembering(0.1), participation=3),
    row("loops", Repeating(0.1)),
    row("second draws", Drawing(0.1), validated),
    row("second draws by size", Drawing(0.1, draws=2), validated, participation=4, weights="size"),
    row(
        "noise, and some drop out",
        Remembering(0.1),
        participation=3,
        dropouts=Dropouts(0.3),
        channel=Channel(Adaptive(0.3, noise=0.5), noise=0.5),
    ),
    row(
        "independent draws, compressed",
        Averaging(0.1),
        participation=Poisson(0.5, capacity=4),
        channel={"*": Channel(compress=TopK(0.5))},
    ),
    Case("personal models", Personalizing(0.1), personal, served, x0, x0, participation=None),
)
