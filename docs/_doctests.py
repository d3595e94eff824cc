"""Shows the examples in docstrings as code: Markdown would take their ``>>>`` for quotations."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent) *\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around every run of lines that starts with ``>>>``."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for everything that may have a docstring."""
        if obj.docstring:
            fenced = r"\n\g<indent>```pycon\n\g<0>\n\g<indent>```\n"
            obj.docstring.value = _EXAMPLE.sub(fenced, obj.docstring.value)
