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
    """One formula."""
    return convert(html.unescape(tex).strip(), display="block" if block else "inline")
