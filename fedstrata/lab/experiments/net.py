"""`fedstrata net …`: a federation, from certificates to a report.

Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.lab.experiments import errors, logs
from fedstrata.support.writing import alive, locked, write_atomically

if TYPE_CHECKING:
    from fedstrata.engines.network.audit import Audit
    from fedstrata.engines.network.host import Host
    from fedstrata.engines.network.transport import Connected
    from fedstrata.engines.network.watching import Gauge
    from fedstrata.lab.experiments.networked import Server
    from fedstrata.lab.experiments.runner import PreparedExperiment
    from fedstrata.lab.experiments.settings import Settings

net = typer.Typer(
    help="Run an experiment on real sites. The environment has options too, as in FEDSTRATA_NET_SITE_LOG.",
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "FEDSTRATA_NET"},
)

TEMPLATE = """\
# A federation. Every party gets a copy of this file in its kit.

[server]
listen = "{listen}"       # where the server listens; other machines reach it at "0.0.0.0:8443"
address = "{address}"     # what the sites dial
hosts = {hosts}           # the server's names in its certificate: what stands in `address` must be among them

[federation]
sites = {sites}
starters = []                 # people with kits of their own, whom sites' policies may let start runs
experiment = "{experiment}"   # a name that `fedstrata list` knows, or a .py or .toml file in the kit
message_bytes = 268435456     # the most that a message may have

[policy]
missing = "wait"        # "wait" for a site that does not answer, or "drop" it and do the round again without
after = 30.0            # seconds that an absent site is waited for before it is dropped
min_sites = 1           # below this the run is saved and stops
retries = 3             # how often a round is tried again after a site's error
first_timeout = 600.0   # seconds for a first exchange, when sites compile
timeout = 30.0          # seconds for any other; ten times a site's usual time, where that is more
anew = false            # whether a site that lost its state (an empty disk) may join again
"""

AUDIT = "audit.jsonl"
STYLE = Path(__file__).parents[1] / "report" / "assets" / "page.css"  # the report's, for the page of --watch
PATIENCE = 10.0  # seconds of waiting for an answer that are not told
SILENT = 60.0  # seconds after which a run that tells nothing is taken for dead
Data = Annotated[str | None, typer.Option(help="module:function, a .csv file, or the folder of a store.")]
Label = Annotated[str, typer.Option(help="The column of a .csv file that is y.")]
Valid = Annotated[float, typer.Option(help="The part of a .csv file's rows that is for validation.")]
Share = Annotated[bool, typer.Option("--share", help="Let `net collect` fetch the clients' memory.")]
Simulated = Annotated[bool, typer.Option("--simulated", help="Take a share of the experiment's own data.")]
Kit = Annotated[Path, typer.Argument(help="A party's folder, made by `fedstrata net kits`.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The folder for runs and report.")]
By = Annotated[Path | None, typer.Option(help="The kit of whoever starts it: sites may ask for a signature.")]
Watch = Annotated[
    str | None,
    typer.Option(metavar="[HOST:]PORT", help="Serve /metrics, /healthz and a page; on loopback by default."),
]
Traces = Annotated[
    bool, typer.Option("--traces", help="Send OpenTelemetry spans, as OTEL_EXPORTER_OTLP_ENDPOINT says.")
]
Log = Annotated[Path | None, typer.Option(help="The file of the log; default stderr.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")]
LogLevel = Annotated[
    logs.Level,
    typer.Option(help="The lowest level to log. At debug, texts of exceptions may contain samples."),
]
Seeds = Annotated[int | None, typer.Option("--seeds", min=1, help="How many seeds.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a parameter.")]


# User errors as one message and exit code 2, Ctrl-C as 130, a network that cannot continue as 3.
messages = functools.partial(errors.messages, expected=(ValueError,))


def plan_of(
    experiment: str, folder: Path, quick: bool, seeds: int | None, set_: list[str] | None
) -> PreparedExperiment:
    """An experiment by its name, or from a file, which is looked for in a party's folder first."""
    from fedstrata.lab.cli import load, parse
    from fedstrata.lab.experiments.runner import prepare

    beside = folder / experiment
    name = str(beside) if Path(experiment).suffix in (".py", ".toml") and beside.is_file() else experiment
    return prepare(load(name), quick=quick, seeds=seeds, changes=parse(set_ or []))


