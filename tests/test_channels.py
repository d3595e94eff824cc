"""Channels: what they are to change and nothing else, against closed forms; and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fedstrata as fs
from fedstrata.engines.rounds import before_rounds, one_round
from fedstrata.engines.simulated import Simulated
from fedstrata.solving.pose import pose
from fedstrata.support.private_jax import dce_jaxpr
from fedstrata.testing.cases import all_cases

CASES = {case.name: case for case in all_cases()}
QUICK = ("scaffold", "feddro", "fedmsa", "fednest")  # memory, a loop, a draw, an open loop


def rounds_of(case, **changes):
    """The equations of the start and of a round on which the method's own state and memory depend."""
    options = {"rounds": 1, "y0": case.y0, **case.solve, **changes}
    posed = pose(case.problem, case.method, case.data, case.x0, **options)
    make_fed, key, placed = Simulated().make_fed(), jax.random.key(0), case.data.placed()

    def text(method, state, memory, data, r):
        from fedstrata.channels.channelled import own
        from fedstrata.engines.engine import Carry

        carry = Carry(state, memory)
        if method.starts():
            carry = before_rounds(make_fed, posed.setup, method, carry, key, data)
        return own(one_round(make_fed, posed.setup, method, carry, key, data, r))

    jaxpr = jax.make_jaxpr(text)(posed.method, *posed.carry, placed, jnp.int32(0)).jaxpr
    return str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_an_empty_channel_is_the_same_program(name):
    """Without what nothing depends on: so it has the same iterates, bit for bit."""
    case = CASES[name]
    assert rounds_of(case, channel=fs.Channel()) == rounds_of(case)
