"""Programs that call out to the host: what they need of the machine."""

from __future__ import annotations

import jax

from fedstrata.support.threads import cores


class TooFewThreads(RuntimeError):
    """A machine on which JAX's callbacks can hang."""


def need_two_threads(what: str) -> None:
    """A CPU's callbacks hang where JAX's only thread waits for what it has to copy: say so before.

    Args:
        what: needs them, as the beginning of a sentence.

    Raises:
        TooFewThreads: where there is one.
    """
    if jax.default_backend() == "cpu" and max(cores(), jax.local_device_count()) < 2:
        raise TooFewThreads(
            f"{what} need two threads of JAX, and this process has one core. "
            "Set JAX_NUM_CPU_DEVICES=2 before it starts."
        )
