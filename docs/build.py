"""Write the documentation as plain Markdown: ``python -m docs.build [FOLDER]``, by default ``build``.

``FOLDER/docs`` then has every page, with included files, formulas (MathML), the tutorials with what they
printed, a page for every name at ``fs.`` and links to it, and ``FOLDER/mkdocs.yml`` the navigation. Any
builder that reads MkDocs' configuration makes a site of it: ``make docs`` runs MkDocs, and
``make docs SITE='zensical build'`` runs Zensical.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from latex2mathml.converter import convert

import fedstrata as fs
from docs import record
from fedstrata.core.method import METHODS

ROOT = Path(__file__).parents[1]
DOCS, PAPERS = ROOT / "docs", ROOT / "reproductions"
ROOMS = {
    "solving": "Solving",
    "problems": "Problems",
    "methods": "Methods",
    "models": "Models",
    "data": "Data",
    "engines": "Engines",
    "advice": "Advice",
    "core": "The contract",
}
HYPHENED = ("BiG-SAM", "DS-FedDRO", "IPIR-FedAvg", "R-APM", "StR-FedAvg", "ZO-HFL")  # as papers write them
WIDTH = 88  # of a signature in one line
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


EXAMPLES = {  # for `fs.applicable`
    "dro": fs.dro.chi2(lambda x, s: 0.0, lam=1.0),
    "MPEC": fs.MPEC(lambda x, y, s: 0.0, lambda x, y, s: y),
    "Personalized": fs.Personalized(lambda x, s: 0.0, lambda x, y: 0.0, lambda x, y, s: 0.0),
    "Minimax": fs.Minimax(lambda x, y, s: 0.0),
    "Bilevel": fs.Bilevel(lambda x, y, s: 0.0, lambda x, y, s: 0.0),
    "Selection": fs.Selection(lambda x, s: 0.0, lambda x: 0.0),
    "Composition": fs.Composition([lambda x, s: x, lambda z: 0.0]),
    "MultiSequence": fs.MultiSequence(lambda x, Z, s: x, [lambda x, z, s: z]),
    "Minimization": fs.Minimization(lambda x, s: 0.0),
}


# --- names and their docstrings -------------------------------------------------------------------


def rooms() -> dict[str, list[str]]:
    """Room → its names at ``fs.``, those in `ROOMS` first."""

    def room(name: str) -> str:
        value = getattr(fs, name)
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        parts = (home or "fedstrata.methods").split(".")  # METHODS is a plain dict
        return parts[1] if len(parts) > 1 else "core"

    found: dict[str, list[str]] = {one: [] for one in ROOMS}
    for name in sorted(fs.__all__, key=str.lower):
        found.setdefault(room(name), []).append(name)
    return {one: names for one, names in found.items() if names}


def listing(names: Sequence[str]) -> str:
    """A table of names and the first sentences of their docstrings."""
    texts = {name: getattr(fs, name).__doc__ or "" for name in names} | {"METHODS": "All methods, by name."}
    first = {name: texts[name].split("\n\n")[0] for name in names}
    cells = {name: " ".join(text.split()).replace("|", r"\|") for name, text in first.items()}
    rows = [f"| `fs.{name}` | {cell} |" for name, cell in cells.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def signature(name: str, value: Any) -> str:
    """How it is called, one argument a line where it is long; nothing for what cannot be called."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    arguments = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    returns = found.empty if inspect.isclass(value) else found.return_annotation
    found = found.replace(parameters=arguments, return_annotation=returns)
    text = re.sub(r"(: |-> )'([^'\n]*)'", r"\1\2", f"{name}{found}")  # annotations are kept as text
    if len(text) > WIDTH:  # broken at the commas between arguments, which stand in no bracket
        inside, _, returns = text.removeprefix(f"{name}(").rpartition(")")
        lines = re.sub(r", (?=[\w*]+(?:[:=,]|$)|\*)(?![^\[(]*[\])])", ",\n    ", inside)
        text = f"{name}(\n    {lines}\n){returns}"
    return f"```python\n{text}\n```"