@net.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation.")],
    sites: Annotated[str, typer.Option(help="The sites' names, with commas.")],
    experiment: Annotated[str, typer.Option(help="What they will run.")] = "demo",
    listen: Annotated[str, typer.Option(help="Where the server listens.")] = "127.0.0.1:8443",
    address: Annotated[str, typer.Option(help="What the sites dial.")] = "localhost:8443",
) -> None:
    """Write a commented federation.toml."""
    with messages():
        names = [name.strip() for name in sites.split(",") if name.strip()]
        file = write_settings(folder, names, experiment, listen, address)
        copied = f", copy {experiment} there" if Path(experiment).suffix in (".py", ".toml") else ""
        typer.echo(f"{file}: look at it{copied}, then `fedstrata net kits {folder}`.")


def write_settings(folder: Path, sites: list[str], experiment: str, listen: str, address: str) -> Path:
    """Check the settings, and write them to federation.toml in a folder."""
    from fedstrata.lab.experiments.settings import read

    file = folder / "federation.toml"
    if file.exists():
        raise ValueError(f"{file} is there already.")
    hosts = list(dict.fromkeys([address.rpartition(":")[0], "localhost", "127.0.0.1"]))
    values = {"sites": json.dumps(sites), "hosts": json.dumps(hosts), "experiment": experiment}
    text = TEMPLATE.format(listen=listen, address=address, **values)
    read(tomllib.loads(text))
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


