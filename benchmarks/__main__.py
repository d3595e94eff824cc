"""``python -m benchmarks [NAME …]``: the tracked benchmarks, or those named, each in a process of its own.

They print tables; the ratios that are tracked also go into ``benchmarks/results/DATE-COMMIT.json``, in the
format of pytest-benchmark, with the machine and the versions. `docs/benchmarks.md` shows them over time.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pkgutil
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fedstrata

from .timing import TRACK

FOLDER = Path(__file__).parent
TRACKED = ("whole_calls", "sweeps", "fedavg_softmax", "fedrzo", "first_result")
VERSIONS = ("fedstrata", "jax", "jaxlib", "numpy", "torch")


def machine() -> dict[str, Any]:
    """The processor and the versions, under the names that pytest-benchmark gives them where it has any."""
    found = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if sys.platform == "linux"
        else None
    )
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    packages["fedstrata"] = fedstrata.__version__
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "python_version": platform.python_version(),
        "cpu": {"brand_raw": found[1] if found else platform.processor(), "count": os.cpu_count()},
        "versions": {name: packages[name] for name in VERSIONS if name in packages},
    }


def commit() -> dict[str, Any]:
    """The commit that was measured, and whether files were changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


def main(names: list[str]) -> None:
    """Run them, and keep what they track."""
    modules = {module.name for module in pkgutil.iter_modules([str(FOLDER)])}
    known = sorted(modules - {"__main__", "timing", "flare_system", "alternatives"})
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"There is no benchmark {', '.join(unknown)}; there are {', '.join(known)}.")
    began, about = datetime.datetime.now(datetime.UTC), machine()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{about['cpu']['count']} cores, {about['cpu']['brand_raw']}; {versions}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "tracked"
        for name in names or TRACKED:
            command = [sys.executable, "-m", f"benchmarks.{name}"]
            subprocess.run(command, cwd=FOLDER.parent, env=os.environ | {TRACK: str(kept)}, check=True)
        entries = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    if entries:
        whole = {"machine_info": about, "commit_info": commit(), "benchmarks": entries}
        whole |= {"datetime": began.isoformat(), "version": "5.0.0"}
        target = FOLDER / "results" / f"{began:%Y-%m-%d}-{whole['commit_info']['id'][:7]}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{len(entries)} ratios are in {target.relative_to(FOLDER.parent)}")


main(sys.argv[1:])