def prose(docstring: str) -> str:
    """A docstring in Google style as Markdown."""
    text = re.sub(r"(?m)^>>> .*(?:\n\S.*)*", r"```pycon\n\g<0>\n```", inspect.cleandoc(docstring))

    def section(found: re.Match[str]) -> str:
        body = inspect.cleandoc(found[2])
        if found[1] in ("Args", "Attributes", "Raises"):
            body = re.sub(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*):", r"- `\1`:", body, flags=re.MULTILINE)
        return f"**{found[1].replace('Args', 'Arguments')}**\n\n{body}\n\n"

    headed = r"^(Args|Attributes|Raises|Returns|Yields|Examples?):\n((?:(?: .*)?(?:\n|\Z))+)"
    return re.sub(headed, section, text, flags=re.MULTILINE).strip()


def documented(value: Any, name: str, level: int, heading: str = "") -> str:
    """One object: its signature, its docstring, and a class's public methods and properties."""
    parts = [f"{'#' * level} {heading or name}"]
    own = value.fget if isinstance(value, property) else value
    parts += [] if isinstance(value, property) else [signature(name.rpartition(".")[2], value)]
    parts.append(prose(own.__doc__ or ""))
    if inspect.isclass(value):
        for member, inner in vars(value).items():
            function = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
            shown = inspect.isfunction(function) or isinstance(inner, property)
            if shown and not member.startswith("_") and (inspect.getdoc(inner) or "").strip():
                parts.append(documented(function, f"{value.__name__}.{member}", level + 1))
    return "\n\n".join(filter(None, parts))


def public(module: ModuleType) -> list[str]:
    """The names that a module is for."""
    made_here = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
    return getattr(module, "__all__", None) or [name for name in made_here if not name.startswith("_")]


def name_page(name: str) -> str:
    """The page of one name at ``fs.``."""
    value = getattr(fs, name)
    if isinstance(value, ModuleType):
        listed = [one for one in public(value) if getattr(fs, one, None) is getattr(value, one)]
        rest = [one for one in public(value) if one not in listed]
        parts = [f"# fs.{name}", prose(value.__doc__ or ""), listing(listed) if listed else ""]
        parts += [documented(getattr(value, one), f"fs.{name}.{one}", 2) for one in rest]
    elif isinstance(value, dict):
        parts = [f"# fs.{name}", listing([key for key in value if key in fs.__all__])]
    elif inspect.isclass(value) and issubclass(value, fs.Method) and value is not fs.Method:
        kinds = ", ".join(f"`fs.{kind.__name__}`" for kind in value.solves)
        text = prose(sys.modules[value.__module__].__doc__ or "")  # which is the method's documentation
        own = documented(value, f"fs.{name}", 2, "Arguments")
        parts = [f"# fs.{name}", f"Solves {kinds}. Needs {value.needs}.", text, own]
    else:
        parts = [documented(value, f"fs.{name}", 1)]
        if inspect.isclass(value) and issubclass(value, fs.Problem):
            solvers = sorted((n for n, cls in fs.METHODS.items() if value in cls.solves), key=str.lower)
            parts += [f"## Solved by\n\n{', '.join(f'`fs.{n}`' for n in solvers)}."] if solvers else []
    return "\n\n".join([*filter(None, parts), ""])


def module_page(dotted: str) -> str:
    """What ``::: module`` stands for: its docstring, and the names that have no page of their own."""
    module = importlib.import_module(dotted)
    parts = [f"## {dotted}", prose(module.__doc__ or "")]
    for name in public(module):
        value = getattr(module, name)
        if callable(value) and value.__doc__ and getattr(fs, name, None) is not value:
            parts.append(documented(value, name, 3))
    return "\n\n".join(parts)


# --- tables ---------------------------------------------------------------------------------------


def fitting(kind: str, say: Callable[[Any], str]) -> dict[str, str]:
    """The methods that solve a class's example as it is, by what ``say`` says of each."""
    found: dict[str, list[str]] = {}
    for fit in fs.applicable(EXAMPLES[kind]):
        if not fit.via:
            mark = "" if fit.reveals == "averages" else "†"
            found.setdefault(say(fit), []).append(f"{fit.name}{mark}")
    return {key: ", ".join(names) for key, names in sorted(found.items())}


