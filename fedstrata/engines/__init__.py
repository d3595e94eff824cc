"""Where a method runs: simulated (default), streamed, sharded over devices, one by one, or at real sites."""

from typing import TYPE_CHECKING

from fedstrata.support.lazy import lazy

if TYPE_CHECKING:  # for type checkers, and for `lazy`, which imports a name when it is used
    from fedstrata.engines.debug import Debug as Debug
    from fedstrata.engines.engine import ENGINES as ENGINES
    from fedstrata.engines.engine import ClientError as ClientError
    from fedstrata.engines.engine import Engine as Engine
    from fedstrata.engines.engine import engine_of as engine_of
    from fedstrata.engines.sharded import PeerLost as PeerLost
    from fedstrata.engines.sharded import Sharded as Sharded
    from fedstrata.engines.sharded import connect as connect
    from fedstrata.engines.simulated import Simulated as Simulated
    from fedstrata.engines.streamed import Streamed as Streamed
else:
    __getattr__, __dir__ = lazy(__name__)
