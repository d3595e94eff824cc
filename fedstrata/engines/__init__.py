"""Where a method runs: simulated (default), streamed, sharded over devices, one by one, or at real sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedstrata.engines.debug import Debug
from fedstrata.engines.engine import ClientError, Engine
from fedstrata.engines.sharded import PeerLost, Sharded, connect
from fedstrata.engines.simulated import Simulated
from fedstrata.engines.streamed import Streamed
from fedstrata.support.words import misspelt


def _network() -> Engine:
    from fedstrata.engines.network import Network  # only who uses it waits for it

    return Network()


ENGINES: dict[str, Callable[[], Engine]] = {
    "simulated": Simulated,
    "streamed": Streamed,
    "sharded": Sharded,
    "debug": Debug,
    "network": _network,
}


def engine_of(engine: str | Engine, streamed: bool = False) -> Engine:
    """An engine from its name, or the engine itself; ``streamed`` data changes what the default is."""
    if streamed and engine == "simulated":
        return Streamed()
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
    "Streamed",
    "connect",
    "engine_of",
]

if not TYPE_CHECKING:  # to which a module with a __getattr__ has every name
    __getattr__ = misspelt(__name__)
