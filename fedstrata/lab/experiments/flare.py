"""An experiment inside NVIDIA FLARE: what each party prepares, the two parts of a job, and its submission.

What a site does with which data is said at the site (`prepare`), never in a job: a job names two classes of
this package and holds no code. A run outlives its jobs: where one ends without a result, since a site was
lost, the next continues from the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedstrata.engines.engine import Unfinished
from fedstrata.engines.identity import differences
from fedstrata.engines.network.engine import RoundFailed
from fedstrata.engines.network.host import Host
from fedstrata.lab.experiments.approval import host_of
from fedstrata.lab.experiments.net import execute, plan_of, refuse_runs, run_name
from fedstrata.lab.experiments.networked import Server, opener_of_site, terms_of
from fedstrata.lab.experiments.runner import PreparedExperiment
from fedstrata.lab.experiments.settings import settings_of

try:
    from nvflare.collab import collab
    from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

    from fedstrata.engines.network import flare
except ImportError as error:
    raise ValueError(f'This needs `pip install "fedstrata[flare]"` ({error}).') from error

Say = Callable[[str], None]
MOST_JOBS = 20  # of one run, before somebody should look
MISSED = 10  # looks, a second apart, after which a job that the server does not have is given up
MOST_SILENT = 3  # of these, one after the other, without a word of the server's part
RESULT, OUTCOME = "fedstrata", "outcome.json"


@dataclass(frozen=True)
class Party:
    """A party's own settings, kept in ``local/fedstrata.json`` of its kit.

    Attributes:
        data, label, valid_fraction, simulated: a site's samples, as in `fedstrata net site`.
        share: whether what clients remember may be fetched.
        out: the server's folder for runs.
        quick, seeds, set: of the experiment.
        folder: where it was said; data is found from there.
    """

    data: str | None = None
    label: str = "y"
    valid_fraction: float = 0.0
    simulated: bool = False
    share: bool = False
    out: str | None = None
    quick: bool = False
    seeds: int | None = None
    set: Sequence[str] = ()
    folder: str = "."

    @classmethod
    def of(cls, kit: Path) -> Party:
        """The settings in a kit."""
        file = kit / "local" / "fedstrata.json"
        if not file.is_file():
            raise ValueError(f"{kit} is not prepared: `fedstrata net flare {kit}`.")
        return cls(**json.loads(file.read_text("utf-8")))

    def plan(self, kit: Path) -> PreparedExperiment:
        """The experiment, from the kit."""
        return plan_of(settings_of(kit).experiment, kit, self.quick, self.seeds, list(self.set))

    def host(self, kit: Path, name: str) -> Host:
        """The site, whose data has been checked."""
        names, definition = settings_of(kit).sites, self.plan(kit).experiment
        own = self.data, self.label, self.valid_fraction, self.simulated, Path(self.folder)
        opens, _ = opener_of_site(definition, names, name, *own)
        steady = self.data is not None
        return host_of(kit, kit / "fedstrata", definition, opens, steady=steady, share=self.share)


def prepare(kit: Path, party: Party, say: Say) -> None:
    """Check a party, and allow the two parts of a job there.

    Raises:
        ValueError: if the folder is not a kit of FLARE's provisioning, or the data does not fit.
    """
    from fedstrata.engines.network.kits import name_of

    if not (kit / "local").is_dir() or not (kit / "startup").is_dir():
        raise ValueError(f"{kit} is not a kit of FLARE's provisioning: it has no startup and local folders.")
    if (kit / "startup" / "server.crt").is_file():
        words = f"server of {party.plan(kit).experiment.name}"
    else:
        name = name_of(kit)
        opened = party.host(kit, name).opens(0)
        words = f"{name}: {opened.data!r} fits"
    (kit / "local" / "fedstrata.json").write_text(json.dumps(asdict(party), indent=2) + "\n", "utf-8")
    file = flare.allow(kit, (ServerPart, SitePart))
    say(f"{words}; allowed in {file}, which no longer sends error logs to the server.")
    say("Start FLARE as usual (again, where it is running).")


class SitePart(flare.Answering):
    """A site's part of a job."""

    def host(self, kit: Path, name: str) -> Host:
        """As this site has said."""
        return Party.of(kit).host(kit, name)


class ServerPart:
    """The server's part of a job."""

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        """The experiment, from its checkpoint if there is one; its outcome is told in the job's folder."""
        kit, folder = flare.folders()
        state, words = "stopped", ""
        try:
            self._run(kit, folder)
            state = "done"
        except RoundFailed as failed:
            lost = all(failure.kind in ("late", "away") for failure in failed.failures.values())
            state, words = ("again" if lost else "stopped"), str(failed)
            raise
        except flare.JobAborted as error:
            state, words = "aborted", str(error)
            raise
        except Exception as error:
            words = str(error)
            raise
        finally:
            (folder / OUTCOME).write_text(json.dumps({"state": state, "words": words}), "utf-8")

    def _run(self, kit: Path, folder: Path) -> None:
        party, settings = Party.of(kit), settings_of(kit)
        plan = party.plan(kit)
        if other := differences(collab.get_app_prop("terms"), terms_of(plan.experiment)):
            raise ValueError(f"The job (there) is not what the server (here) runs: {'; '.join(other)}.")
        resume = bool(collab.get_app_prop("resume", False))
        out = Path(party.out) if party.out else kit / "runs" / plan.experiment.name
        if not resume:
            refuse_runs(out)
        transport = flare.FlareServer(settings.sites, settings.message_bytes)
        server = Server(plan.experiment, transport, run_name(out), settings.policy, settings.anew)
        execute(server, plan, out, "fedstrata net run", fresh=not resume)
        shutil.copytree(out, folder / RESULT, ignore=shutil.ignore_patterns("unfinished"))


