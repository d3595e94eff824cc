"""Methods on real sites: the same text at a server and at sites, and only numbers between them.

`Network` is the engine; its sites are in this process, or elsewhere behind a `Transport`. Only `grpc_server`,
`grpc_site` and `kits` need an extra, ``fedstrata[network]``, and `flare` needs ``fedstrata[flare]``.
"""

from __future__ import annotations

from fedstrata.engines.network.engine import AtSites, Network, Policy, Remote, RoundFailed, TooFewSites
from fedstrata.engines.network.site import Place, Site
from fedstrata.engines.network.states import SiteRefused
from fedstrata.engines.network.text import Text
from fedstrata.engines.network.transport import Failure, Local, Request, Transport
from fedstrata.engines.network.wire import WireError

__all__ = [
    "AtSites", "Failure", "Local", "Network", "Place", "Policy", "Remote", "Request", "RoundFailed", "Site",
    "SiteRefused", "Text", "TooFewSites", "Transport", "WireError",
]  # fmt: skip
