"""Expands the folders named in the navigation of mkdocs.yml into their pages, the index first."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by MkDocs before it collects the pages."""
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
