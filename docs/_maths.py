"""Formulas as MathML, made when the site is built: browsers draw it with no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Replace what pymdownx.arithmatex has marked."""
    return _MARKED.sub(lambda found: mathml(found["tex"], found["tag"] == "div"), html)


def mathml(tex: str, block: bool) -> str:
    """One formula; the names of what is minimised stand below, as in print."""
    source = html.unescape(tex).strip().replace(r"\arg", r"\mathrm{arg}\,")
    if block:
        source = re.sub(r"\\(min|max)_", r"\\\1\\limits_", source)
    made = convert(source, display="block" if block else "inline")
    if "\\" in made:
        raise ValueError(f"A command of this formula is not known: {tex}")
    return made