def methods_of(kind: str) -> str:
    """The methods of a class, by what they need."""
    needs = fitting(kind, lambda fit: "values" if fit.needs.startswith("function values") else "gradients")
    return "; ".join(f"*{what}* {names}" for what, names in needs.items())


def reveals() -> str:
    """What each method needs the server to see, by class of problems."""
    rows = ["| problem | averages suffice | single replies are asked for |", "|---|---|---|"]
    for kind in EXAMPLES:
        seen = fitting(kind, lambda fit: fit.reveals)
        rows.append(
            f"| `fs.{kind}` | {seen.get('averages', '')} | {seen.get('replies', '').replace('†', '')} |"
        )
    return "\n".join(rows)


def exchanged() -> str:
    """What each method sends, on the first of its cases."""
    from fedstrata.testing.cases import all_cases

    rows = ["| method | level | phase | what the server gets | as a difference | who is asked | times |"]
    rows.append("|---|---|---|---|---|---|---|")
    first: dict[str, Any] = {}
    for case in all_cases():
        first.setdefault(type(case.method).__name__, case)
    for name, case in sorted(first.items()):
        for one in fs.exchanges(case.problem, case.method, case.data, case.x0, y0=case.y0):
            if not one.shapes:
                continue  # it only tells clients something
            gets = "every upload" if one.gathered else "the mean"
            reference, times = "yes" if one.reference else "", "?" if one.times is None else str(one.times)
            times = f"?, ≤ {one.most}" if one.times is None and one.most is not None else times
            times = f"*{times}*" if one.program == "start" else times
            cells = (f"`{name}`", one.level, f"`{one.phase}`", gets, reference, one.asked, times)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def private() -> str:
    """The methods that can hide single samples."""
    return ", ".join(name for name in sorted(METHODS) if vars(METHODS[name]).get("private_samples"))


def history() -> str:
    """The tracked ratios of every file in ``benchmarks/results``, oldest first, with a line for each."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    runs = [json.loads(file.read_text("utf-8")) for file in files]
    if not runs:
        return "No measurement is kept in `benchmarks/results/` yet; `make bench` adds one."
    found: dict[str, list[float | None]] = {}
    for number, run in enumerate(runs):
        for entry in run["benchmarks"]:
            name = f"{entry['name']} / {entry['extra_info']['to']}"
            found.setdefault(name, [None] * len(runs))[number] = entry["extra_info"]["ratio"]
    head = ["ratio, less is better", *(run["datetime"][:10] for run in runs), ""]
    about = []
    for run in runs:
        info, versions = run["machine_info"], run["machine_info"]["versions"].items()
        where = f"{info['cpu']['count']} cores, {info['cpu']['brand_raw']}, Python {info['python_version']}"
        packages = ", ".join(f"{name} {version}" for name, version in versions)
        about.append(f"- {run['datetime'][:10]}, `{run['commit_info']['id'][:7]}`: {where}, {packages}")
    rows = [
        f"| {name} | {' | '.join('' if v is None else f'{v:.2f}' for v in values)} | {sparkline(values)} |"
        for name, values in found.items()
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|---" + "|---:" * len(runs) + "|---|", *rows, "", *about])


def sparkline(values: list[float | None]) -> str:
    """A small line in the colour of the text; its lower edge is zero."""
    known = [(n, value) for n, value in enumerate(values) if value is not None]
    top = max(value for _, value in known)
    points = " ".join(f"{4 + 72 * n / max(1, len(values) - 1):.0f},{20 - 16 * v / top:.1f}" for n, v in known)
    line = f'<polyline points="{points}" fill="none" stroke="currentColor"/>'
    return f'<svg width="80" height="24" role="img" aria-label="over time">{line}</svg>'


# --- from a source to a page ----------------------------------------------------------------------


def included(text: str) -> str:
    """Put files, or marked parts of them, in the place of ``--8<-- "file:part"``."""

    def insert(found: re.Match[str]) -> str:
        file, _, part = found[1].partition(":")
        whole = (ROOT / file).read_text("utf-8")
        if part:
            _, _, after = whole.partition(f"<!-- --8<-- [start:{part}] -->")
            whole, found_end, _ = after.partition(f"<!-- --8<-- [end:{part}] -->")
            if not found_end:
                raise ValueError(
                    f"{file} has no part {part!r}; mark it by --8<-- [start:{part}] and [end:{part}]."
                )
        return included(whole.strip("\n").replace("](docs/", "]("))

    return re.sub(r'^--8<-- "([^"]+)"$', insert, text, flags=re.MULTILINE)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what stands outside of fences, indented blocks and ``<pre>``."""
    code = re.compile(
        r"(^ *```.*?^ *```$|(?<=\n\n)(?: {4}(?![-*] |\d+\. ).*\n)+|<math.*?</math>)", re.M | re.S
    )
    return "".join(part if k % 2 else change(part) for k, part in enumerate(code.split(text)))


