"""Where a method runs: simulated (default), sharded over devices, or one client at a time for debugging."""

from __future__ import annotations

from fedstrata.core.fed import ClientError, Engine
from fedstrata.engines.debug import Debug
from fedstrata.engines.sharded import Sharded
from fedstrata.engines.simulated import Simulated

ENGINES: dict[str, type[Engine]] = {"simulated": Simulated, "sharded": Sharded, "debug": Debug}


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


__all__ = ["ENGINES", "ClientError", "Debug", "Engine", "Sharded", "Simulated", "engine_of"]
