"""A site's process that takes part in every row of the cases, one after the other, without a new start.

`python -m tests.network.rows KIT ADDRESS NUMBER FOLDER`
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedstrata.channels import Channel
from fedstrata.engines.network import Text
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import made_up
from fedstrata.engines.network.grpc_site import serve
from fedstrata.engines.network.host import Host, form_of
from fedstrata.engines.network.kits import Identity
from fedstrata.solving.pose import pose
from fedstrata.testing.cases import CLIENTS, Case, all_cases

SITES = ("berlin", "lyon", "turin")
SHARES = np.array_split(np.arange(CLIENTS), len(SITES))  # two clients, two, and one
SHARING = "lyon"  # lets others have what its clients remember


def rows() -> list[Case]:
    """Every row, FedDRO with ten exchanges a round, and secure sums."""
    found = all_cases()
    feddro = next(case for case in found if case.name == "feddro")
    secure = next(case for case in found if case.name == "scaffold")
    channel = Channel(clip=64.0, secure=True)
    return [
        *found,
        replace(feddro, name="feddro-10", method=replace(feddro.method, I=10)),
        replace(secure, name="scaffold-secure", solve={"channel": channel}),
    ]


def posed(case: Case, data: Any) -> Any:
    options = {k: v for k, v in case.solve.items() if k in ("weights", "participation", "channel")}
    return pose(case.problem, case.method, data, case.x0, y0=case.y0, rounds=case.rounds, seed=1, **options)


@dataclass(frozen=True)
class Opened:
    case: Case
    data: Any

    def text(self, clients: int, server: Any) -> tuple[Text, dict[str, Any]]:
        run = posed(self.case, replace(made_up(form_of(self.data), clients), server=server))
        return Text.of(run.setup, run.method, run.carry, server), run.common


def main(kit: str, address: str, number: str, folder: str) -> None:
    cases, own = rows(), SHARES[int(number)]

    def opens(n: int) -> Opened:
        jax.clear_caches()  # the programs of the last row
        gc.collect()
        return Opened(cases[n], part(cases[n].data, own))

    host = Host(
        {},
        opens,
        Path(folder),
        share=SITES[int(number)] == SHARING,
        once=True,
        identity=Identity(Path(kit), SITES),
    )
    serve(host, Path(kit), address)


if __name__ == "__main__":
    main(*sys.argv[1:])