def with_maths(text: str) -> str:
    """Formulas as MathML: browsers draw it with no script and no network."""

    def mathml(found: re.Match[str]) -> str:
        tex = (found[1] or found[2]).strip().replace(r"\arg", r"\mathrm{arg}\,")
        if found[1]:  # what is minimised over stands below, as in print
            tex = re.sub(r"\\(min|max)_", r"\\\1\\limits_", tex)
        made = convert(tex, display="block" if found[1] else "inline")
        if "\\" in made:
            raise ValueError(f"latex2mathml does not know a command of this formula: {tex}")
        return made if found[1] else f"<span>{made}</span>"  # a line that begins with <math> is a block

    formula = re.compile(r"\$\$(.+?)\$\$|(?<![\w`$])\$([^$`\n]+?)\$(?!\w)", re.DOTALL)
    return outside_code(text, lambda part: formula.sub(mathml, part))


def linked(text: str, page: str) -> str:
    """Link ``fs.name`` in code, and methods and problems in tables and code, to their pages."""
    classes = {name for name in fs.__all__ if inspect.isclass(getattr(fs, name))}
    kinds = {name for name in classes if issubclass(getattr(fs, name), fs.Method | fs.Problem)}
    written = {name: name for name in kinds} | {text: text.replace("-", "") for text in HYPHENED}
    any_kind = "|".join(sorted(written, key=len, reverse=True))
    names = "|".join(sorted(fs.__all__, key=len, reverse=True))
    code = rf"`(?:fs\.({names})\b(?![.\w])|({'|'.join(sorted(kinds))})(?=`))[^`\n]*`"
    spans = re.compile(
        rf"!?\[(?:[^\]`]|`[^`]*`)*\]\([^)]*\)|^#.*|{code}|`+[^`]*`+|<[^>]+>|\b({any_kind})\b", re.M
    )
    here = Path(page).parent

    def link(found: re.Match[str], row: bool) -> str:
        name = found[1] or found[2] or (row and found[3] and written[found[3]])
        target = f"api/{name}.md"
        return f"[{found[0]}]({os.path.relpath(target, here)})" if name and target != page else found[0]

    def line(text: str) -> str:
        row = text.startswith("|") and page != "comparison.md"  # whose names are other projects'
        return spans.sub(lambda found: link(found, row), text)

    return outside_code(text, lambda part: "\n".join(map(line, part.split("\n"))))


def tutorial_page(name: str) -> str:
    """A tutorial as Markdown, with what was recorded below each cell."""
    outputs = iter(record.recorded(name)["outputs"])
    parts = []
    for cell in record.cells(record.read(name)):
        if cell.kind == "markdown":
            parts.append(cell.text)
            continue
        output = next(outputs)
        parts.append(f"```python\n{cell.text}\n```")
        parts += [f"```text\n{output['text']}\n```"] if output["text"] else []
        parts += [f"![What the code above draws]({picture})" for picture in output["pictures"]]
    source = f"This page is the file `docs/tutorials/{name}.py`, which the tests run"
    return "\n\n".join([*parts, "---", f"{source}; [as a notebook]({name}.ipynb).", ""])


# --- the whole ------------------------------------------------------------------------------------


