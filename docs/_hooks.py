"""Pages without lists to keep: folders in the navigation, rooms in the API reference."""

import pkgutil
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the folders named in the navigation of mkdocs.yml into their pages, the index first."""
    docs = Path(config.docs_dir)

    def pages(folder: str) -> list[str]:
        found = sorted(page.relative_to(docs).as_posix() for page in (docs / folder).rglob("*.md"))
        return sorted(found, key=lambda page: page != f"{folder}index.md")

    config.nav = [
        {title: pages(target) if target.endswith("/") else target}
        for entry in config.nav or []
        for title, target in entry.items()
    ]
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Expand ``::: package.*`` into the package's own docstring and its public modules."""

    def expand(match: re.Match[str]) -> str:
        package = match[1]
        folder = ROOT.joinpath(*package.split("."))
        modules = [module.name for module in pkgutil.iter_modules([str(folder)])]
        public = [f"::: {package}.{name}" for name in modules if not name.startswith("_")]
        return "\n\n".join([f"::: {package}\n    options:\n      members: false", *public])

    return re.sub(r"^::: ([\w.]+)\.\*$", expand, markdown, flags=re.MULTILINE)
