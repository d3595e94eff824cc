"""Where a method runs: simulated (default), sharded over devices, or one client at a time for debugging."""

from __future__ import annotations

from typing import Any

from fedstrata.engines.base import ClientError, Engine
from fedstrata.engines.debug import Debug
from fedstrata.engines.sharded import Sharded
from fedstrata.engines.simulated import Simulated

ENGINES: dict[str, Any] = {"simulated": Simulated, "sharded": Sharded, "debug": Debug}


def engine_of(engine: Any) -> Any:
    """An engine from its name or an object that has an engine's methods."""
    if isinstance(engine, str):
        if engine not in ENGINES:
            raise ValueError(
                f"There is no engine {engine!r}. Choose one of {sorted(ENGINES)}, or give an engine object."
            )
        return ENGINES[engine]()
    if not all(hasattr(engine, name) for name in ("place", "begin", "advance")):
        raise TypeError(f"engine must be a name or an engine object, but is {engine!r}.")
    return engine


__all__ = ["ENGINES", "ClientError", "Debug", "Engine", "Sharded", "Simulated", "engine_of"]