def named(entry: Any) -> Iterator[str]:
    """The pages and folders that a part of the navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from named(one)


def others(pages: Iterable[str]) -> list[str]:
    """The pages that the navigation names nowhere."""
    known = tuple(set(named(CONFIG["nav"])) - {"*"})
    return sorted(page for page in pages if not page.startswith(known))


def navigation(entries: list[Any], pages: dict[str, str]) -> list[Any]:
    """Expand a folder into its pages, in the order of its index's links, ``*`` into the others."""
    single = set(named(entries))

    def inside(folder: str) -> list[str]:
        places = re.findall(r"\]\(([\w-]+\.md)", pages.get(f"{folder}index.md", ""))
        order = {f"{folder}{page}": n for n, page in reversed([*enumerate(["index.md", *places])])}
        found = [page for page in pages if page.startswith(folder) and page not in single]
        return sorted(found, key=lambda page: (order.get(page, len(order)), page))

    def expand(entry: Any) -> list[Any]:
        match entry:
            case "*":
                return others(pages)
            case "api/":
                names = [
                    {ROOMS.get(r, r.capitalize()): [f"api/{n}.md" for n in ns]} for r, ns in rooms().items()
                ]
                return ["api/index.md", *names, {"Inside": inside("api/inside/")}]
            case str() if entry.endswith("/"):
                return inside(entry)
            case dict():
                return [{title: expand_all(target) for title, target in entry.items()}]
        return [entry]

    def expand_all(target: Any) -> Any:
        if isinstance(target, list):
            return [found for entry in target for found in expand(entry)]
        return expand(target) if target.endswith("/") else target

    return expand_all(entries)


def title(text: str) -> str:
    """A page's first heading."""
    return text.partition("# ")[2].partition("\n")[0]


def pages() -> dict[str, str]:
    """Path → the Markdown of every page."""
    tutorials = "|".join(record.names())
    found = {}
    sources = {
        path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))
    }
    for path in sorted(PAPERS.glob("*.md")):
        name = path.name.replace("README", "index")
        sources[f"experiments/{name}"] = path.read_text("utf-8").replace("](../docs/", "](../")
    for page, source in sources.items():
        text = included(source)
        text = re.sub(rf"(\]\((?:\.\./)?(?:tutorials/)?(?:{tutorials}))\.py\)", r"\1.md)", text)
        text = re.sub(r"<!-- methods (\w+) -->", lambda of: methods_of(of[1]), text)
        text = re.sub(r"^::: ([\w.]+)$", lambda of: module_page(of[1]), text, flags=re.MULTILINE)
        found[page] = text
    found |= {f"tutorials/{name}.md": with_maths(tutorial_page(name)) for name in record.names()}
    found |= {f"api/{name}.md": name_page(name) for name in fs.__all__}
    made = {
        "reveals": reveals,
        "exchanges": exchanged,
        "private": private,
        "names": lambda: "\n\n".join(
            f"## {ROOMS.get(room, room.capitalize())}\n\n{listing(names)}" for room, names in rooms().items()
        ),
        "history": history,
        "rest": lambda: " · ".join(f"[{title(found[page])}](../{page})" for page in others(found)),
    }
    for page, text in found.items():
        for mark, make in made.items():
            if f"<!-- {mark} -->" in text:
                text = text.replace(f"<!-- {mark} -->", make())
        found[page] = linked(text, page)
    return found


def build(folder: Path) -> None:
    """Write pages, pictures, notebooks and the configuration."""
    target = folder / "docs"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS / "assets", target / "assets")
    shutil.copytree(PAPERS / "pictures", target / "experiments" / "pictures")
    found = pages()
    config = CONFIG | {"nav": navigation(CONFIG["nav"], found)}
    for page, text in found.items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(text, "utf-8")
    for name in record.names():
        (target / "tutorials" / f"{name}.ipynb").write_text(record.notebook(name), "utf-8")
    for picture in record.OUTPUTS.glob("*.svg"):
        (target / "tutorials" / picture.name).write_text(record.as_file(picture), "utf-8")
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")


if __name__ == "__main__":
    build(Path(*sys.argv[1:2] or ["build"]))
