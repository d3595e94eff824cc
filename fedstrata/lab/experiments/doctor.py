"""A check of this machine, with the commands that install missing packages."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import rich.box
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedstrata import __version__
from fedstrata.lab.report.tables import bytes_text
from fedstrata.support.threads import cores

PURPOSES = {
    "lab": "the command line, experiments, reports, data sets", "gpu": "NVIDIA GPUs",
    "network": "real sites: fedstrata net", "torch": "models written in PyTorch",
    "datasets": "data from Hugging Face", "flare": "real sites inside NVIDIA FLARE",
    "otel": "spans of exchanges, for OpenTelemetry", "flower": "real sites inside Flower",
    "benchopt": "comparisons run by benchopt",
    "track": "TensorBoard: fs.track.TensorBoard", "mlflow": "MLflow: fs.track.MLflow",
    "wandb": "Weights & Biases: fs.track.WandB",
    "privacy": "the privacy that noise gives: fs.Channel(noise=…)",
    "tune": "large searches with Optuna: fs.tune", "bench": "the benchmarks", "test": "the tests",
    "test-long": "the nightly tests", "docs": "the documentation", "dev": "work on the package itself",
}  # fmt: skip
DEVELOPERS = ("bench", "test", "test-long", "docs", "dev")
SOURCE = Path(__file__).parents[3] / "pyproject.toml"  # in a checkout, whose installed metadata may be older
SPACE = 2**30  # bytes of free disk below which a long run may end badly


def examine() -> dict[str, Any]:
    """Versions, devices, data, extras, disk; ``trouble`` says what to repair."""
    trouble: list[str] = []
    devices = _devices(trouble)
    extras, versions = _requirements(trouble)
    return {
        "fedstrata": __version__,
        "folder": str(Path(__file__).parents[2]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": cores(),
        "memory_bytes": _memory(),
        "versions": versions,
        "devices": devices,
        "data": _data(trouble),
        "extras": extras,
        "disk": _disk(trouble),
        "trouble": trouble,
    }


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def _devices(trouble: list[str]) -> list[dict[str, Any]]:
    try:
        import jax

        found = [{"kind": d.device_kind, "platform": d.platform, "id": d.id} for d in jax.devices()]
    except Exception as error:  # a broken driver can raise anything, and is what we are here to tell
        trouble.append(f"JAX finds no device: {error}")
        return []
    if shutil.which("nvidia-smi") and all(device["platform"] == "cpu" for device in found):
        asked = os.environ.get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS is {asked!r}" if asked else f"{install('gpu')} lets JAX use it"
        trouble.append(f"There is an NVIDIA driver, but JAX sees only the CPU: {why}.")
    return found


def install(extra: str = "") -> str:
    """The command that installs the package, or an extra of it, from where it came."""
    what = f"fedstrata[{extra}]" if extra else "fedstrata"
    try:
        source = json.loads(metadata.distribution("fedstrata").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        source = {}
    if source.get("dir_info", {}).get("editable"):
        return f"pip install -e '{what.replace('fedstrata', urlparse(source['url']).path)}'"
    return f"pip install '{what}'"


def _requirements(trouble: list[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The extras, and the versions of what the package itself needs."""
    try:
        own, by_extra = declared()
    except metadata.PackageNotFoundError:
        trouble.append(
            "fedstrata is not installed, so its requirements are unknown: pip install -e . in its folder."
        )
        return [], {}
    trouble += [f"{_lacking([r])[0]}: run {install()}." for r in own if _lacking([r])]
    missing = {extra: _lacking(wanted) for extra, wanted in by_extra.items()}
    extras = [
        {"name": extra, "purpose": PURPOSES.get(extra, ""), "installed": not lacking, "missing": lacking,
         "install": install(extra)}
        for extra, lacking in missing.items()
    ]  # fmt: skip
    return extras, {r.name: _version(r.name) or "missing" for r in own}


def declared() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """The requirements of the package and its extras: by pyproject.toml in a checkout, else as installed."""
    if SOURCE.is_file():
        project = tomllib.loads(SOURCE.read_text("utf-8")).get("project", {})
        if project.get("name") == "fedstrata":
            extras = project["optional-dependencies"]
            return _parsed(project["dependencies"]), {name: _parsed(asked) for name, asked in extras.items()}
    asked = _parsed(metadata.requires("fedstrata") or [])
    own = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    names = metadata.metadata("fedstrata").get_all("Provides-Extra") or []
    return own, {name: _of_extra(asked, name) for name in names}


