"""What a paper says and what was found here, read from the tables of the pages beside the definitions."""

import re
from pathlib import Path
from typing import get_args

from fedstrata.lab import Claim, PaperClaims, Statement
from fedstrata.lab.report.specs import Outcome

_TABLE = re.compile(r"\n\| the paper says[^|\n]*\| here[^|\n]*\|\n\|[-|]+\|\n((?:\|.*\n)+)")
_ROW = re.compile(r"\| (.+?) \| \*\*(.+?)\*\*(.*?) \|")


def claims(page: str, source: str, table: int = 0, printed: tuple[Claim, ...] = ()) -> PaperClaims:
    """The rows of a page's table ``| the paper says | here |``, and the numbers that the paper printed.

    What was found begins with the verdict in bold; a row without one is left out.

    Args:
        page: its name.
        source: the paper's figures or tables.
        table: which of the page's tables.
        printed: numbers.
    """
    text = (Path(__file__).parent / f"{page}.md").read_text("utf-8")
    rows = filter(None, map(_ROW.fullmatch, _TABLE.findall(text)[table].splitlines()))
    statements = tuple(Statement(_plain(row[1]), *_found(row[2], row[3])) for row in rows)
    return PaperClaims(source, printed, statements)


def _found(verdict: str, rest: str) -> tuple[str, Outcome]:
    """What was found, and the verdict in one of the words that reports have."""
    for known in get_args(Outcome):
        if verdict.startswith(known):
            return _plain(rest.lstrip(":;,. ")), known
    return _plain(f"{verdict}{rest}"), "partly"


def _plain(markdown: str) -> str:
    """Text without emphasis and links, with a capital in front."""
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown).replace("**", "").replace("\\|", "|")
    text = re.sub(r"\*(\w[^*]*)\*", r"\1", text).replace("`", "")
    return text[:1].upper() + text[1:] if text[:1].isascii() else text
