"""`benchmarks.network` inside an NVIDIA FLARE job: three sites, mutual TLS, loopback."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.flare_system import ADMIN, System
from benchmarks.network import SITES, SIZES, BenchHost, Opened, measured, show

try:
    from nvflare.collab import collab
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from fedstrata.engines.network import flare
except ImportError:
    print('Left out, as NVIDIA FLARE is not installed: pip install "fedstrata[flare]"\n')
    raise SystemExit(0) from None


class BenchSite(flare.Answering):
    """A site's part of the job."""

    def host(self, kit: Path, name: str) -> BenchHost:
        """See `flare.Answering.host`."""
        sizes = list(SIZES.values())
        return BenchHost("bench", lambda n: Opened(sizes[n]), kit / "fedstrata")


class BenchServer:
    """The server's part of the job."""

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """Time, and leave the times in the job's folder."""
        rows = list(measured(flare.FlareServer(SITES)))
        (flare.folders()[1] / "times.json").write_text(json.dumps(rows), "utf-8")


def prepared(system: System) -> None:
    """Allow the job at every party, and start them."""
    for party in system.parties:
        flare.allow(system.kits / party, (BenchServer, BenchSite))
        system.start(party)


def times(system: System) -> Iterable[Any]:
    """One job, to its end."""
    made = flare.job("times", SITES, BenchServer(), BenchSite(), {})
    made.set_app_packages(["fedstrata", "benchmarks"])
    session = new_secure_session(ADMIN, str(system.kits / ADMIN), timeout=60.0)
    try:
        made.export_job(str(system.folder / "jobs"))
        number = session.submit_job(str(system.folder / "jobs" / "times"))
        session.monitor_job(number, 600.0)
        found = Path(session.download_job_result(number, str(system.folder / "results")))
    finally:
        session.close()
    return json.loads(next(found.rglob("times.json")).read_text("utf-8"))


def main() -> None:
    """Start a system, time, end it by its processes' ids."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as name:
        system = System(Path(name), SITES, os.environ | {"PYTHONPATH": root})
        try:
            prepared(system)
            found = times(system)
        finally:
            system.close()
    print("An exchange with three sites inside an NVIDIA FLARE job on loopback, median ms")
    show(found)


if __name__ == "__main__":
    # FLARE finds the parts by the name of this module, which is another one where it is the main one.
    from benchmarks.network_flare import main as named

    named()
