"""The command line: list, run, reproduce and report experiments, and a demo.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.experiments.net import net

if TYPE_CHECKING:
    from fedstrata.experiments import Experiment
    from fedstrata.experiments.runner import PreparedExperiment

app = typer.Typer(
    help="Federated optimisation with levels: run experiments, reproduce the papers' tables, make reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(net, name="net")

Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The folder for runs and report; default runs/NAME.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget runs that are stored in the folder.")]
Seeds = Annotated[int | None, typer.Option("--seeds", min=1, help="How many seeds.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a parameter or the grid: H=5, H=1,5,20. May be repeated."
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A small version of less than 20 s.")]
Together = Annotated[
    bool | None,
    typer.Option(
        "--together/--one-by-one",
        help="Whether runs that share a program are solved side by side; the default is yes on a GPU.",
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def _messages(debug: bool = False) -> Iterator[None]:
    """User errors as one message on stderr and exit code 2; Ctrl-C as 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        from fedstrata.experiments.runner import ExperimentInterrupted

        if not isinstance(error, ExperimentInterrupted):
            raise
        typer.echo(f"\nInterrupted: {error}", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        from fedstrata.data import CorruptData, DataError, DataNotFound
        from fedstrata.experiments import ExperimentError
        from fedstrata.report import ReportError
        from fedstrata.solving.checkpoint import CheckpointError

        ours = (ExperimentError, ReportError, DataError, DataNotFound, CorruptData, CheckpointError, OSError)
        if debug or not isinstance(error, ours):
            raise
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command("list")
def list_() -> None:
    """The experiments that there are."""
    import rich
    import rich.box
    from rich.table import Table

    from fedstrata.experiments.registry import headline, names

    table = Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    for head in ("name", "what", "paper", "data"):
        table.add_column(head, no_wrap=head == "name")
    table.add_column("quick", justify="right", no_wrap=True)
    with _messages():
        for one in map(headline, names()):
            data = ", ".join(one.needs) or "bundled"
            if one.needs and one.fallback is not None:
                data += f" (else {one.fallback.get('data', 'other')})"
            quick = "–" if one.quick_seconds is None else f"{one.quick_seconds:.0f} s"
            table.add_row(one.name, one.title, one.paper or "–", data, quick)
    rich.print(table)
    rich.print("[dim]fedstrata run NAME --quick tries one; fedstrata reproduce NAME runs it in full.[/dim]")


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A name, a .toml or a .py file.")],
    quick: Quick = False,
    seeds: Seeds = None,
    set_: Set = None,
    out: Out = None,
    fresh: Fresh = False,
    together: Together = None,
    debug: Debug = False,
) -> None:
    """Run an experiment, or what is missing of it, and write its report."""
    with _messages(debug):
        from fedstrata.experiments.runner import prepare

        definition = load(experiment)
        prepared = prepare(definition, quick=quick, seeds=seeds, changes=parse(set_ or []))
        words = ["run", experiment, *["--quick"] * quick]
        words += [] if seeds is None else ["--seeds", str(seeds)]
        words += [word for change in set_ or [] for word in ("--set", change)]
        folder = out or Path("runs") / (definition.name + "-quick" * quick)
        _run_and_show(prepared, words, folder, fresh, together)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="See `fedstrata list`.")],
    out: Out = None,
    fresh: Fresh = False,
    together: Together = None,
    debug: Debug = False,
) -> None:
    """Run an experiment as the paper did, in full, and write its report."""
    with _messages(debug):
        from fedstrata.experiments.registry import find
        from fedstrata.experiments.runner import prepare

        prepared = prepare(find(name))
        _run_and_show(prepared, ["reproduce", name], out or Path("runs") / name, fresh, together)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Make the table, the plots and the page again from a folder's runs."""
    with _messages():
        from fedstrata.report import rebuild

        typer.echo(rebuild(folder).resolve())


@app.command()
def demo(out: Out = None, seeds: Seeds = None) -> None:
    """What four hospitals gain by learning together: real data, a table and a page."""
    with _messages():
        from fedstrata.experiments.registry import find
        from fedstrata.experiments.runner import prepare

        words = ["demo"] if seeds is None else ["demo", "--seeds", str(seeds)]
        _run_and_show(prepare(find("demo"), seeds=seeds), words, out or Path("runs") / "demo", fresh=True)


def _run_and_show(
    prepared: PreparedExperiment, words: list[str], folder: Path, fresh: bool, together: bool | None = None
) -> None:
    import rich
    from rich.markup import escape

    from fedstrata.experiments.runner import run_experiment
    from fedstrata.report import load_report

    e = prepared.experiment
    rich.print(f"[bold]{escape(e.title)}[/bold]\n{escape(e.description)}")
    for remark in prepared.remarks:
        rich.print(f"[yellow]{escape(remark)}[/yellow]")
    command = shlex.join(["fedstrata", *words])
    page = run_experiment(prepared, folder, command=command, fresh=fresh, together=together)
    written = load_report(folder)
    rich.print(written.table.to_rich())
    if written.definition.findings:
        from rich.markdown import Markdown

        rich.print(Markdown(written.definition.findings))
    typer.echo(f"Report: {page.resolve()}")


def load(name: str) -> Experiment:
    """An experiment by its name, or from a .toml or .py file.

    Raises:
        ExperimentError: where there is none, or its definition is wrong.
    """
    from pydantic import ValidationError

    from fedstrata.experiments import ExperimentError, registry

    file = Path(name)
    if file.suffix not in (".toml", ".py"):
        return registry.find(name)
    if not file.is_file():
        raise ExperimentError(f"There is no file {name}.")
    if file.suffix == ".toml":
        from fedstrata.experiments.toml import read

        return read(file)
    try:
        module = _import(file)
    except ValidationError as error:
        raise ExperimentError(f"{name}: {error.errors()[0]['msg']}") from error
    except ExperimentError:
        raise
    except Exception as error:  # whatever a user's file does wrong; --debug shows where
        at = _line(error, file)
        raise ExperimentError(f"{name}{at}: {type(error).__name__}: {error}") from error
    return registry.defined(module, name)


def _line(error: Exception, file: Path) -> str:
    """Where in a file an error arose, as words."""
    numbers = [error.lineno] if isinstance(error, SyntaxError) else []
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == file.absolute():
            numbers.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {numbers[-1]}" if numbers else ""


def _import(file: Path) -> ModuleType:
    import importlib.util

    name = f"fedstrata_file_{file.stem}"  # whatever the file is called, it hides no other module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def parse(assignments: list[str]) -> dict[str, Any]:
    """What ``--set`` gives: numbers, true, false, none or text; several with commas between them.

    Raises:
        ExperimentError: where one is not of the form KEY=VALUE, or a key comes twice.

    >>> parse(["H=1,5", "eta=1e-3", "data=mnist", "warm=true", "beta=none"])
    {'H': [1, 5], 'eta': 0.001, 'data': 'mnist', 'warm': True, 'beta': None}
    """
    from fedstrata.experiments import ExperimentError

    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ExperimentError(f"--set needs KEY=VALUE, such as H=5, but is {assignment!r}.")
        if key.strip() in values:
            raise ExperimentError(f"--set {key.strip()} comes twice; give several values with commas.")
        parts = [_value(part) for part in text.strip().strip("[]").split(",") if part.strip()]
        values[key.strip()] = parts[0] if len(parts) == 1 else parts
    return values


def _value(text: str) -> bool | int | float | str | None:
    text = text.strip()
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text
    return value if isinstance(value, int | float | str) else text