def submit(kit: Path, plan: PreparedExperiment, out: Path, resume: bool, say: Say) -> None:
    """Submit a job and see it through: where it ends since a site was lost, submit the next one.

    Args:
        kit: an administrator's, of FLARE's provisioning, with federation.toml.
        plan: the experiment, which every party must have as well.
        out: where the report goes.
        resume: whether to continue with what the server has.
        say: is told what happens.

    Raises:
        Unfinished: if the run cannot continue.
    """
    sites = settings_of(kit).sites
    if (out / "report.html").exists() and not resume:
        raise ValueError(f"{out} has a report already: --resume continues it, or give another --out.")
    logging.getLogger("nvflare").setLevel(logging.WARNING)
    user = json.loads((kit / "startup" / "fed_admin.json").read_text("utf-8"))["admin"]["username"]
    facts = {"terms": terms_of(plan.experiment)}
    words, silent = "", 0
    for _ in range(MOST_JOBS):
        made = flare.job(plan.experiment.name, sites, ServerPart(), SitePart(), {**facts, "resume": resume})
        outcome = _one(made, user, kit, out, say)
        words, resume = outcome.get("words", ""), True
        if outcome["state"] == "done":
            say(f"Report: {(out / 'report.html').resolve()}")
            return
        silent = silent + 1 if outcome["state"] == "silent" else 0
        if outcome["state"] == "stopped" or silent == MOST_SILENT:
            raise Unfinished(f"{words} `--resume` continues the run.")
        say(f"The job ended without a result ({words}). The next continues from the checkpoint.")
    raise Unfinished(
        f"{MOST_JOBS} jobs ended without a result; the last: {words}. `--resume` continues the run."
    )


class _Admin:
    """An administrator's session, opened again where FLARE's server was gone."""

    def __init__(self, user: str, kit: Path, say: Say) -> None:
        self.user, self.kit, self.say = user, kit, say
        self.session = self._opened()

    def _opened(self) -> Session:
        while True:
            try:
                return new_secure_session(self.user, str(self.kit))
            except Exception as error:  # the server may not be up yet
                self.say(f"waiting for FLARE's server ({type(error).__name__}: {error})")
                time.sleep(5.0)

    def reopen(self) -> None:
        """A new session; its threads would keep the process from ending if the old one stayed open."""
        self.close()
        self.session = self._opened()

    def close(self) -> None:
        """Hang up, whatever a lost connection raises."""
        with contextlib.suppress(Exception):
            self.session.close()

    def abort(self, number: str) -> None:
        """End a job; nothing happens if it does not run."""
        with contextlib.suppress(Exception):
            self.session.abort_job(number)

    def has(self, number: str) -> bool:
        """Whether the server really has a job."""
        return any(job.job_id == number for job in self.session.get_system_info().job_info)


def _one(made: Any, user: str, kit: Path, out: Path, say: Say) -> dict[str, str]:
    """Run one job to its end: returns its outcome, and copies its files."""
    admin = _Admin(user, kit, say)
    try:
        with tempfile.TemporaryDirectory() as folder:
            made.export_job(folder)
            number = admin.session.submit_job(str(Path(folder) / made.name))
        say(f"FLARE's job {number}: submitted")
        try:
            status = _watched(admin, number, say)
        except KeyboardInterrupt:
            admin.abort(number)
            raise KeyboardInterrupt("the job is aborted; `--resume` continues the run.") from None
        with tempfile.TemporaryDirectory() as folder:
            found = _downloaded(admin.session, number, folder)
            outcome = {"state": "aborted", "words": ""}
            if found is not None:
                outcome = json.loads(found.read_text("utf-8"))
                if outcome["state"] == "done":
                    shutil.copytree(found.parent / RESULT, out, dirs_exist_ok=True)
        if outcome["state"] != "aborted":
            return outcome
        # By somebody, or by FLARE since it lost a process.
        state = "stopped" if status == "FINISHED:ABORTED" else "silent" if found is None else "again"
        return {"state": state, "words": f"FLARE says {status}."}
    finally:
        admin.close()


def _watched(admin: _Admin, number: str, say: Say) -> str:
    """Wait for a job's end, also through a restart of FLARE's server: the last status."""
    last, cut_off, missed = "", False, 0
    while True:
        try:
            status = str(admin.session.get_job_meta(number).get("status", ""))
            # A server that was killed still calls its jobs running when it is back, and has none.
            missed = missed + 1 if cut_off and not admin.has(number) else 0
        except Exception as error:  # whatever a lost connection raises
            say(f"no word from FLARE's server ({type(error).__name__})")
            admin.reopen()
            cut_off = True
            continue
        if status != last:
            say(f"FLARE's job {number}: {status.lower()}")
            last = status
        if status.startswith("FINISHED"):
            return status
        if missed == MISSED:
            admin.abort(number)
            return "that it runs, but its server has forgotten it"
        time.sleep(1.0)


def _downloaded(session: Session, number: str, folder: str) -> Path | None:
    """The job's outcome file; None if the job was killed."""
    try:
        place = Path(session.download_job_result(number, folder))
    except Exception:  # there is nothing to download
        return None
    return next(iter(place.rglob(OUTCOME)), None)
