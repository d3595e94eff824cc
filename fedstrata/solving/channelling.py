"""Add channels and dropouts to a posed run, with the privacy that they cost."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedstrata.channels.channel import Channel, Channels, Dropouts, check_channels, given_by
from fedstrata.channels.channelled import channelled, check_late, hidden, resolved
from fedstrata.channels.link import LEAST_SUM
from fedstrata.channels.privacy import Budget, OfClients, accountant
from fedstrata.channels.privacy_of_samples import OfSamples
from fedstrata.channels.sent import Sent
from fedstrata.core.fed import Setup
from fedstrata.engines.engine import Carry
from fedstrata.engines.outline import outline

if TYPE_CHECKING:
    from fedstrata.solving.pose import Posed


def with_channels(
    posed: Posed, channel: Channels | None, dropouts: Dropouts | None, late: bool = False
) -> Posed:
    """Add channels and dropouts to a run, or refuse them before anything is computed."""
    check_channels(channel)
    setup, method, data = posed.setup, posed.methods[0], posed.data
    if not (dropouts is None or isinstance(dropouts, Dropouts)):
        raise TypeError(f"dropouts must be fs.Dropouts(probability), but is {dropouts!r}.")
    if dropouts is not None and method.full_participation is not None:
        raise ValueError(
            f"{type(method).__name__} needs every client in each round: {method.full_participation}"
        )
    if dropouts is not None:
        dropouts.check(setup.clients)
    sent = outline(setup, method, data, posed.carry)
    if late:
        check_late(method, sent)
    channels = resolved(channel, method, sent)
    if hidden(channel, sent):
        _check_secure(setup, dropouts)
        setup = replace(setup, secure=True)
        posed = replace(posed, setup=setup)
    noisy = any(one.noise is not None for one in channels.values())
    expected = setup.rate * setup.clients if setup.rate is not None and noisy else None
    spending = _spending(_costs(posed, channel, channels, sent, dropouts))
    wrapped, carry = channelled(method, channels, dropouts, sent, posed.carry, setup.clients, expected, late)
    stands_for: Any = wrapped
    described = wrapped.described()
    posed = replace(posed, method=stands_for, carry=Carry(*carry), spending=spending, channels=described)
    if spending is not None and posed.until < posed.rounds:
        warnings.warn(
            f"The budget epsilon={spending.budget:g} at delta={spending.delta:g} is enough for "
            f"{posed.until} of {posed.rounds} rounds, after which the run stops. fs.plan_privacy finds the "
            "noise for all of them.",
            stacklevel=5,
        )
    return posed


def _check_secure(setup: Setup, dropouts: Dropouts | None) -> None:
    if dropouts is not None or setup.rate is not None:
        raise ValueError(
            "secure=True needs clients that do not drop out: the difference between a sum with a client and "
            "without it is its upload. Leave dropouts= and fs.Poisson out."
        )
    if setup.participants < LEAST_SUM:
        raise ValueError(
            f"secure=True needs at least {LEAST_SUM} clients in a round: of two, each learns the other's "
            f"upload from the sum. Here {setup.participants} take part."
        )


def _costs(
    posed: Posed, channel: Channels | None, channels: dict[str, Channel], sent: list[Sent],
    dropouts: Dropouts | None,
) -> Budget | None:  # fmt: skip
    """The privacy cost of the run: for single samples if these are private, else for clients."""
    data, given = posed.data, given_by(channel)
    if not any(one.noisy or one.epsilon is not None for one in given):
        return None
    if examples := {place: one.examples for place, one in channels.items() if one.examples is not None}:
        sent = outline(posed.setup, posed.methods[0], data, posed.carry, examples)
        sizes = {"train": data.sizes}
        if data.valid_sizes is not None:
            sizes["valid"] = data.valid_sizes
        return OfSamples.of(given, channels, sent, sizes)
    return OfClients.of(given, channels, sent, posed.setup, dropouts)


def _spending(costs: Budget | None) -> Budget | None:
    """Return the privacy budget, or warn that ε is not known."""
    if costs is None:
        return None
    if costs.bare is None:
        try:
            if costs.drawn:
                accountant()
            return costs
        except ImportError as error:
            if costs.budget is not None:
                raise
            reason = str(error)
    else:
        reason = f"{costs.bare[0].upper()}{costs.bare[1:]}."
    warnings.warn(f"There is noise, but the history has no epsilon. {reason}", stacklevel=6)
    return None
