"""The loop over rounds: metrics, ledger, checkpoints, progress, early stop, divergence, interruption.

The rounds themselves are compiled by the engine in chunks that end at evaluations. Between two chunks,
which last about `PAUSE` seconds, the host looks: it moves the progress bar, calls the callbacks, saves, and
stops on Ctrl-C. A chunk's length never recompiles anything and never changes a result: round r draws from
``fold_in(seed, r)`` alone.

`solve` has one run, `fedstrata.solving.sweep` several side by side, each in its own lane of the same loop.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np

from fedstrata.channels.channel import Buffered, Channels, Dropouts, Poisson, check_channels, given_by
from fedstrata.core.counting import ORACLES, Ledger
from fedstrata.core.method import Method, Moment, Reveals
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.engines.engine import Advanced, Carry, Engine, Job, Lane, Unfinished, engine_of
from fedstrata.engines.identity import differences
from fedstrata.engines.metrics import Metric, evaluate, is_asked, is_due, taken_name
from fedstrata.solving.certificate import Certify, certify_at_end
from fedstrata.solving.checkpoint import Checkpoint, try_to_write
from fedstrata.solving.endings import FEWEST, ended_outside, in_words, runaway
from fedstrata.solving.pose import Posed, check_values, checked_callbacks, pose
from fedstrata.solving.progress import Progress
from fedstrata.solving.result import BOOKKEEPING, Result
from fedstrata.solving.stopping import Callback, Diverged, Interrupted, Progressed
from fedstrata.solving.track import Run, Tracker, Tracking
from fedstrata.support.points import nonfinite_leaves
from fedstrata.support.precision import Precision
from fedstrata.support.sealed import CheckpointError, flatten, load_arrays, save_arrays, unflatten
from fedstrata.support.tracing import compiled_for, remarks
from fedstrata.support.words import spelling
from fedstrata.support.writing import clear_strays

PAUSE = 0.5  # seconds between two looks at a running program
GRACE = 3.0  # seconds after a signal in which an engine may come to the next look by itself


@spelling("solve")
def solve(
    problem: Problem,
    method: Method | Literal["auto"],
    data: FederatedData,
    x0: PyTree,
    *,
    y0: PyTree = None,
    rounds: int | None = None,
    seed: int = 0,
    participation: float | int | Poisson | Buffered = 1.0,
    engine: str | Engine = "simulated",
    metrics: Mapping[str, Metric] | None = None,
    eval_every: int = 1,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
    weights: Weights = "uniform",
    callbacks: Iterable[Callback] = (),
    default_metrics: bool = True,
    certify: Certify = "auto",
    channel: Channels | None = None,
    dropouts: Dropouts | None = None,
    budget: Mapping[str, float] | None = None,
    reveals: Reveals = "replies",
    precision: Precision = "float32",
) -> Result:
    """Solve a federated problem.

    Args:
        problem: what is to be solved, e.g. ``fs.Minimization(loss)``.
        method: how, e.g. ``fs.FedAvg(gamma=0.1, H=5)``; or ``"auto"``: the problem is measured, a method
            with its steps chosen, run in stages, certified and adapted, see `fedstrata.advice.auto`.
        data: the clients' samples.
        x0: where the main variable starts, any pytree of arrays.
        y0: where the second variable starts, for problems that have one.
        rounds: the number of rounds; one round is one averaging of x. For ``"auto"``, an upper bound.
        seed: the random seed; the same seed gives the same iterates in every engine, up to rounding.
        participation: a fraction of the clients (a float in (0, 1]), a number of them (an int) per round, or
            `Poisson`, where each takes part by itself, or `Buffered`, where nobody waits for slow ones.
        engine: ``"simulated"``, ``"streamed"`` (the default where data comes from a source), ``"sharded"``,
            ``"debug"``, ``"network"``, or an engine object.
        metrics: name → function of ``(x, y)``, of the state (one argument), or of ``(x, y, data)``; each one
            number. They are added to the problem's own and evaluated inside the compiled program. See
            `per_client` for one of each client, and `on_host` for plain Python.
        eval_every: rounds between two evaluations; the start and the last round are always evaluated.
        checkpoint: a path or a `Checkpoint`; the run is saved there regularly, on Ctrl-C and at the end.
        resume: continue from the checkpoint if there is one.
        progress: show a progress bar if the run takes longer than two seconds.
        weights: ``"uniform"`` (as in the papers) or ``"size"``, in proportion to the clients' *training*
            samples: their weights in all averages, the upper level's too, whose validation samples may be
            divided otherwise. Those who take part are drawn by them too, see `fedstrata.core.cohorts`.
        callbacks: called after each evaluation, which cuts the compiled run there; a true return stops the
            run. See `EarlyStop`. Those of `fedstrata.track` log what happens elsewhere, and cut nothing.
        default_metrics: whether the problem's own metrics, full passes over the data, are evaluated.
        certify: whether the result is judged at the end, see `fedstrata.certify`: True, False, or ``"auto"``,
            where that is expected to take less than a second, or a tenth of what runs take. Without it,
            ``result.certificate`` is computed when it is first asked for.
        channel: what happens to uploads on their way: a `Channel` for all exchanges, or a dict of them by
            phase, by level (``"main"``, ``"lower"``, ``"step"``), or ``"*"`` for the others. See `exchanges`.
        dropouts: clients that do not answer, see `Dropouts`.
        budget: of ``"auto"``: the most of ``"rounds"``, ``"bytes"``, ``"seconds"``, ``"oracle_calls"``; or of
            ``"bytes_a_round"``, up and down, of one round.
        reveals: of ``"auto"``: ``"averages"`` for methods of which the server sees averages alone.
        precision: of products in the problem's functions: ``"float32"``, as the device does them (GPUs round
            their arguments to TF32); ``"highest"``, exact ones, slower on a GPU; ``"bfloat16"``, of arguments
            that are rounded to 8 bits, quicker on a GPU, in steps alone: parameters, averages, losses'
            logarithms and metrics stay in float32. Methods of which only rounding would remain refuse it.

    Returns:
        A `Result`; the result so far, if a callback stopped the run.

    Raises:
        Diverged: when the iterates become infinite or NaN.
        Interrupted: on Ctrl-C, a `KeyboardInterrupt` that holds the result so far, after saving it.
        TypeError, ValueError: for arguments that do not fit together, before anything is computed.
    """
    began = time.perf_counter()
    if certify not in ("auto", True, False):
        raise ValueError(f"certify must be 'auto', True or False, but is {certify!r}.")
    if isinstance(method, str):
        return _auto(
            method, problem, data, x0, y0, checkpoint, resume, rounds=rounds, budget=budget, seed=seed,
            participation=participation, engine=engine, metrics=metrics, progress=progress, weights=weights,
            callbacks=callbacks, default_metrics=default_metrics, channel=channel, dropouts=dropouts,
            reveals=reveals,
            **({} if precision == "float32" else {"precision": precision}),
        )  # fmt: skip
    if rounds is None or budget is not None or reveals != "replies":
        raise TypeError("solve needs rounds=, a number; budget= and reveals= are for method 'auto'.")
    posed = pose(
        problem, method, data, x0, y0=y0, rounds=rounds, seed=seed, participation=participation,
        metrics=metrics, eval_every=eval_every, weights=weights, default_metrics=default_metrics,
        channel=channel, dropouts=dropouts, precision=precision,
    )  # fmt: skip
    engine = engine_of(engine, streamed=data.source is not None)
    saving = None if checkpoint is None else Checkpoint.of(checkpoint)
    loop = Loop(posed, engine, began, saving, resume, checked_callbacks(callbacks))
    stopped = loop.run(Progress(rounds, loop.round) if progress else None)
    (result,) = loop.results(stopped)
    if loop.trouble is not None:
        raise Diverged(*loop.trouble, result)
    if stopped is not None:
        raise interruption(stopped, loop, result)
    if certify is not False and engine.has_data and jax.process_count() == 1:
        certify_at_end(result, certify)
    return result


def _auto(
    method: str,
    problem: Problem,
    data: FederatedData,
    x0: PyTree,
    y0: PyTree,
    checkpoint: Any,
    resume: bool,
    **options: Any,
) -> Result:
    """``method="auto"``, which runs `solve` in stages."""
    if method != "auto":
        raise TypeError(
            f"method must be a method object such as fs.FedAvg(gamma=0.1), or 'auto', but is {method!r}."
        )
    if checkpoint is not None or resume:
        raise ValueError("'auto' keeps no checkpoints: run its final choice, result.method, with one.")
    check_channels(options["channel"])
    if any(one.noisy or one.epsilon is not None for one in given_by(options["channel"])):
        raise ValueError(
            "'auto' measures all samples without noise, and solves in stages, so that no epsilon holds for "
            "its result. Give a method, with step sizes that were chosen on other data."
        )
    from fedstrata.advice.auto import auto

    return auto(problem, data, x0, y0, **options)


def interruption(number: int, loop: Loop, result: Result | list[Result]) -> Interrupted:
    """The exception to raise after a signal.

    SIGTERM goes to its former handler first: usually, the process ends here.
    """
    if number == signal.SIGTERM:
        signal.raise_signal(number)
    saved = (
        f" It is saved in {loop.saving.file}; continue with resume=True."
        if loop.saving is not None and loop.saved
        else ""
    )
    return Interrupted(
        f"Interrupted after round {loop.round} of {loop.posed.rounds}.{saved} "
        "The exception's .result is the result so far.",
        result,
    )


@dataclass
class Trajectory:
    """The history and counts of one lane so far."""

    round: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    status: str = "done"

    def ledger(self) -> Ledger:
        """The counts so far."""
        return Ledger.from_counts(self.round, self.counts)

    def record(self, columns: Mapping[str, list[float]]) -> None:
        """Add evaluations; metrics that were not measured are NaN."""
        before, missing = len(self.history.get("round", ())), [math.nan] * len(columns["round"])
        for name in {**columns, **self.history}:
            self.history.setdefault(name, [math.nan] * before).extend(columns.get(name, missing))


class Loop:
    """A posed run on its way through an engine. `run` it, then take the `results`.

    Attributes:
        lanes: what the runs have gathered.
        trouble: after which round the only lane diverged, and which quantity did; or None.
        saved: whether the last attempt to save succeeded.
    """

    def __init__(
        self,
        posed: Posed,
        engine: Engine,
        began: float,
        saving: Checkpoint | None = None,
        resume: bool = False,
        callbacks: tuple[Callback, ...] = (),
    ) -> None:
        posed = replace(posed, carry=engine.carried(posed.method, posed.carry))
        self.posed, self.engine, self.saving = posed, engine, saving
        trackers = [c for c in callbacks if isinstance(c, Tracker)]
        self.callbacks = [c for c in callbacks if c not in trackers]
        self.trackers = trackers if jax.process_index() == 0 else []
        self.lanes = [Trajectory() for _ in posed.methods]
        self.trouble: tuple[int, str] | None = None
        self.round, self.began, self.saved = 0, began, False
        self.earlier, self.compiled = (0.0, 0.0), compiled_for()  # of the first, also what was compiled
        remarks()  # another run's
        carry, noted = posed.carry, None
        if saving is not None:
            self._prepare(saving)
        if resume:
            if saving is None:
                raise ValueError("resume=True needs a checkpoint path.")
            if saving.file.exists():
                carry, noted = self._load(saving)
        elif saving is not None and saving.file.exists() and not saving.overwrite:
            raise CheckpointError(
                f"{saving.file} exists already. Give resume=True to continue it, another path, or "
                "Checkpoint(…, overwrite=True)."
            )
        for name, metric in posed.hosted.items():
            if metric.needs_data and not engine.has_data:
                raise ValueError(
                    f"The metric {name!r} takes the data, but the server of a network has none: samples stay "
                    "at the sites. Give a function of (x, y) or of the state."
                )
        if engine.has_data and self.round == 0 and (remark := check_values(posed)) is not None:
            warnings.warn(remark, stacklevel=4)
        placed = engine.place(*posed.datasets)  # one, but where lanes differ
        self.job = Job(posed.setup, posed.method, posed.seed, placed)
        self.carry = engine.place_carry(carry)
        if noted is not None:
            engine.recall(self.round, noted)

    def _prepare(self, saving: Checkpoint) -> None:
        """Check that the run can be saved, and remove temporary files of killed writers."""
        trouble: CheckpointError | None = None
        if jax.process_index() == 0:
            clear_strays(saving.file.parent, saving.file.name)
            try:
                try_to_write(saving.file)
            except CheckpointError as error:
                trouble = error
        if self.engine.agree(trouble is not None):
            raise trouble or CheckpointError(f"The first process cannot write {saving.file}.")

    def run(self, bar: Progress | None) -> int | None:
        """Run to the end, or until stopped; returns the signal that stopped it, if any."""
        with Tracking(self.trackers, self._runs()) if self.trackers else nullcontext() as tracking:
            with bar or nullcontext(), _signals() as asked:
                self.engine.heed(lambda: bool(asked) and time.monotonic() > asked[0][1] + GRACE)
                try:
                    self._begin()
                    stopped = self._advance(bar, asked, tracking)
                except (Unfinished, KeyboardInterrupt) as error:
                    with suppress(RuntimeError):  # of a program that was cut short, nothing may be left
                        self._save()
                    if not asked or isinstance(error, KeyboardInterrupt):
                        raise
                    stopped = asked[0][0]
                else:
                    self._save()
                    if self.round == self.posed.until < self.posed.rounds:  # the privacy budget is spent
                        self.lanes[0].status = "stopped"
            if tracking is not None:
                tracking.statuses = [self._status(lane, stopped) for lane in self.lanes]
        self._close()
        return stopped

    def _runs(self) -> list[Run]:
        """The descriptions of the lanes for trackers."""
        setup, common = self.posed.setup, {"rounds": self.posed.rounds, "eval_every": self.posed.eval_every}
        common |= {"clients": setup.clients, "participants": setup.participants}
        runs = []
        for method, seed in zip(self.posed.methods, self.posed.seeds, strict=True):
            name, problem = type(method).__name__, type(setup.problem).__name__
            facts = {"method": name, "problem": problem, "seed": seed, "weights": setup.weights}
            runs.append(Run(f"{name}-seed{seed}", {**facts, **common, **method.describe()}, self.round > 0))
        return runs

    def _status(self, lane: Trajectory, stopped: int | None) -> str:
        return "interrupted" if stopped is not None and lane.status == "done" else lane.status

    def seconds(self) -> float:
        """The run's time so far, earlier parts included, without compiling."""
        return self.earlier[0] + time.perf_counter() - self.began - (compiled_for() - self.compiled)

    def compiling(self) -> float:
        """The seconds of compiling, earlier parts included."""
        return self.earlier[1] + compiled_for() - self.compiled

    def _begin(self) -> None:
        """Exchanges before the first round, where the method has any."""
        if self.round > 0 or self.lanes[0].history or not self.posed.methods[0].starts():
            return
        self.carry, counts = self.engine.begin(self.job, self.carry)
        for lane, its in zip(self.lanes, counts, strict=True):
            lane.counts.update(its)
        self._warn(self._cautions())

    def _cautions(self, ended: bool = False) -> list[list[str]]:
        posed, moment = self.posed, Moment(self.posed.setup.problem, self.posed.rounds, self.posed.x0)
        lanes = zip(posed.methods, self._fetch(), strict=True)
        plain_state = posed.method.plain_state
        return [m.cautions(moment._replace(state=plain_state(host.state), ended=ended)) for m, host in lanes]

    def _close(self) -> None:
        """Warn about the rounds that were run."""
        self._warn(self._cautions(ended=True))
        posed, problem = self.posed, self.posed.setup.problem
        finite = [b for b, lane in enumerate(self.lanes) if lane.status != "diverged"]
        grown = {b: runaway(problem, posed.methods[b], posed.x0, self.lanes[b].history) for b in finite}
        away = [(posed.methods[b], its) for b, its in grown.items() if its is not None]
        self._warn([in_words(away, len(self.lanes))])
        if problem.set_of_x.trivial or self.round == 0:
            return  # what clients hold may be large: it is fetched where it is looked at
        points = self.engine.outputs(posed.texts, self.carry, self._fetch())
        one = len(posed.datasets) == 1 and jax.process_count() == 1
        judged = one and type(self.job.data) is Placed and self.round >= FEWEST
        ended = [(posed.methods[b], points[b][0]) for b in finite]
        self._warn([ended_outside(problem, ended, self.job.data if judged else None)])

    def _warn(self, remarks: list[list[str]]) -> None:
        """Issue each warning once, for all lanes."""
        for remark in dict.fromkeys(itertools.chain(*remarks)):
            warnings.warn(remark, stacklevel=6)

    def _advance(
        self, bar: Progress | None, asked: list[tuple[int, float]], tracking: Tracking | None
    ) -> int | None:
        """Run chunk after chunk; returns the signal that stopped the run, if any."""
        saved_round, saved_at = self.round, time.perf_counter()
        evaluations = 2  # the start, and what comes first: one call of the program
        agree, saving = self.engine.agree, self.saving
        while lengths := self._next(evaluations, saved_round):
            started, before = time.perf_counter(), self.seconds()
            happened = self._chunk(np.array(lengths, np.int32))
            now = started + agree(time.perf_counter() - started)
            self._record(lengths, happened, before, self.seconds())
            if bar is not None:
                bar.update(self.round, self._latest())
            if tracking is not None:
                tracking.update([lane.history for lane in self.lanes])
            evaluations = self._next_length(evaluations, now - started)
            if saving is not None and agree(saving.due(self.round - saved_round, now - saved_at)):
                self._save()
                saved_round, saved_at = self.round, time.perf_counter()
            self._call_back()
            if agree(bool(asked)):
                return asked[0][0] if asked else signal.SIGINT
            if not any(lane.status == "done" for lane in self.lanes):
                break
        return None

    def _next(self, evaluations: int, saved_round: int) -> list[int]:
        """The rounds before each of the next evaluations, up to the next checkpoint that is due."""
        evaluations = 1 if self.callbacks else min(evaluations, self._until_host())
        due = math.inf if self.saving is None else saved_round + (self.saving.every_rounds or math.inf)
        lengths, at = [0] if not self.lanes[0].history else [], self.round
        while len(lengths) < evaluations and at < min(due, self.posed.until):
            stop = min(at - at % self.posed.eval_every + self.posed.eval_every, self.posed.until)
            lengths.append(stop - at)
            at = stop
        return lengths

    def _until_host(self) -> int:
        """The number of evaluations up to the next one with a metric on the host."""
        if not self.posed.hosted:
            return self.engine.evaluations_at_once
        done = max(len(lane.history.get("round", ())) for lane in self.lanes)
        due = (any(is_due(m, done + k) for m in self.posed.hosted.values()) for k in itertools.count())
        return next(k + 1 for k, now in enumerate(due) if now)

    def _next_length(self, evaluations: int, seconds: float) -> int:
        """The number of evaluations before the next pause, aiming at `PAUSE` seconds."""
        if seconds > PAUSE:
            return max(1, int(evaluations * PAUSE / seconds))
        return min(self.engine.evaluations_at_once, 2 * evaluations)

    def _chunk(self, rounds: np.ndarray) -> list[Lane | None]:
        """Run some rounds; returns the active lanes' outcomes up to the last finite evaluation."""
        posed, before, first = self.posed, self.carry, self.round
        active = np.array([lane.status == "done" for lane in self.lanes])

        self.carry, lanes = self.engine.advance(self.job, before, first, rounds, active)
        happened = [lane if active[b] else None for b, lane in enumerate(lanes)]
        asked = tuple(name for name, _ in posed.setup.metrics)
        for b in np.flatnonzero(active).tolist():
            trouble = _first_bad(lanes[b], asked, first, rounds)
            if trouble is None:
                continue
            self.lanes[b].status = "diverged"
            good = int((first + np.cumsum(rounds) <= trouble[0]).sum())
            if len(lanes) == 1:
                self.trouble = trouble[0], _with_leaves(trouble[1], self._state(b))
                # The same rounds again, but no further: they come out the same.
                again = Advanced(before, lanes)
                if good:
                    again = self.engine.advance(self.job, before, first, rounds[:good], active)
                self.carry, lanes = again
            happened[b] = lanes[b].until(good) if good else None  # several stay finite in the engine
        return happened

    def _record(self, lengths: list[int], happened: list[Lane | None], before: float, after: float) -> None:
        shared: dict[Any, tuple[dict[str, list[float]], Counter[str]]] = {}  # lanes mostly count the same
        for b, (lane, its) in enumerate(zip(self.lanes, happened, strict=True)):
            if its is None or not its.counts:
                continue
            key = id(its.counts), lane.round, tuple(lane.counts.items())
            if key not in shared:
                shared[key] = _counted(lane, lengths, its.counts)
            columns, counts = shared[key]
            lane.round, lane.counts = int(columns["round"][-1]), counts.copy()
            number = len(its.counts)
            seconds = [before + (after - before) * (j + 1) / len(lengths) for j in range(number)]
            columns = {**columns, "seconds": seconds, **{n: v.tolist() for n, v in its.history.items()}}
            if (spending := self.posed.spending) is not None:
                columns["epsilon"] = list(spending.curve(np.asarray(columns["round"])))
            for name, value in self._on_host(b, number, columns).items():
                columns[name] = [*[math.nan] * (number - 1), value]
            lane.record(columns)
        self.round = max(lane.round for lane in self.lanes)

    def _on_host(self, b: int, number: int, taken: Mapping[str, Any]) -> dict[str, float]:
        """The host's metrics that are due at a lane's point, after ``number`` evaluations."""
        posed, lane = self.posed, self.lanes[b]
        done, last = len(lane.history.get("round", ())) + number - 1, lane.round == posed.until
        due = {name: metric for name, metric in posed.hosted.items() if last or is_due(metric, done)}
        if not due:
            return {}
        host = self._fetch()[b]
        point = self.engine.output(posed.texts[b], self.carry, host)
        problem = posed.methods[b].judged_as(posed.setup.problem)
        values = evaluate(
            due, problem, posed.data_of(b), posed.setup.weights, posed.method.plain_state(host.state), *point
        )
        for name in values.keys() & {*taken, *BOOKKEEPING}:
            raise ValueError(taken_name(name))
        return {name: self.engine.agree(value) for name, value in values.items()}

    def _latest(self) -> dict[str, float]:
        """The last values of the metrics, averaged over lanes."""
        names = [n for n in self.lanes[0].history if n not in BOOKKEEPING and "/" not in n]  # a bar is short
        last = {n: [lane.history[n][-1] for lane in self.lanes if lane.history.get(n)] for n in names}
        return {name: float(np.mean(values)) for name, values in last.items() if values}

    def _call_back(self) -> None:
        if not self.callbacks:
            return
        for b, lane in enumerate(self.lanes):
            if lane.status != "done":
                continue
            state = self._state(b)
            progressed = Progressed(lane.round, self.posed.rounds, lane.history, state, lane.ledger(), b)
            stops = [callback(progressed) for callback in self.callbacks]
            if self.engine.agree(any(stops)):
                lane.status = "stopped"

    def _fetch(self) -> list[Carry]:
        """Every lane's state and memory on the host, copied in one transfer."""
        host = self.engine.fetch(self.carry, self.posed.setup.clients)
        return [self.engine.lane(host, b) for b in range(len(self.lanes))]

    def _state(self, lane: int) -> Any:
        """A lane's state, without what channels keep there."""
        return self.posed.method.plain_state(self.engine.lane(self.carry, lane).state)

    def results(self, stopped: int | None = None) -> list[Result]:
        """The results on the host; ``stopped`` is what `run` returned."""
        posed, setup, hosts, notes = self.posed, self.posed.setup, self._fetch(), remarks()
        points, compiling = self.engine.outputs(posed.texts, self.carry, hosts), self.compiling()
        return [
            Result(
                x=points[b][0],
                y=points[b][1],
                history={name: np.asarray(values) for name, values in lane.history.items()},
                ledger=lane.ledger(),
                method=posed.methods[b],
                seconds=self.seconds() + compiling,
                status=self._status(lane, stopped),
                state=posed.method.plain_state(hosts[b].state),
                problem=setup.problem,
                data=None if self.engine.elsewhere else posed.data_of(b),  # made-up samples judge nothing
                weights=setup.weights,
                measured_on=self.engine.measured_on(posed.data),
                compiling=compiling,
                seed=posed.seeds[b],
                start=(posed.x0, posed.y0),
                participation=setup.participants / setup.clients if setup.rate is None else setup.rate,
                notes=notes,
            )
            for b, lane in enumerate(self.lanes)
        ]

    def _save(self) -> None:
        if self.saving is None:
            return
        # with several processes, all must take part in this
        host = self.engine.fetch(self.carry, self.posed.setup.clients)
        if jax.process_index() != 0:
            return
        lanes = [
            {"round": lane.round, "counts": lane.counts, "status": lane.status, "columns": list(lane.history)}
            for lane in self.lanes
        ]
        facts = {
            "identity": self.posed.identity,
            "round": self.round,
            "seconds": self.seconds(),
            "compiling": self.compiling(),
            "lanes": lanes,
            "engine": self.engine.noted(self.round),
        }
        arrays = {**flatten("state", host.state), **flatten("memory", host.memory)}
        for b, lane in enumerate(self.lanes):
            for name, values in lane.history.items():
                arrays[f"history/{b}/{name}"] = np.asarray(values, np.float64)
        try:
            save_arrays(self.saving.file, arrays, facts)
        except OSError as error:  # a full disk must not cost what was computed
            self.saved = False
            warnings.warn(
                f"{self.saving.file} could not be written after round {self.round} "
                f"({error.strerror or error}). "
                "The run continues without it, and tries again when the next one is due.",
                stacklevel=6,
            )
            return
        self.saved = True
        self.engine.saved(self.round)

    def _load(self, saving: Checkpoint) -> tuple[Carry, dict[str, Any]]:
        """Restore the lanes from a checkpoint; returns the carry and the engine's notes."""
        arrays, facts = load_arrays(saving.file)
        if "identity" not in facts:
            raise CheckpointError(f"{saving.file} is a saved result, not a run that can be resumed.")
        if other := differences(facts["identity"], self.posed.identity):
            raise CheckpointError(
                f"{saving.file} belongs to another run ({'; '.join(other)}). Resume with the same arguments, "
                "or give another path."
            )
        if facts["round"] > self.posed.rounds:
            raise CheckpointError(
                f"{saving.file} is already at round {facts['round']}, past rounds={self.posed.rounds}: "
                "rounds counts from the start, so give a larger number."
            )
        self.round, self.earlier = facts["round"], (facts["seconds"], facts["compiling"])
        for b, (lane, its) in enumerate(zip(self.lanes, facts["lanes"], strict=True)):
            lane.round, lane.counts = its["round"], Counter(its["counts"])
            lane.history = {name: _column(name, arrays[f"history/{b}/{name}"]) for name in its["columns"]}
            if len(self.lanes) > 1:  # a run of its own is tried again; in a sweep the others continue
                lane.status = its["status"]
        like = self.posed.carry
        carry = Carry(
            unflatten("state", like.state, arrays, saving.file),
            unflatten("memory", like.memory, arrays, saving.file),
        )
        return carry, facts["engine"]


