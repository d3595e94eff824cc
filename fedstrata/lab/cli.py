"""The command line: list, run, reproduce and report experiments, a demo, and a look at this machine.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fedstrata import __version__
from fedstrata.lab.experiments.errors import ExperimentError, line_in, messages
from fedstrata.lab.experiments.net_certificates import net

if TYPE_CHECKING:
    from fedstrata.lab import Experiment
    from fedstrata.lab.experiments.runner import PreparedExperiment
    from fedstrata.lab.report.folder import Report


class Commands(TyperGroup):
    """Commands whose help shows a flag as a flag, not as something that takes a ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The group's own options."""
        return _flags(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name."""
        command = super().get_command(ctx, cmd_name)
        _flags([] if command is None else command.get_params(ctx))
        return command


def _flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


UNSOLVED = 4  # the exit code where a run is known not to be solved
KNOWN_GOOD = ("", "solved", "not certifiable")  # verdicts that say nothing against a run

app = typer.Typer(
    cls=Commands,
    help="Federated optimisation with levels: run experiments, reproduce the papers' tables, make reports.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(net, name="net", cls=Commands)


def _complete(incomplete: str) -> list[str]:
    """Names of experiments for the shell; where none fits, it completes files."""
    from fedstrata.lab.experiments.registry import names

    return [name for name in names() if name.startswith(incomplete)]


FILE_HELP = "A name, a .toml or a .py file."
Definition = Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help=FILE_HELP, autocompletion=_complete)]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The folder for runs and report; default runs/NAME.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Discard the runs that are stored in the folder.")]
Seeds = Annotated[int | None, typer.Option("--seeds", metavar="N", min=1, help="How many seeds.")]
SET_HELP = "Change a parameter or the grid: H=5, H=1,5,20. May be repeated."
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]
Quick = Annotated[bool, typer.Option("--quick", help="A small version that takes seconds.")]
TOGETHER_HELP = "Whether runs that share a program are solved side by side; the default is yes on a GPU."
Together = Annotated[
    bool | None, typer.Option("--together/--one-by-one", help=TOGETHER_HELP, show_default=False)
]
SHARD_HELP = "The I-th of N parts, for array jobs that share a folder."
Shard = Annotated[str | None, typer.Option("--shard", metavar="I/N", help=SHARD_HELP)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
MODELS_HELP = "Keep the model of each run in models/, for predict and fs.load."
Models = Annotated[bool, typer.Option("--models", help=MODELS_HELP)]
JUDGE_HELP = "Whether to certify runs when they end; the default is yes if that is cheap."
Judge = Annotated[bool | None, typer.Option("--certify/--no-certify", help=JUDGE_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and everything else to stderr.")]
BUDGET_HELP = "rounds, bytes, seconds or oracle_calls in all, or bytes_a_round. May be repeated."
Budgets = Annotated[list[str] | None, typer.Option("--budget", metavar="KIND=AMOUNT", help=BUDGET_HELP)]
AVERAGES_HELP = "Only methods that reveal nothing but averages to the server."
Averages = Annotated[bool, typer.Option("--averages", help=AVERAGES_HELP)]
SPENT_HELP = "rounds, bytes, oracle_calls or seconds of a run."
Spent = Annotated[str, typer.Option("--budget", metavar="KIND=AMOUNT", help=SPENT_HELP)]
STEPS_HELP = "given, planned or tuned: the origin of the methods' step sizes."
Steps = Annotated[str, typer.Option("--steps", help=STEPS_HELP)]
Target = Annotated[float, typer.Option("--target", help="The part of the start's excess to be reached.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="See `fedstrata list`.", autocompletion=_complete)]
Listed = Annotated[str | None, typer.Argument(metavar="NAME", help=FILE_HELP, autocompletion=_complete)]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedstrata {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
]


@app.callback()
def _main(version: Version = False) -> None:
    pass


@app.command("list")
def list_(name: Listed = None, json_: Json = False, debug: Debug = False) -> None:
    """List the experiments; of NAME (or a file), show the parameters, data, time and claims."""
    from fedstrata.lab.experiments.registry import headline, names

    with messages(debug, name or ""):
        if name is not None:
            from fedstrata.lab.experiments import showing

            definition = load(name)
            if json_:
                _print_json(showing.facts(definition))
            else:
                showing.show(definition)
            return
        lines = list(map(headline, names()))
        if json_:
            _print_json([one._asdict() for one in lines])
            return
    import rich
    import rich.box
    from rich.table import Table

    table = Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    for head in ("name", "what", "paper", "data"):
        table.add_column(head, no_wrap=head == "name")
    table.add_column("quick", justify="right", no_wrap=True)
    for one in lines:
        data = ", ".join(one.needs) or "bundled"
        if one.needs and one.fallback is not None:
            data += f" (else {one.fallback.get('data', 'other')})"
        quick = "–" if one.quick_seconds is None else f"{one.quick_seconds:.0f} s"
        table.add_row(one.name, one.title, one.paper or "–", data, quick)
    rich.print(table)
    rich.print("[dim]fedstrata list NAME shows one in detail; fedstrata run NAME --quick tries it; "
               "fedstrata reproduce NAME runs it in full.[/dim]")  # fmt: skip


@app.command()
def run(
    experiment: Definition, quick: Quick = False, seeds: Seeds = None, set_: Set = None, out: Out = None,
    fresh: Fresh = False, together: Together = None, models: Models = False, certify: Judge = None,
    shard: Shard = None, json_: Json = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Run an experiment, or what is missing of it, and write its report.

    With --shard 2/8 the second of eight parts is run and no report is written: start all parts with the same
    --out, and then the same command without --shard.

    The exit code is 4 where a run is known not to be solved, unless it is a --quick one.
    """
    with messages(debug, experiment):
        from fedstrata.lab.experiments.runner import prepare

        definition = load(experiment)
        prepared = prepare(definition, quick=quick, seeds=seeds, changes=parse(set_ or []))
        words = ["run", experiment, *options(quick, seeds, set_)]
        folder = out or Path("runs") / (definition.name + "-quick" * quick)
        more: dict[str, Any] = {"together": together, "models": models}
        more["certify"] = "auto" if certify is None else certify
        if shard is not None:
            _run_shard(prepared, folder, _part(shard), fresh, more)
            return
        written = _run_and_show(prepared, words, folder, json_, fresh=fresh, **more)
        if not quick:
            _exit_unsolved(written)


@app.command()
def solve(
    experiment: Definition, budget: Budgets = None, averages: Averages = False, seeds: Seeds = 1,
    set_: Set = None, out: Out = None, fresh: Fresh = False, models: Models = False, json_: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Solve an experiment's problems without any step size: measure, choose, run, certify, adapt.

    The methods that it names are left aside. The exit code is 4 where a run ends unsolved.
    """
    with messages(debug, experiment, (ValueError, TypeError)):
        from fedstrata.lab.experiments.automatic import by_auto
        from fedstrata.lab.experiments.runner import prepare

        prepared = prepare(load(experiment), seeds=seeds, changes=parse(set_ or []))
        definition = by_auto(prepared.experiment, budget or [], "averages" if averages else "replies")
        words = ["solve", experiment, *["--averages"] * averages]
        words += [word for one in budget or [] for word in ("--budget", one)] + options(False, seeds, set_)
        folder = out or Path("runs") / f"{definition.name}-solved"
        made = replace(prepared, experiment=definition)
        _exit_unsolved(_run_and_show(made, words, folder, json_, fresh=fresh, together=False, models=models))


def _exit_unsolved(written: Report) -> None:
    unsolved = [run for run in written.runs if run.verdict not in KNOWN_GOOD]
    if unsolved:
        count = f"{len(unsolved)} of {len(written.runs)} runs"
        typer.echo(f"Not solved: {count}, see the column certificate.", err=True)
        raise typer.Exit(UNSOLVED)


@app.command()
def reproduce(
    name: Name, seeds: Seeds = None, out: Out = None, fresh: Fresh = False, together: Together = None,
    json_: Json = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Run an experiment as the paper did, in full, and write its report."""
    with messages(debug):
        from fedstrata.lab.experiments.registry import find
        from fedstrata.lab.experiments.runner import prepare

        prepared = prepare(find(name), seeds=seeds)
        words, folder = ["reproduce", name, *options(seeds=seeds)], Path("runs") / prepared.experiment.name
        _run_and_show(prepared, words, out or folder, json_, fresh=fresh, together=together)


@app.command("compare")
def compare_(
    experiment: Definition, budget: Spent, steps: Steps = "given", target: Target = 1e-2,
    quick: Quick = False, seeds: Seeds = None, set_: Set = None, out: Out = None, debug: Debug = False,
) -> None:  # fmt: skip
    """Compare an experiment's methods at equal budgets, with paired intervals and performance profiles."""
    with messages(debug, experiment, (ValueError, TypeError)):
        from fedstrata.lab.experiments.contest import budget_from, contest
        from fedstrata.lab.experiments.runner import prepare

        prepared = prepare(load(experiment), quick=quick, seeds=1, changes=parse(set_ or []))
        definition, number = prepared.experiment, seeds or 10
        found = contest(definition, budget_from(budget), number, steps, target)  # type: ignore[arg-type]
        words = ["compare", experiment, "--budget", budget, "--steps", steps, "--target", f"{target:g}"]
        folder = out or Path("runs") / f"{definition.name}-compared"
        command = shlex.join(["fedstrata", *words, *options(quick, number, set_)])
        page = found.report(folder, f"{definition.title}: at equal budgets", command)
        typer.echo(f"{found}\nReport: {page.resolve()}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="The folders of runs.")],
    together: Annotated[
        bool, typer.Option("--compare", help="One page that compares several folders.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="With --compare, the page; default compare.html.")
    ] = None,
    json_: Json = False,
) -> None:
    """Make the table, the plots and the page again from a folder's runs; or compare several folders."""
    with messages():
        from fedstrata.lab.report import ReportError, compare, load_report, rebuild

        if together:
            page = compare(folders, out or "compare.html").resolve()
            if json_:
                _print_json({"page": str(page), "folders": [str(folder.resolve()) for folder in folders]})
            else:
                typer.echo(page)
            return
        if out is not None:
            raise ReportError("--out is for --compare; a folder's own page stays in it")
        if json_ and len(folders) > 1:
            raise ReportError("--json takes one folder, or several with --compare")
        for folder in folders:
            page = rebuild(folder).resolve()
            written = load_report(folder)
            _say_left_out(written)
            if json_:
                _print_report(page, written)
            else:
                typer.echo(page)


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A saved result, or a run with --models.")],
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV file with the columns of the data.")],
    proba: Annotated[bool, typer.Option("--proba", help="Write the probability of each class too.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file; default stdout.")] = None,
) -> None:
    """Predict the labels of a CSV file's rows with a saved model."""
    with messages(expected=(ValueError, TypeError)):
        from fedstrata.lab.experiments.predicting import predictions
        from fedstrata.support.writing import write_atomically

        text = predictions(folder, table, proba)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_atomically(out, text.encode())


@app.command()
def doctor(json_: Json = False) -> None:
    """Show versions, devices, the data folder, extras (and how to install them) and disk space."""
    from fedstrata.lab.experiments import doctor as look

    facts = look.examine()
    if json_:
        _print_json(facts)
    else:
        look.show(facts)
    if facts["trouble"]:
        raise typer.Exit(1)


@app.command()
def demo(out: Out = None, seeds: Seeds = None) -> None:
    """Show what four hospitals gain by learning together: real data, a table and a page."""
    with messages():
        from fedstrata.lab.experiments.registry import find
        from fedstrata.lab.experiments.runner import prepare

        words = ["demo", *options(seeds=seeds)]
        _run_and_show(prepare(find("demo"), seeds=seeds), words, out or Path("runs") / "demo", fresh=True)


def _part(shard: str) -> tuple[int, int]:
    """``2/8`` as numbers."""
    i, _, n = shard.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise ExperimentError(f"--shard takes I/N, such as 2/8 with I from 1 to N, but is {shard!r}.")
    return int(i), int(n)


def _run_shard(
    prepared: PreparedExperiment, folder: Path, shard: tuple[int, int], fresh: bool, more: dict[str, Any]
) -> None:
    from rich.console import Console

    from fedstrata.lab.experiments.runner import run_experiment
    from fedstrata.support.compiled import keep_compiled

    if fresh:
        raise ExperimentError("--fresh would discard what the other parts have stored: leave it out.")
    keep_compiled()
    run_experiment(prepared, folder, shard=shard, console=Console(), **more)
    typer.echo(f"Part {shard[0]} of {shard[1]} is stored in {folder}. The same command without --shard "
               "writes the report once all parts are there.")  # fmt: skip


def _run_and_show(
    prepared: PreparedExperiment, words: list[str], folder: Path, as_json: bool = False, **more: Any
) -> Report:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.markup import escape

    from fedstrata.lab.experiments.runner import run_experiment
    from fedstrata.lab.report import load_report
    from fedstrata.support.compiled import VARIABLE, keep_compiled

    e, console = prepared.experiment, Console(stderr=as_json)
    console.print(f"[bold]{escape(e.title)}[/bold]\n{escape(e.description)}")
    if (kept := keep_compiled()) is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        where = f"Compiled programs are kept in {kept}; {VARIABLE}=off turns that off."
        console.print(f"[dim]{escape(where)}[/dim]")
    for remark in prepared.remarks:
        console.print(f"[yellow]{escape(remark)}[/yellow]")
    command = shlex.join(["fedstrata", *words])
    page = run_experiment(prepared, folder, command=command, console=console, **more).resolve()
    written = load_report(folder)
    _say_left_out(written)
    if as_json:
        _print_report(page, written)
        return written
    console.print(written.table.to_rich())
    if written.definition.findings:
        console.print(Markdown(written.definition.findings))
    if more.get("models"):
        typer.echo(f"Models: {(folder / 'models').resolve()}")
    typer.echo(f"Report: {page}")
    return written


def _say_left_out(written: Report) -> None:
    for why in written.left_out:
        typer.echo(f"Left out: {why}", err=True)


def _print_report(page: Path, written: Report) -> None:
    from fedstrata.lab.experiments.showing import report_facts

    _print_json({"folder": str(page.parent), "page": str(page), **report_facts(written)})


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=2))


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON lacks."""
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def options(quick: bool = False, seeds: int | None = None, set_: list[str] | None = None) -> list[str]:
    """The words of a command that give these options."""
    words = ["--quick"] * quick + ([] if seeds is None else ["--seeds", str(seeds)])
    return words + [word for change in set_ or [] for word in ("--set", change)]


def load(name: str) -> Experiment:
    """An experiment by its name, or from a .toml or .py file.

    Raises:
        ExperimentError: if it does not exist, or its definition is wrong.
    """
    from pydantic import ValidationError

    from fedstrata.lab.experiments import registry

    file = Path(registry.plain(name))
    if file.suffix not in (".toml", ".py"):
        return registry.find(name)
    if not file.is_file():
        raise ExperimentError(f"{name} does not exist.")
    if file.suffix == ".toml":
        from fedstrata.lab.experiments.toml import read

        return read(file)
    try:
        module = _import(file)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ExperimentError(f"{name}{line_in(error, file)}: {where}: {first['msg']}") from error
    except (Exception, SystemExit) as error:  # whatever a user's file does wrong; --debug shows where
        words = error if isinstance(error, ExperimentError) else f"{type(error).__name__}: {error}"
        raise ExperimentError(f"{name}{line_in(error, file)}: {words}") from error
    return registry.defined(module, name)


def _import(file: Path) -> ModuleType:
    import importlib.util

    name = f"fedstrata_file_{file.stem}"  # whatever the file is called, it hides no other module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(assignments: list[str]) -> dict[str, Any]:
    r"""What ``--set`` gives: numbers, true, false, none or text; several with commas between them.

    A value in double quotes is text, commas and all; outside them a backslash keeps a comma in the text.

    Raises:
        ExperimentError: if one is not of the form KEY=VALUE, or a key is given twice.

    >>> parse(["H=1,5", "eta=1e-3", "data=mnist", "warm=true", "beta=none"])
    {'H': [1, 5], 'eta': 0.001, 'data': 'mnist', 'warm': True, 'beta': None}
    >>> parse(['method="FedMSA, K = 1",FedAvg'])
    {'method': ['FedMSA, K = 1', 'FedAvg']}
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ExperimentError(f"--set needs KEY=VALUE, such as H=5, but is {assignment!r}.")
        if key.strip() in values:
            raise ExperimentError(f"--set {key.strip()} is given twice; separate several values by commas.")
        if text.strip().startswith("[") and text.strip().endswith("]"):
            text = text.strip()[1:-1]
        parts = [_value(part) for part in _split(text) if part.strip()]
        values[key.strip()] = parts[0] if len(parts) == 1 else parts
    return values


def _split(text: str) -> list[str]:
    """Split text at commas, except those in double quotes or after a backslash."""
    marked = re.findall(r'\s*"(?:[^"\\]|\\.)*"\s*(?=,|$)|(?:[^,\\]|\\.|\\$)+', text)
    return [part if part.strip().startswith('"') else part.replace("\\,", ",") for part in marked]


def _value(text: str) -> bool | int | float | str | None:
    text = text.strip()
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for read in (json.loads, float):
        with contextlib.suppress(ValueError):
            value = read(text)
            return value if isinstance(value, int | float | str) else text
    return text
