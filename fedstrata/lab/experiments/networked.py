"""An experiment on a network: what each party prepares from its own copy of the text.

A site takes its samples from a local entry, or its share of an experiment's simulated data. The server makes
of what the sites say (sizes and forms) data without samples, and runs the experiment as any other, with the
network as its engine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.client import opened
from fedstrata.core.term import positional
from fedstrata.core.types import PyTree
from fedstrata.data import from_csv, open_store
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.engines.identity import configuration
from fedstrata.engines.metrics import Metric, OnHost, PerClient
from fedstrata.engines.network import Network, Policy, Text
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.host import form_of
from fedstrata.engines.network.rules import Asks
from fedstrata.engines.network.transport import Connected
from fedstrata.lab.experiments._solving import posed
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.errors import ExperimentError, line_in
from fedstrata.solving.pose import Posed
from fedstrata.solving.sent import exchanges_of

if TYPE_CHECKING:
    from fedstrata.engines.network.kits import Identity

MOST_PROGRAMS = 32  # of earlier runs that are kept
Entry = Callable[[], FederatedData]


def terms_of(experiment: Experiment) -> dict[str, Any]:
    """The facts that parties must agree on before a run is opened; each run's identity is compared then."""
    settings = json.dumps([[sorted(s.items()), s.seed] for s in experiment.settings], default=str)
    own = {f"parameters.{key}": value for key, value in experiment.parameters.items()}
    digest = hashlib.sha256(settings.encode()).hexdigest()[:24]
    return {"experiment": experiment.name, **configuration(), **own, "settings": f"contents {digest}"}