def _counted(
    lane: Trajectory, lengths: list[int], counts: list[Counter[str]]
) -> tuple[dict[str, list[float]], Counter[str]]:
    """The history's columns of rounds and traffic at each evaluation, and the counts after the last."""
    total, rows = lane.counts.copy(), []
    for its in counts:
        total.update(its)
        rows.append(_sent(total))
    rounds = (lane.round + np.cumsum(lengths[: len(counts)])).tolist()
    return {"round": rounds, **{name: [row[name] for row in rows] for name in rows[0]}}, total


def _sent(counts: Counter[str]) -> dict[str, int]:
    """The totals that a history shows of a ledger, without building the ledger."""
    totals = dict.fromkeys(("exchanges", "bytes_up", "bytes_down", "oracle_calls"), 0)
    for name, amount in counts.items():
        entry = "oracle_calls" if name in ORACLES else name.rpartition("/")[2]
        if entry in totals:
            totals[entry] += amount
    return totals


def _column(name: str, values: np.ndarray) -> list[float]:
    """A saved column of the history, with counts as whole numbers again."""
    return [int(v) for v in values] if name in BOOKKEEPING and name != "seconds" else values.tolist()


def _first_bad(lane: Lane, asked: tuple[str, ...], first: int, lengths: np.ndarray) -> tuple[int, str] | None:
    """The round and the quantity that first became non-finite in a chunk.

    Metrics may be NaN; only iterates are checked.
    """
    troubles = []
    if lane.bad_round >= 0:
        troubles.append((lane.bad_round, "state"))
    for name, values in lane.history.items():
        good = np.isfinite(values)
        if good.all() or is_asked(name, asked):
            continue
        end = first + int(lengths[: int(good.argmin()) + 1].sum())
        troubles.append((end - 1, f"metric {name!r}"))
    return min(troubles, default=None)


def _with_leaves(quantity: str, state: PyTree) -> str:
    """A quantity; of a state, with its leaves that are not finite."""
    leaves = nonfinite_leaves(state) if quantity == "state" else []
    more = f" and {len(leaves) - 4} more" if len(leaves) > 4 else ""  # a network has dozens
    return f"state ({', '.join(leaves[:4])}{more})" if leaves else quantity


@contextmanager
def _signals() -> Iterator[list[tuple[int, float]]]:
    """Let Ctrl-C and SIGTERM stop the run at the next pause; a second one ends it at once.

    Yields a list that gets the signal and when it came.
    """
    asked: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append((number, time.monotonic()))

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
