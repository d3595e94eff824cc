"""The API reference: a page for every name at ``fs.``, and links to it from tables and code."""

import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedstrata as fs

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
COMPARISON = "comparison.md"  # where names in tables are other projects'
_TAG = re.compile(r"(<[^>]+>)")
_CLOSED = {"a", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "nav", "summary"}  # no links in there


def room(name: str) -> str:
    """The room that a name at ``fs.`` comes from."""
    value = getattr(fs, name)
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    parts = (home or "fedstrata.methods").split(".")  # METHODS is no module's, class's or function's
    return parts[1] if len(parts) > 1 else "core"


def rooms() -> dict[str, list[str]]:
    """Room → names, those in `ROOMS` first."""
    order = [*ROOMS, *sorted({room(name) for name in fs.__all__} - set(ROOMS))]
    found = {one: [name for name in fs.__all__ if room(name) == one] for one in order}
    return {one: sorted(named, key=str.lower) for one, named in found.items() if named}


def title(one: str) -> str:
    """A room's name in the navigation."""
    return ROOMS.get(one, one.capitalize())


def summary(value: object) -> str:
    """The first sentence of a docstring, in one line."""
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


def listing(names: list[str]) -> str:
    """A table of names that have pages."""
    rows = [f"| [`fs.{name}`]({name}.md) | {cell(getattr(fs, name))} |" for name in names]
    return "\n".join(["| | |", "|---|---|", *rows])


def cell(value: object) -> str:
    """A summary that a table's cell can hold."""
    return "" if isinstance(value, dict) else summary(value).replace("|", "\\|")


def block(path: str, **options: str) -> str:
    """What mkdocstrings expands."""
    if "heading" in options:
        options["toc_label"] = options["heading"]
    return "\n".join(
        [f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items())]
    )


def page(name: str) -> str:
    """The page of one name."""
    value = getattr(fs, name)
    if isinstance(value, ModuleType):
        return module_page(name, value)
    if inspect.isclass(value) and issubclass(value, fs.Method) and value is not fs.Method:
        return method_page(name, value)
    parts = [
        f"---\ntitle: fs.{name}\n---",
        block(f"fedstrata.{name}", heading=f"fs.{name}", heading_level="1"),
    ]
    if inspect.isclass(value) and issubclass(value, fs.Problem):
        solvers = sorted((other for other, cls in fs.METHODS.items() if value in cls.solves), key=str.lower)
        parts += [f"## Solved by\n\n{links(solvers)}."] if solvers else []
    elif isinstance(value, dict):
        parts.append(listing([key for key in value if key in fs.__all__]))
    return "\n\n".join([*parts, ""])


def method_page(name: str, cls: type[fs.Method]) -> str:
    """A method's page: what it solves, its module's docstring, which is its documentation, its arguments."""
    bare = {"members": "false", "show_root_heading": "false", "show_root_toc_entry": "false"}
    facts = f"Solves {links(kind.__name__ for kind in cls.solves)}. Needs {cls.needs}."
    own = block(f"fedstrata.{name}", heading="Arguments", show_symbol_type_heading="false")
    return "\n\n".join([f"# fs.{name}", facts, block(cls.__module__, **bare), own, ""])


def links(names: Iterable[str]) -> str:
    """Names with their pages."""
    return ", ".join(f"[{name}]({name}.md)" for name in names)


def module_page(name: str, module: ModuleType) -> str:
    """The page of a module: links to what has a page of its own, and the rest of its names."""
    own = [
        one for one, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    public = getattr(module, "__all__", None) or [one for one in own if not one.startswith("_")]
    linked = [one for one in public if getattr(fs, one, None) is getattr(module, one)]
    parts = [f"# fs.{name}", inspect.getdoc(module) or ""]
    if linked:
        parts.append(listing(linked))
    for one in public:
        if one not in linked:
            parts.append(block(f"{module.__name__}.{one}", heading=f"fs.{name}.{one}"))
    return "\n\n".join([*parts, ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and put them into the navigation by rooms, in the place of ``api/``."""
    for name in fs.__all__:
        files.append(File.generated(config, f"api/{name}.md", content=page(name)))
    by_room = [{title(one): [f"api/{n}.md" for n in named]} for one, named in rooms().items()]
    inside = sorted(file.src_uri for file in files if file.src_uri.startswith("api/inside/"))

    def placed(entry: Any) -> Any:
        match entry:
            case "api/":
                return ["api/index.md", *by_room, {"Inside": inside}]
            case dict():
                return {title: placed(target) for title, target in entry.items()}
            case list():
                return [placed(one) for one in entry]
        return entry

    config.nav = placed(config.nav)
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """List the names on the index; inside, leave out what has a page of its own."""
    if page.file.src_uri == "api/index.md":
        lists = [f"## {title(one)}\n\n{listing(named)}" for one, named in rooms().items()]
        return markdown.replace("<!-- names -->", "\n\n".join(lists))
    if not page.file.src_uri.startswith("api/inside/"):
        return markdown

    def rest(found: re.Match[str]) -> str:
        shown = [name for name in fs.__all__ if getattr(getattr(fs, name), "__module__", None) == found[1]]
        filters = ["!^_", *(f"!^{name}$" for name in shown)]
        return f"{found[0]}\n    options:\n      filters: {json.dumps(filters)}" if shown else found[0]

    return re.sub(r"^::: ([\w.]+)$", rest, markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Page, **kwargs: Any) -> str:
    """Link methods and problems in tables and code, and ``fs.name`` in code, to their pages."""
    classes = {name for name in fs.__all__ if inspect.isclass(getattr(fs, name))}
    kinds = {name for name in classes if issubclass(getattr(fs, name), fs.Method | fs.Problem)}
    written = {name: name for name in kinds} | {text: text.replace("-", "") for text in HYPHENED}
    in_table = re.compile(rf"\b({'|'.join(sorted(written, key=len, reverse=True))})\b")
    named = "|".join(sorted(fs.__all__, key=len, reverse=True))
    in_code = re.compile(rf"^(?:fs\.({named})\b(?!\.)|({'|'.join(sorted(kinds))})$)")
    inside: list[str] = []
    parts = []
    for part in _TAG.split(html):
        if tag := re.match(r"<(/?)(\w+)", part):
            if tag[1] and tag[2] in inside:
                del inside[len(inside) - 1 - inside[::-1].index(tag[2]) :]
            elif not tag[1] and not part.endswith("/>") and tag[2] in {*_CLOSED, "td", "code"}:
                inside.append(tag[2])
        elif part and not _CLOSED & set(inside):
            if "td" in inside and "code" not in inside and page.file.src_uri != COMPARISON:
                part = in_table.sub(lambda found: anchor(written[found[1]], found[0], page), part)
            if "code" in inside:
                part = in_code.sub(lambda found: anchor(found[1] or found[2], found[0], page), part)
        parts.append(part)
    return "".join(parts)


def anchor(name: str, text: str, page: Page) -> str:
    """A link from a page to a name's."""
    return f'<a href="{get_relative_url(f"api/{name}/", page.url)}">{text}</a>'
