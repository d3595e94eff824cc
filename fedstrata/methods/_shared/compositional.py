"""Shared by the methods for compositions: phases that evaluate a level and pull cotangents back."""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Method, Reveals, StateT, by_options
from fedstrata.core.types import Key, Phase, PyTree
from fedstrata.estimators import compositional as c
from fedstrata.problems.classes import Composition
from fedstrata.problems.levels import ARITHMETIC, Tracker, tracker_of


def level_mean(fed: Fed, tracker: Tracker, phase: Phase, key: Key, *message: PyTree) -> PyTree:
    """The clients' mean on the level's scale; on the logarithmic scale this needs every reply."""
    if tracker is ARITHMETIC:
        return fed.average(phase, key, *message)
    return tracker.mean(fed.gather(phase, key, *message), fed.cohort_weights)


def revealed_by_levels(problem: Composition) -> Reveals:
    """The uploads that `level_mean` reveals for a composition."""
    plain = all(tracker_of(level) is ARITHMETIC for level in c.chain_of(problem).inner)
    return "averages" if plain else "replies"


class State(NamedTuple):
    """The server's iterate."""

    x: PyTree


class Chained:
    """Phases that evaluate the levels of a composition, and the exchanges that average them."""

    def drawn(self, problem: Composition, client: Client, key: Key) -> c.Drawn:
        """The composition on samples of a client."""
        raise NotImplementedError

    def value_of_level(self, problem: Composition, client: Client, key: Key, at: c.Values) -> PyTree:
        """gⁿ on a client's samples; ``at`` is z^{n−1} after n − 1 times None, so its length gives n."""
        return self.drawn(problem, client, key).value(len(at) - 1, at[-1])

    def pull(
        self, problem: Composition, client: Client, key: Key, values: c.Values, pulled: c.Values
    ) -> PyTree:
        """The next cotangent on a client's samples."""
        return self.drawn(problem, client, key).pull(values, pulled)

    def values_at(self, problem: Composition, fed: Fed, key: Key, phase: Phase, message: PyTree) -> c.Values:
        """The values of all tracked levels, one exchange each; ``phase`` computes the first."""
        values: c.Values = ()
        for n, level in enumerate(c.chain_of(problem).inner):
            if n > 0:
                phase, message = self.value_of_level, (*[None] * n, values[-1])
            values = (*values, level_mean(fed, tracker_of(level), phase, key, message))
        return values

    def cotangents(self, problem: Composition, fed: Fed, key: Key, values: c.Values) -> c.Values:
        """The cotangents that need the clients' mean, one exchange each; empty if f is known and N = 1."""
        pulled: c.Values = ()
        for _ in range(c.chain_of(problem).pulls):
            pulled = (*pulled, fed.average(self.pull, key, values, pulled))
        return pulled


class Compositional(Chained, Method[Composition, StateT]):
    """Base of the methods for ``h(x) + f(g(x))``; see `fedstrata.estimators.compositional`."""

    batch_size: BatchSize

    solves = (Composition,)
    needs = "gradients, products with the Jacobian of g"

    @classmethod
    def refuses(cls, problem: Composition) -> str | None:
        if c.chain_of(problem).inner:
            return None
        return (
            f"{cls.__name__} tracks an inner mean g over clients, but this Composition does not have one: "
            "its levels are known to the server, or it has a single mean. Use Minimization."
        )

    @by_options
    def reveals_on(self, problem: Composition) -> Reveals:
        return revealed_by_levels(problem)

    def drawn(self, problem: Composition, client: Client, key: Key) -> c.Drawn:
        """The composition on a client's minibatch."""
        return c.chain_of(problem).drawn(client, key, self.batch_size)

    def value_and_keep(self, problem: Composition, client: Client, key: Key, x: PyTree) -> Remember:
        """g¹ on a client's samples; the client remembers x."""
        return Remember(self.value_of_level(problem, client, key, (x,)), x)


class AlongTheMean(Compositional[State]):
    """Base of the methods that step along the gradient of h_B + f(g_B), B the clients' minibatches."""

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> PyTree:
        return x0

    def direction(self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree) -> PyTree:
        """A client's part of the gradient, at the x that it remembers."""
        return self.drawn(problem, client, key).direction(client.memory, y, pulled)

    def gradient(self, problem: Composition, fed: Fed, key: Key, x: PyTree) -> PyTree:
        """The gradient, in one exchange of values per level and one of directions."""
        y = self.values_at(problem, fed, key, self.value_and_keep, x)
        return fed.average(self.direction, key, y, self.cotangents(problem, fed, key, y))