@net.command()
def site(
    kit: Kit,
    data: Data = None,
    label: Label = "y",
    valid_fraction: Valid = 0.0,
    experiment: Annotated[str | None, typer.Option(help="In place of federation.toml's.")] = None,
    address: Annotated[str | None, typer.Option(help="In place of federation.toml's.")] = None,
    folder: Annotated[Path | None, typer.Option(help="For what clients remember; default KIT/state.")] = None,
    share: Share = False,
    simulated: Simulated = False,
    once: Annotated[bool, typer.Option("--once", help="End when the server's run ends.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="A privacy budget for this site's samples, in all runs together.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of that budget.")] = 1e-5,
    log: Log = None,
    log_json: LogJson = False,
    log_level: LogLevel = "info",
    watch: Watch = None,
    traces: Traces = False,
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """Take part: check this site's data, dial the server, answer it, and dial again for ever."""
    logs.begin(log, log_json, log_level)
    with messages():
        from fedstrata.engines.network.grpc_site import serve
        from fedstrata.engines.network.kits import name_of
        from fedstrata.engines.network.traces import sent
        from fedstrata.engines.network.watching import served
        from fedstrata.lab.experiments.approval import SitePolicy, host_of
        from fedstrata.lab.experiments.networked import opener_of_site
        from fedstrata.lab.experiments.settings import settings_of
        from fedstrata.support.compiled import keep_compiled

        policy = SitePolicy.of(kit)
        policy.limit_cores()
        keep_compiled()  # runs of one method, and sites on one machine, have the same phases
        settings, name = settings_of(kit), name_of(kit)
        names, folder = settings.sites, folder or kit / "state"
        definition = plan_of(experiment or settings.experiment, kit, quick, seeds, set_).experiment
        opens, own = opener_of_site(definition, names, name, data, label, valid_fraction, simulated)
        typer.echo(f"{name}: {own!r} fits {definition.name}")
        host = host_of(
            kit, folder, definition, opens, steady=data is not None, share=share, once=once, epsilon=epsilon,
            delta=delta,
        )  # fmt: skip
        _warn_of_expiry(kit, name)
        whose, where = f"The site {name}", address or settings.address
        tells = functools.partial(_site_gauges, host, kit, name)
        page = served(tells, watch, whose, STYLE.read_text("utf-8"))
        with locked(folder, whose), page, sent(name, traces) as spans:
            host.around = host.around if spans is None else spans.answering
            serve(host, kit, where, settings.message_bytes, resting=host.resting, rates=policy.rates)


def _site_gauges(host: Host, kit: Path, name: str) -> list[Gauge]:
    """A site's numbers for `/metrics`."""
    from fedstrata.engines.network.kits import days_left
    from fedstrata.engines.network.watching import Gauge

    of = {"site": name}
    told = [
        Gauge("certificate_days", days_left(kit), "days until its certificate expires", of),
        Gauge("answered_total", host.answered, "requests that were answered"),
    ]
    if (spent := host.allowance) is not None:
        told.append(Gauge("epsilon", spent.epsilon(), "privacy spent in all runs, ε", of))
    return told


@net.command()
def relay(
    kit: Annotated[Path, typer.Argument(help="The relay's kit as a site of the server above it.")],
    region: Annotated[Path, typer.Argument(help="The kit of the region's server.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="For the account of what it asks its sites.")],
    address: Annotated[str | None, typer.Option(help="In place of federation.toml's.")] = None,
    folder: Annotated[Path | None, typer.Option(help="For what it keeps; default KIT/state.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the server's run ends.")] = False,
    log: Log = None,
    log_json: LogJson = False,
    log_level: LogLevel = "info",
    traces: Traces = False,
) -> None:
    """Be one site to a server, for all sites of a region: they dial this process, which has no samples."""
    logs.begin(log, log_json, log_level)
    with messages():
        from fedstrata.engines.network.audit import Audit as Account
        from fedstrata.engines.network.grpc_site import serve
        from fedstrata.engines.network.kits import name_of
        from fedstrata.engines.network.relay import Relay
        from fedstrata.lab.experiments.approval import SitePolicy
        from fedstrata.lab.experiments.settings import settings_of

        above, name, folder = settings_of(kit), name_of(kit), folder or kit / "state"
        if name not in above.sites:
            raise ValueError(f"{name!r} is not one of the sites {above.sites}.")
        with locked(folder, f"The relay {name}"), listening(region, out, None, traces) as (below, _, own):
            answers = Relay(
                below, folder, audit=Account(folder / AUDIT, name), anew=own.anew,
                patience=own.first_timeout, once=once,
            )  # fmt: skip

            def short() -> bool:  # of one of its sites: the server is not kept waiting by a silent relay
                return len(below.wait(range(len(own.sites)), 0.0)) < len(own.sites)

            where, rates = address or above.address, SitePolicy.of(kit).rates
            serve(answers, kit, where, above.message_bytes, resting=short, rates=rates)


@net.command()
def approve(
    kit: Kit,
    data: Data = None,
    label: Label = "y",
    valid_fraction: Valid = 0.0,
    experiment: Annotated[str | None, typer.Option(help="In place of federation.toml's.")] = None,
    simulated: Simulated = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="Only write a draft of a data protection description there.")
    ] = None,
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """At a site: show what an experiment would ask of it, and approve its runs; it then opens no others."""
    with messages():
        from fedstrata.engines.network.kits import name_of
        from fedstrata.lab.experiments import approval
        from fedstrata.lab.experiments.networked import opener_of_site
        from fedstrata.lab.experiments.settings import settings_of

        settings, name, policy = settings_of(kit), name_of(kit), approval.SitePolicy.of(kit)
        definition = plan_of(experiment or settings.experiment, kit, quick, seeds, set_).experiment
        own = data, label, valid_fraction, simulated
        opens, _ = opener_of_site(definition, settings.sites, name, *own)
        found = approval.kinds(definition, opens)
        if document is not None:
            text = approval.document(definition, found, name, settings.sites, policy)
            document.write_text(text, "utf-8")
            typer.echo(f"{document}: complete the lines with […].")
            return
        typer.echo("\n".join(approval.described(definition, found)))
        if not (yes or typer.confirm(f"Shall {name} take part in these runs, and in no others?")):
            raise typer.Exit(1)
        approval.approve(kit, {kind.asks.digest: kind.label for kind in found})
        typer.echo(f"{kit / approval.APPROVED}: approved. Remove a line there to take it back.")


def _warn_of_expiry(kit: Path, name: str) -> None:
    from fedstrata.engines.network.kits import expires_soon

    if words := expires_soon(kit, name):
        logging.getLogger("fedstrata.network").warning(words)


@contextmanager
def served_by(
    kit: Path, plan: PreparedExperiment, out: Path, listen: str | None = None, traces: bool = False,
    by: Path | None = None,
) -> Iterator[Server]:  # fmt: skip
    """A server that listens, for an experiment; ``by``: the kit of whoever starts its runs."""
    from fedstrata.engines.network.kits import Identity, read
    from fedstrata.lab.experiments.networked import Server

    if by is not None:
        read(by)  # told before a site is asked

    with listening(kit, out, listen, traces) as (transport, audit, settings):
        run = run_name(out)
        audit.note("started", experiment=plan.experiment.name, run=run, sites=settings.sites)
        starter = None if by is None else Identity(by)
        yield Server(plan.experiment, transport, run, settings.policy, settings.anew, starter)
        audit.note("ended")


@contextmanager
def listening(
    kit: Path, out: Path, listen: str | None = None, traces: bool = False
) -> Iterator[tuple[Connected, Audit, Settings]]:
    """A transport to the sites of a federation, with the account and the settings of its server."""
    from fedstrata.engines.network.audit import Audit, Audited
    from fedstrata.engines.network.grpc_server import GrpcServer
    from fedstrata.engines.network.kits import name_of
    from fedstrata.engines.network.traces import Traced, sent
    from fedstrata.lab.experiments.settings import settings_of

    settings = settings_of(kit)
    if (name := name_of(kit)) in settings.sites:
        raise ValueError(f"{kit} is the kit of the site {name!r}; the server has one of its own.")
    with locked(out, "A server"), sent("server", traces) as spans:
        _warn_of_expiry(kit, name)
        transport = GrpcServer(settings.sites, kit, listen or settings.listen, settings.message_bytes)
        try:
            audited = Audited(transport, audit := Audit(out / AUDIT, "server"))
            yield audited if spans is None else Traced(audited, spans), audit, settings
        finally:
            transport.close()


def run_name(out: Path) -> str:
    """The name of the runs in a folder, unlike any other: sites keep by it what they remember."""
    file = out / "network-run"
    if not file.exists():
        write_atomically(file, secrets.token_hex(8).encode())  # it stands in every message: short
    return file.read_text("utf-8").strip()


def refuse_runs(folder: Path) -> None:
    """Refuse a folder that has runs already.

    Raises:
        ValueError: if there are.
    """
    if (folder / "finished").exists() or (folder / "unfinished").exists():
        raise ValueError(f"{folder} has runs already: --resume continues them, or give another --out.")


class _Status:
    """Write the run's progress to OUT/network.json every second, also while waiting for sites."""

    def __init__(self, server: Server, out: Path) -> None:
        self.server, self.file = server, out / "network.json"
        self.round: int | None = None
        self.rounds: int | None = None
        self.epsilon: float | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> _Status:
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.file.unlink(missing_ok=True)

    def watch(self, progressed: Any) -> None:
        """A callback of the run."""
        self.round, self.rounds = progressed.round, progressed.rounds
        self.epsilon = progressed.history.get("epsilon", [None])[-1]
        self._tell()

    def _repeat(self) -> None:
        told = 0.0
        while not self._over.wait(1.0):
            self._tell()
            names, seconds = self.server.transport.waiting()
            if names and seconds > max(PATIENCE, 2 * told):  # once more each time that it has doubled
                told = seconds
                typer.echo(f"waiting for {', '.join(names)} since {seconds:.0f} s", err=True)
            told = told if names else 0.0

    def _tell(self) -> None:
        with self._lock, suppress(OSError):  # a full disk may hide how the run stands, but not end it
            write_atomically(self.file, json.dumps(self.facts()).encode())

    def facts(self) -> dict[str, Any]:
        """The state of the run, and of each site."""
        transport, engines = self.server.transport, list(self.server.engines)
        return {
            "pid": os.getpid(),
            "time": time.time(),
            "round": self.round,
            "rounds": self.rounds,
            "epsilon": self.epsilon,
            "attempts": sum(engine.attempts for engine in engines),
            "exchanges": sum(engine.timing.exchanges for engine in engines),
            "seconds": sum(engine.timing.seconds for engine in engines),
            "waiting": self.server.transport.waiting(),
            "sites": {
                name: {
                    "connected": transport.session(i) is not None,
                    "expires": transport.expires(i),
                    "waited": sum(engine.timing.waited.get(i, 0.0) for engine in engines),
                    "sent": transport.sent[i],
                    "received": transport.received[i],
                    "failures": sum(engine.failed.get(name, 0) for engine in engines),
                }
                for i, name in enumerate(transport.names)
            },
        }


def _gauges(facts: dict[str, Any]) -> list[Gauge]:
    """The run's numbers for `/metrics`."""
    from fedstrata.engines.network.watching import Gauge

    found = [
        Gauge(
            "round", -1 if facts["round"] is None else facts["round"], "the last evaluated round, −1 before"
        ),
        Gauge("rounds", facts["rounds"] or 0, "rounds of the run"),
        Gauge("attempts_total", facts["attempts"], "attempts at rounds and evaluations"),
        Gauge("exchanges_total", facts["exchanges"], "exchanges that all sites asked have answered"),
        Gauge("exchange_seconds_total", facts["seconds"], "seconds that these took"),
        Gauge("sites_present", sum(its["connected"] for its in facts["sites"].values()), "connected sites"),
    ]
    if facts["epsilon"] is not None:
        found.append(Gauge("epsilon", facts["epsilon"], "privacy that the run has cost, ε"))
    for name, its in facts["sites"].items():
        site = {"site": name}
        found += [
            Gauge("site_connected", its["connected"], "whether the site is connected", site),
            Gauge("sent_bytes_total", its["sent"], "bytes sent to the site", site),
            Gauge("received_bytes_total", its["received"], "bytes received from it", site),
            Gauge("waited_seconds_total", its["waited"], "seconds that it was waited for", site),
            Gauge("failures_total", its["failures"], "exchanges that it did not complete", site),
        ]
        if its["expires"] is not None:
            days = (its["expires"] - time.time()) / 86_400
            found.append(Gauge("certificate_days", days, "days until its certificate expires", site))
    return found


def execute(
    server: Server,
    plan: PreparedExperiment,
    out: Path,
    command: str,
    fresh: bool,
    again: str = "the same command with --resume continues there",
    watch: str | None = None,
) -> None:
    """Run the experiment, keep the models, and write the report with a section on the network."""
    from dataclasses import replace

    import rich

    from fedstrata.engines.network.watching import served
    from fedstrata.lab.experiments.runner import run_experiment
    from fedstrata.lab.report import load_report

    title = f"{plan.experiment.name}: a federation of {len(server.transport.names)} sites"
    css = STYLE.read_text("utf-8")
    with _Status(server, out) as status, served(lambda: _gauges(status.facts()), watch, title, css):
        networked = replace(plan, experiment=server.networked(status.watch))
        page = run_experiment(
            networked, out, command=command, fresh=fresh, together=False, models=True, again=again,
            notes=server.remarks, draws_split=False,
        )  # fmt: skip
    rich.print(load_report(out).table.to_rich())
    typer.echo(f"Models: {(out / 'models').resolve()}")
    typer.echo(f"Report: {page.resolve()}")


@net.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A name, or a .py or .toml file.")],
    kit: Kit,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    by: By = None,
    log: Log = None,
    log_json: LogJson = False,
    log_level: LogLevel = "info",
    watch: Watch = None,
    traces: Traces = False,
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """Serve a federation: wait for its sites, run the experiment on them, write the report."""
    logs.begin(log, log_json, log_level)
    with messages():
        from fedstrata.engines.engine import need_two_threads

        in_flare = (kit / "startup" / "fed_admin.json").is_file()
        if not in_flare:
            need_two_threads("The exchanges of a network")
        plan = plan_of(experiment, kit, quick, seeds, set_)
        folder = out or Path("runs") / f"{plan.experiment.name}-network"
        if in_flare:
            from fedstrata.lab.experiments.flare import submit

            submit(kit, plan, folder, resume, typer.echo)
            return
        if not resume:
            refuse_runs(folder)
        with served_by(kit, plan, folder, traces=traces, by=by) as server:
            command = f"fedstrata net run {experiment} {kit}"
            execute(server, plan, folder, command, fresh=not resume, watch=watch)
            done(server)
            _vouch(server, plan, folder, kit)


def _vouch(server: Server, plan: PreparedExperiment, out: Path, kit: Path) -> None:
    """Write OUT/manifest.json: what the run was, signed with the server's key."""
    import platform

    import jax

    import fedstrata
    from fedstrata.engines.network.audit import manifest
    from fedstrata.engines.network.audit import read as read_account
    from fedstrata.engines.network.kits import read
    from fedstrata.lab.experiments.networked import terms_of

    _, certificate, key = read(kit)
    facts = {
        "experiment": plan.experiment.name, "run": run_name(out), "terms": terms_of(plan.experiment),
        "sites": list(server.transport.names), "fedstrata": fedstrata.__version__, "jax": jax.__version__,
        "python": platform.python_version(), "account": read_account(out / AUDIT)[-1]["hash"],
        "runs": [_vouched(file) for file in sorted((out / "finished").glob("*.json"))],
    }  # fmt: skip
    report = out / "report.html"
    signed = manifest(json.loads(json.dumps(facts, default=str)), [report], key, certificate)
    write_atomically(out / "manifest.json", json.dumps(signed, indent=1).encode())
    typer.echo(f"Manifest: {(out / 'manifest.json').resolve()}")


def _vouched(file: Path) -> dict[str, Any]:
    """The facts of a finished run in a manifest: its setting, the digests of its programs, its privacy."""
    import csv

    found = json.loads(file.read_bytes())
    *_, last = csv.DictReader(found["history"].splitlines())
    programs = {k: v for k, v in found["identity"].items() if str(v).startswith("program ")}
    spent = {"epsilon": float(last["epsilon"])} if last.get("epsilon") else {}
    return {"setting": found["setting"], "seed": found["seed"], "rounds": last["round"], **programs, **spent}


def done(server: Server) -> None:
    """Tell the sites that nothing more will be asked."""
    from fedstrata.engines.network import Request

    everyone = range(len(server.transport.names))
    header = {"op": "done", "seq": time.time_ns() // 1000}
    server.transport.exchange({i: Request(header, []) for i in everyone}, 5.0)


@net.command()
def flare(
    kit: Annotated[Path, typer.Argument(help="A party's folder, made by FLARE's provisioning.")],
    data: Data = None,
    label: Label = "y",
    valid_fraction: Valid = 0.0,
    share: Share = False,
    simulated: Simulated = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Of the server: the folder for runs.")
    ] = None,
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """Prepare a party of an NVIDIA FLARE system: check its data, and allow FedStrata's jobs there."""
    with messages():
        from fedstrata.lab.experiments.flare import Party, prepare

        place = None if out is None else str(out.resolve())
        party = Party(
            data=data, label=label, valid_fraction=valid_fraction, share=share, simulated=simulated,
            out=place, quick=quick, seeds=seeds, set=tuple(set_ or ()), folder=str(Path.cwd()),
        )  # fmt: skip
        prepare(kit, party, typer.echo)


@net.command()
def flower(
    app: Annotated[Path, typer.Argument(help="A new folder for the app.")],
    kit: Annotated[Path, typer.Option(help="At the server's part: a folder with federation.toml.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="There, the folder for runs and report.")],
) -> None:
    """Write an app of Flower, whose nodes become sites for the length of a run."""
    with messages():
        from fedstrata.lab.experiments.flower import write_app

        write_app(app, kit, out)
        typer.echo(f"{app}: `flwr run {app}`, when SuperLink and SuperNodes run.")


@net.command()
def status(
    out: Annotated[Path, typer.Argument(help="The folder of a run.")],
    watch: Annotated[bool, typer.Option("--watch", help="Until the run ends or Ctrl-C.")] = False,
) -> None:
    """Show the state of a run on this machine."""
    with messages():
        from rich.live import Live

        if not (out / "network.json").exists() and (out / "report.html").is_file():
            interrupted = (out / "unfinished").exists()
            end = "was interrupted; `net run --resume` continues it" if interrupted else "has ended"
            typer.echo(f"The run in {out} {end}. Report: {(out / 'report.html').resolve()}")
            return
        if not watch:
            typer.echo(_stands(_status(out)))
            return
        with Live(_stands(_status(out)), refresh_per_second=2) as live, suppress(KeyboardInterrupt):
            while (out / "network.json").exists():
                live.update(_stands(_status(out)))
                time.sleep(0.5)


def _stands(facts: dict[str, Any]) -> str:
    """The state of a run, as lines of text."""
    stands = f"round {facts['round']} of {facts['rounds']}" if facts["rounds"] else "no round yet"
    lines = [f"process {facts['pid']}, {time.time() - facts['time']:.0f} s ago: {stands}"]
    names, seconds = facts["waiting"]
    if names and seconds > 1:
        lines.append(f"waiting for {', '.join(names)} since {seconds:.0f} s")
    for name, its in facts["sites"].items():
        valid = (
            "" if its["expires"] is None else f", certificate {(its['expires'] - time.time()) / 86_400:.0f} d"
        )
        lines.append(
            f"{name}: {'connected' if its['connected'] else 'away'}, sent {its['sent']:,} B, "
            f"received {its['received']:,} B, failures {its['failures']}{valid}"
        )
    return "\n".join(lines)


def _status(out: Path) -> dict[str, Any]:
    try:
        facts = json.loads((out / "network.json").read_text("utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"No run is under way in {out}.") from None
    if not alive(facts["pid"]) or time.time() - facts["time"] > SILENT:  # its number may be another's by now
        raise ValueError(
            f"The process {facts['pid']} has ended, or has reported nothing for {SILENT:.0f} s; "
            "`net run --resume` continues it."
        )
    return facts


@net.command()
def audit(
    file: Annotated[Path, typer.Argument(help="A party's audit.jsonl, or a run's manifest.json.")],
    other: Annotated[
        Path | None,
        typer.Argument(help="A site's account beside the server's; of a manifest, authority.pem."),
    ] = None,
) -> None:
    """Verify an account of what a party did; compare two; or check a signed manifest."""
    with messages():
        from fedstrata.engines.network.audit import AuditError, check_manifest, compare, read

        if file.suffix == ".json":
            if other is None:
                raise ValueError(
                    "A manifest is checked against the authority's certificate: give authority.pem."
                )
            signed = json.loads(file.read_text("utf-8"))
            check_manifest(signed, other.read_bytes(), file.parent)
            if signed["account"] not in [entry["hash"] for entry in read(file.parent / AUDIT)]:
                raise AuditError(f"{file.parent / AUDIT} is not the account that the manifest vouches for.")
            typer.echo("The manifest was signed by a party of this authority, and its files are unchanged.")
            return
        if not (entries := read(file)):
            raise ValueError(f"{file} has no entries.")
        typer.echo(f"{file}: {len(entries)} entries of {entries[0]['party']}, unchanged")
        if other is not None:
            there = read(other)
            typer.echo(f"{other}: {len(there)} entries of {there[0]['party'] if there else '?'}, unchanged")
            server, site = (entries, there) if entries[0]["party"] == "server" else (there, entries)
            if differences := compare(server, site):
                raise AuditError("The accounts differ:\n" + "\n".join(differences[:20]))
            typer.echo("Both accounts agree on every exchange between the two parties.")


@net.command()
def stop(out: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Ask a run on this machine to save itself and end; `net run --resume` continues it."""
    with messages():
        pid = int(_status(out)["pid"])
        os.kill(pid, signal.SIGINT)
        typer.echo(f"Asked process {pid} to end.")


@net.command()
def collect(
    experiment: Annotated[str, typer.Argument(help="A name, or a .py or .toml file.")],
    kit: Kit,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the run.")],
    by: By = None,
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """Fetch what clients remember (personal models) from the sites that allow it, into OUT/collected."""
    logs.begin()
    with messages():
        import numpy as np

        from fedstrata.support.sealed import save_arrays

        plan = plan_of(experiment, kit, quick, seeds, set_)
        with served_by(kit, plan, out, by=by) as server:
            for number, setting in enumerate(plan.experiment.settings):
                there, *_ = server.federation(setting)
                there.fresh = False
                replies, failures = there.memory()
                for i, failure in failures.items():
                    typer.echo(f"{there.names[i]}: {failure.why}")
                for i, reply in replies.items():
                    file = out / "collected" / f"run-{number}" / f"{there.names[i]}.safetensors"
                    arrays = {f"memory/{j}": np.array(leaf) for j, leaf in enumerate(reply.arrays)}
                    save_arrays(file, arrays, {"clients": there.members[i].tolist()})
                    typer.echo(f"{there.names[i]}: {file}")


@net.command("try")
def try_(
    experiment: Annotated[str, typer.Argument(help="A name, or a .py or .toml file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
) -> None:
    """Try a federation on this machine: certificates, a process for each client, the run, the report.

    One seed is run, unless --seeds says otherwise.
    """
    with messages():
        from fedstrata.engines.engine import need_two_threads
        from fedstrata.lab.cli import options
        from fedstrata.lab.experiments.networked import task_of

        need_two_threads("The exchanges of a network")
        seeds = 1 if seeds is None and not quick else seeds
        where = str(Path(experiment).resolve()) if Path(experiment).is_file() else experiment
        plan = plan_of(where, Path(), quick, seeds, set_)
        if (out / "network").exists():
            raise ValueError(f"{out} has a network already. Give a new folder.")
        data = task_of(plan.experiment, plan.experiment.settings[0]).data
        if data is None:
            raise ValueError(f"{experiment} has no data of its own to try; run its sites with --data.")
        names = [f"site-{i + 1}" for i in range(data.clients)]
        base = out / "network"
        from fedstrata.lab.experiments.net_certificates import DAYS, make_all

        write_settings(base, names, where, "127.0.0.1:8443", "localhost:8443")
        make_all(base, DAYS, None, names)
        logs.begin(out / "logs" / "server.log")
        with served_by(base / "kits" / "server", plan, out, "127.0.0.1:0") as server:
            address = f"localhost:{server.transport.inner.port}"  # type: ignore[attr-defined]
            started = [
                _start(base / "kits" / name, out, address, where, options(quick, seeds, set_))
                for name in names
            ]
            typer.echo(
                f"{len(names)} sites, processes {', '.join(str(p.pid) for p in started)}. The first run of a "
                "method waits for each of them to compile its part."
            )
            watch = _Watch(dict(zip(names, started, strict=True)), out / "logs")
            try:
                with watch:
                    anew = "try it again in another folder"
                    execute(server, plan, out, f"fedstrata net try {experiment}", fresh=True, again=anew)
                done(server)
                _finish(started, 10.0)
            except KeyboardInterrupt:
                if not watch.dead:
                    raise
                raise ValueError(watch.dead) from None
            finally:
                _finish(started, 0.0)


class _Watch:
    """Interrupts this process when one of the sites' processes ends: nobody would start it again."""

    def __init__(self, started: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
        self.started, self.logs, self.dead = started, logs, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            for name, process in self.started.items():
                if (code := process.poll()) is not None:
                    words = (self.logs / f"{name}.out").read_text("utf-8", errors="replace").strip()
                    last = f" Its last words: {words.splitlines()[-1][:500]}" if words else ""
                    self.dead = (
                        f"{name} (process {process.pid}) ended with code {code}.{last} See {self.logs}."
                    )
                    while True:  # the first asks for an end at the next look, and there may be none
                        os.kill(os.getpid(), signal.SIGINT)
                        if self._over.wait(3.0):
                            return


def _start(kit: Path, out: Path, address: str, experiment: str, words: list[str]) -> subprocess.Popen[bytes]:
    log = out / "logs" / f"{kit.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fedstrata", "net", "site", str(kit), "--simulated", "--once"]
    command += ["--address", address, "--experiment", experiment, "--log", str(log), *words]
    with (out / "logs" / f"{kit.name}.out").open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)


def _finish(started: list[subprocess.Popen[bytes]], patience: float) -> None:
    """Wait for processes, then end those that are left, each by its id."""
    end = time.monotonic() + patience
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