def _parsed(asked: Iterable[str]) -> list[Requirement]:
    return [Requirement(text) for text in asked]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _lacking(requirements: Iterable[Requirement]) -> list[str]:
    """Requirements that are missing or have the wrong version; an extra of the package itself is followed."""
    found = []
    for requirement in requirements:
        name, version = requirement.name, _version(requirement.name)
        if name == "fedstrata":
            for extra in sorted(requirement.extras):
                found += _lacking(declared()[1].get(extra, []))
        elif version is None:
            found.append(f"{name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{name} is {version}, not {requirement.specifier}")
        else:
            for extra in sorted(requirement.extras):
                found += _lacking(_of_extra(_parsed(metadata.requires(name) or []), extra))
    return found


def _of_extra(requirements: Iterable[Requirement], extra: str) -> list[Requirement]:
    """The requirements that an extra adds."""
    marked = [r for r in requirements if r.marker and not r.marker.evaluate({"extra": ""})]
    return [r for r in marked if r.marker and r.marker.evaluate({"extra": extra})]


def _data(trouble: list[str]) -> dict[str, Any]:
    import pooch

    from fedstrata.lab.datasets.fetch import ENVIRONMENT, FORMS
    from fedstrata.lab.experiments.data import present
    from fedstrata.support.compiled import keep_compiled

    asked = os.environ.get(ENVIRONMENT)
    if asked and not Path(asked).is_dir():
        trouble.append(f"{ENVIRONMENT} is {asked}, which is not a folder. Create it, or unset the variable.")
    return {
        "variable": ENVIRONMENT,
        "folder": asked,
        "cache": str(pooch.os_cache("fedstrata")),
        "compiled": str(keep_compiled() or "off"),
        "sets": {name: present(name) for name in FORMS},
    }


def _disk(trouble: list[str]) -> dict[str, int]:
    """Free bytes where runs and temporary files go."""
    import tempfile

    free = {}
    for place in (Path.cwd(), Path(tempfile.gettempdir())):
        free[str(place)] = shutil.disk_usage(place).free
        if free[str(place)] < SPACE:
            trouble.append(f"{place} has {bytes_text(free[str(place)])} left.")
        if not os.access(place, os.W_OK):
            trouble.append(f"{place} cannot be written: give --out another folder.")
    return free


def show(facts: dict[str, Any]) -> None:
    """Print what `examine` found."""
    console = Console()
    memory = "" if facts["memory_bytes"] is None else f", {bytes_text(facts['memory_bytes'])} of memory"
    lines = [
        ("fedstrata", f"{facts['fedstrata']} in {facts['folder']}"),
        ("python", f"{facts['python']}, {facts['executable']}"),
        ("machine", f"{facts['platform']}, {facts['cores']} cores{memory}"),
        ("devices", ", ".join(f"{d['kind']} ({d['platform']})" for d in facts["devices"]) or "none"),
        ("packages", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        ("data", _data_words(facts["data"])),
        ("disk", ", ".join(f"{bytes_text(free)} free in {place}" for place, free in facts["disk"].items())),
    ]
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, words in lines:
        table.add_row(name, escape(words))
    console.print(table)
    extras = Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    for head in ("extra", "for", "here", "how"):
        extras.add_column(head, no_wrap=head in ("extra", "here"))
    for extra in facts["extras"]:
        if extra["name"] in DEVELOPERS and not extra["installed"]:
            continue
        other = [words for words in extra["missing"] if not words.endswith("is missing")]
        how = "" if extra["installed"] else "; ".join([extra["install"], *other])
        extras.add_row(extra["name"], extra["purpose"], "yes" if extra["installed"] else "no", escape(how))
    console.print(extras)
    for line in facts["trouble"]:
        console.print(f"[yellow]! {escape(line)}[/yellow]")
    if not facts["trouble"]:
        console.print("No problems found.")


def _data_words(data: dict[str, Any]) -> str:
    where = f"{data['variable']} is {data['folder'] or 'not set'}; downloads go to {data['cache']}, "
    where += f"compiled programs to {data['compiled']}; "
    here = [name for name, there in data["sets"].items() if there]
    away = [name for name, there in data["sets"].items() if not there]
    return where + f"here: {', '.join(here) or 'none'}; not here: {', '.join(away) or 'none'}"
