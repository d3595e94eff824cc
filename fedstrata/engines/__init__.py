"""Where a method runs: simulated (default), sharded over devices, one client at a time, or at real sites."""

from __future__ import annotations

from collections.abc import Callable

from fedstrata.core.fed import ClientError, Engine
from fedstrata.engines.debug import Debug
from fedstrata.engines.sharded import PeerLost, Sharded, connect
from fedstrata.engines.simulated import Simulated


def _network() -> Engine:
    from fedstrata.engines.network import Network  # only who uses it waits for it

    return Network()


ENGINES: dict[str, Callable[[], Engine]] = {
    "simulated": Simulated,
    "sharded": Sharded,
    "debug": Debug,
    "network": _network,
}


def engine_of(engine: str | Engine) -> Engine:
    """An engine from its name, or the engine itself."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise TypeError(f"engine must be a name or an engine object, but is {engine!r}.")
    if engine not in ENGINES:
        raise ValueError(
            f"There is no engine {engine!r}. Choose one of {sorted(ENGINES)}, or give an engine object."
        )
    return ENGINES[engine]()


__all__ = [
    "ENGINES",
    "ClientError",
    "Debug",
    "Engine",
    "PeerLost",
    "Sharded",
    "Simulated",
    "connect",
    "engine_of",
]
