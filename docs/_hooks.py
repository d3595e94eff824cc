"""Pages without lists to keep: folders in the navigation, rooms in the API reference."""

import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REST = "*"
_rest: list[str] = []


@event_priority(-100)  # after the hooks that make pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Expand the navigation: a folder into its pages, ordered by its index; ``*`` into all the rest."""
    for path in sorted((ROOT / "reproductions").rglob("*.*")):
        name = path.relative_to(ROOT / "reproductions").as_posix().replace("README", "index")
        if path.suffix == ".md":
            text = path.read_text("utf-8").replace("](../docs/", "](../")
            files.append(File.generated(config, f"experiments/{name}", content=text))
        elif path.suffix == ".svg":
            files.append(File.generated(config, f"experiments/{name}", abs_src_path=str(path)))
    pages = sorted(file.src_uri for file in files.documentation_pages())

    def names(entry: Any) -> list[str]:
        inner = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        return [entry] if isinstance(entry, str) else [name for one in inner for name in names(one)]

    named = [name for name in names(config.nav) if name != REST]
    single = {name for name in named if not name.endswith("/")}
    rest = _rest[:] = [page for page in pages if not page.startswith(tuple(named))]

    def order(folder: str) -> Callable[[str], int]:
        """The index first, then as it links to the others, then those it does not name."""
        index = f"{folder}index.md"
        found = files.get_file_from_path(index)
        text = found.content_string if found else ""
        linked = re.findall(r"\]\(([\w-]+)\.\w+", text)
        places = {f"{folder}{name}.md": n for n, name in enumerate(linked)}  # a tutorial is linked as .py
        return lambda page: -1 if page == index else places.get(page, len(linked))

    def expand(entry: Any) -> list[Any]:
        match entry:
            case dict():
                return [{title: expand_one(target)} for title, target in entry.items()]
            case str() if entry == REST:
                return rest
            case str() if entry.endswith("/"):
                inside = [page for page in pages if page.startswith(entry) and page not in single]
                return sorted(inside, key=order(entry))
        return [entry]

    def expand_one(target: Any) -> Any:
        if isinstance(target, list):
            return [found for entry in target for found in expand(entry)]
        return expand(target) if target == REST or target.endswith("/") else target

    config.nav = [found for entry in config.nav or [] for found in expand(entry)]
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **kwargs: Any) -> str:
    """Expand ``::: package.*`` into its docstring and its public modules, ``<!-- rest -->`` into links."""

    def expand(match: re.Match[str]) -> str:
        package = match[1]
        folder = ROOT.joinpath(*package.split("."))
        modules = [module.name for module in pkgutil.iter_modules([str(folder)])]
        public = [f"::: {package}.{name}" for name in modules if not name.startswith("_")]
        return "\n\n".join([f"::: {package}\n    options:\n      members: false", *public])

    if "<!-- rest -->" in markdown:  # on a page one folder below the others
        heads = {page: Path(config.docs_dir, page).read_text("utf-8").splitlines()[0] for page in _rest}
        links = [f"[{head.strip('# ')}](../{page})" for page, head in heads.items()]
        markdown = markdown.replace("<!-- rest -->", " · ".join(links))
    return re.sub(r"^::: ([\w.]+)\.\*$", expand, markdown, flags=re.MULTILINE)