def task_of(experiment: Experiment, setting: Setting) -> Task:
    """The task of a setting.

    Raises:
        ExperimentError: if it does not go through `fedstrata.solve`.
    """
    try:
        task = experiment.build(setting)
    except (ValueError, OSError):
        raise
    except Exception as error:  # whatever a user's file does wrong
        file = Path(getattr(sys.modules.get(experiment.build.__module__), "__file__", None) or "")
        raise ExperimentError(f"build{line_in(error, file)}: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise ExperimentError(f"{experiment.name} does not call fs.solve, so it cannot run on a network.")
    return task


def _posed(task: Task, setting: Setting, data: FederatedData) -> Posed:
    metrics: Mapping[str, Any] = task.metrics
    asked = {n: m for n, m in metrics.items() if isinstance(m, PerClient)}  # others ask no client
    return posed(replace(task, data=data, metrics=asked), setting)


@dataclass(frozen=True)
class SiteRun:
    """One run of a site's text with its own samples; see `fedstrata.engines.network.host.Opened`."""

    task: Task
    setting: Setting
    data: FederatedData

    def text(self, clients: int, server: PyTree) -> tuple[Text, dict[str, Any]]:
        """The posed run in a federation of so many clients, and its identity."""
        run = self.posed(clients, server)
        return Text.of(run.setup, run.method, run.carry, server, run.rounds), run.common

    def posed(self, clients: int | None = None, server: PyTree = None) -> Posed:
        """The run in a federation of so many clients, by default as many as the experiment's own data has.

        How many there will be only the server knows; a method may choose several of them.
        """
        own = self.task.data
        if clients is None:
            clients = max(self.data.clients, 1 if own is None else own.clients)
            server = None if own is None else opened(own.server)
        whole = replace(made_up(form_of(self.data), clients), server=server, augment=self.data.augment)
        return _posed(self.task, self.setting, whole)

    def asks(self) -> Asks:
        """The demands of the run on this site."""
        run = self.posed()
        # Where it starts and its seed are the server's to choose: they ask nothing else of a site.
        common = {name: value for name, value in run.common.items() if name not in ("seed", "x0", "y0")}
        identity = json.dumps([common, run.rounds], sort_keys=True, default=str)
        return Asks(
            hashlib.sha256(identity.encode()).hexdigest()[:24],
            tuple(one.phase for one in exchanges_of(run) if one.gathered),
            run.setup.secure,
            run.rounds,
        )


def opener(
    experiment: Experiment, entry: Entry | None, share: tuple[int, int] | None
) -> Callable[[int], SiteRun]:
    """Opens a run of the text by its number.

    Args:
        experiment: this site's copy.
        entry: gives its samples.
        share: where there is no entry, this site's number and the number of sites: its share of the
            experiment's own, simulated data.
    """
    settings = experiment.settings

    def opens(number: int) -> SiteRun:
        if not 0 <= number < len(settings):
            raise ExperimentError(f"{experiment.name} has {len(settings)} runs, and no number {number}.")
        task = task_of(experiment, settings[number])
        if entry is not None:
            data = entry()
            if data.augment is None and task.data is not None:  # the text says how, and the server holds it
                data = replace(data, augment=task.data.augment)
        elif share is None or task.data is None:
            raise ExperimentError("This site has no data: give --data.")
        else:
            data = part(task.data, np.array_split(np.arange(task.data.clients), share[1])[share[0]])
        return SiteRun(task, settings[number], data)

    return opens


def entry_of(where: str, label: str = "y", folder: Path | None = None, valid_fraction: float = 0.0) -> Entry:
    """A site's samples from ``module:function``, a CSV file with a header, or the folder of a store.

    The function returns one client's samples (a dict of arrays), a list of those of several clients, or
    `FederatedData`. In a CSV file every column is a number (words would need categories that all sites agree
    on); ``label`` names the one that becomes ``y``, and the others, in order, become ``x``. A store
    (`fedstrata.data.write_store`) has all clients of the site.

    Args:
        where: see above; files are found from ``folder``, and modules too.
        label: of a CSV file.
        folder: by default where the process is.
        valid_fraction: the part of a CSV file's rows that becomes validation data.

    Raises:
        DataError: if there is no such entry, or it does not give data.
    """
    folder = Path.cwd() if folder is None else folder
    place = folder / where
    if where.endswith(".csv"):

        def rows() -> FederatedData:
            try:
                return from_csv([place], label=label, valid_fraction=valid_fraction)
            except DataError as error:
                hint = " Or give --data module:function, which prepares it." if place.is_file() else ""
                if f"no column {label!r}" in str(error):
                    hint = " --label names the one that becomes y."
                raise DataError(f"{error}{hint}") from error

        return rows
    if place.is_dir():
        return lambda: open_store(place).load()
    name, colon, function = where.partition(":")
    if not colon:
        raise DataError(
            f"--data must be module:function, a .csv file or the folder of a store, but is {where!r}."
        )
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
        made = getattr(module, function)
    except Exception as error:  # whatever a party's own file does wrong
        raise _own(where, error, folder / f"{name}.py") from error
    finally:
        sys.path.pop(0)

    def entry() -> FederatedData:
        try:
            found = made()
        except Exception as error:
            raise _own(where, error, Path(getattr(module, "__file__", None) or name)) from error
        if isinstance(found, FederatedData):
            return found.load()
        return FederatedData.from_clients(found if isinstance(found, list) else [found])

    return entry


def _own(where: str, error: Exception, file: Path) -> DataError:
    known = isinstance(error, DataError | ImportError)
    words = str(error) if known else f"{type(error).__name__}: {error}"
    return DataError(f"--data {where}{line_in(error, file)}: {words}")


def opener_of_site(
    experiment: Experiment,
    names: Sequence[str],
    name: str,
    data: str | None,
    label: str,
    valid_fraction: float,
    simulated: bool,
    folder: Path | None = None,
) -> tuple[Callable[[int], SiteRun], FederatedData]:
    """Opens the runs of one of the sites, whose samples have been checked, and these samples.

    Raises:
        ValueError: if the site does not belong to the federation, or has no samples that fit.
    """
    if name not in names:
        raise ValueError(f"{name!r} is not one of the sites {names}.")
    if (data is None) == (not simulated):
        raise ValueError("Give --data, or --simulated for a share of the experiment's own data.")
    entry = None if data is None else entry_of(data, label, folder, valid_fraction)
    opens = opener(experiment, entry, (names.index(name), len(names)) if simulated else None)
    return opens, check(opens)


@dataclass
class Server:
    """The experiment as the server runs it.

    Args:
        experiment: the server's copy.
        transport: to the sites.
        run: the name of all of its runs, unlike any other's.
        policy: what happens when a site does not answer.
        anew: whether a site that lost its state may join again.
        starter: who starts the runs, for sites that ask for a signature.
    """

    experiment: Experiment
    transport: Connected
    run: str
    policy: Policy = field(default_factory=Policy)
    anew: bool = False
    starter: Identity | None = None
    engines: list[Network] = field(default_factory=list)  # of all runs so far, for what they tell

    def __post_init__(self) -> None:
        self._numbers = {_name(s): i for i, s in enumerate(self.experiment.settings)}
        self._terms = terms_of(self.experiment)
        self._programs: dict[Any, Any] = {}

    def federation(self, setting: Setting) -> tuple[Federation, Network, Task, FederatedData]:
        """A run whose sites are there; the data has no samples."""
        task, number = task_of(self.experiment, setting), self._numbers[_name(setting)]
        patience = self.policy.first_timeout
        there = Federation(
            self.transport, f"{self.run}-{number}", number, self._terms, self.anew, patience, self.starter
        )
        remote = there.gather()
        server = None if task.data is None else opened(task.data.server)
        augment = None if task.data is None else task.data.augment
        data = replace(made_up(there.form, len(remote.sizes)), server=server, augment=augment)
        form = None
        if server is not None:
            one = data.sample_of("server")
            form = {k: [np.dtype(one[k].dtype).name, list(np.shape(v))] for k, v in server.items()}
        run = _posed(task, setting, data)
        there.pose(int(remote.sizes.sum()), len(remote.sizes), form, run.common, run.setup.secure)
        for earlier in self.engines:
            earlier.release()
        while len(self._programs) > MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        engine = Network(remote, policy=self.policy, programs=self._programs)
        self.engines.append(engine)
        there.tell = engine.note
        return there, engine, task, data

    def networked(self, watch: Callable[[Any], None]) -> Experiment:
        """The same experiment with the network as its engine; ``watch`` is called after evaluations."""

        @wraps(self.experiment.build)  # stored runs are of this text
        def build(setting: Setting) -> Task:
            _, engine, task, data = self.federation(setting)
            options = {**task.options, "engine": engine}
            options["callbacks"] = (watch, *options.get("callbacks", ()))
            return replace(task, data=data, metrics=_bound(task), options=options)

        return self.experiment.model_copy(update={"build": build})

    def remarks(self) -> str:
        """The report's section on the network, as Markdown."""
        names, transport = self.transport.names, self.transport
        lines = [
            "## The network", "",
            "| site | sent to it | received | the last to answer | waited for it alone | failures |",
            "|---|---:|---:|---:|---:|---:|",
        ]  # fmt: skip
        engines = self.engines
        timed = max(1, sum(engine.timing.timed for engine in engines))
        for i, name in enumerate(names):
            waited = sum(engine.timing.waited.get(i, 0.0) for engine in engines)
            failed = sum(engine.failed.get(name, 0) for engine in engines)
            sent, received = transport.sent[i], transport.received[i]
            last = sum(engine.timing.last[i] for engine in engines) / timed
            lines.append(f"| {name} | {sent:,} B | {received:,} B | {last:.0%} | {waited:.1f} s | {failed} |")
        attempts = sum(engine.attempts for engine in engines)
        lines += ["", f"{attempts} attempts at rounds and evaluations, in this process. Bytes with headers."]
        events = [event for engine in engines for event in engine.events]
        # A site's words are shown as they are, whatever they are in Markdown.
        what = [re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", event["what"]) for event in events[:100]]
        told = zip(events, what, strict=False)
        lines += ["", *(f"- round {event['round']}, {event['site']}: {words}" for event, words in told)]
        return "\n".join(lines)


def _name(setting: Setting) -> str:
    return json.dumps([sorted(setting.items()), setting.seed], default=str)


class _ServersOwn:
    """The data that a metric of ``(x, y, data)`` gets on the server of a network."""

    def __init__(self, data: FederatedData | None) -> None:
        self.test = None if data is None else opened(data.test)
        self.server = None if data is None else opened(data.server)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"samples stay at the sites: on a network there is no data.{name} at the server")


def _bound(task: Task) -> Mapping[str, Metric]:
    """Metrics of ``(x, y, data)`` with the server's own test set in place of the data."""
    own = _ServersOwn(task.data)

    def bound(metric: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, y: metric(x, y, own)

    def fitted(metric: Any) -> Any:
        if isinstance(metric, OnHost):
            return replace(metric, function=fitted(metric.function))
        return metric if isinstance(metric, PerClient) or positional(metric) in (1, 2) else bound(metric)

    return {name: fitted(metric) for name, metric in task.metrics.items()}


def check(opens: Callable[[int], SiteRun], runs: Sequence[int] = (0,)) -> FederatedData:
    """Open and pose runs with a site's own samples, so that what does not fit is told before it joins."""
    for number in runs:
        found = opens(number)
        try:
            found.posed()
        except TypeError as error:
            raise DataError(f"This site's samples do not fit the experiment: {error}") from error
    return found.data
