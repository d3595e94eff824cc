"""What griffe does not see by itself: examples outside a section, and the arguments of methods and sets."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent) *\S.*)*", re.MULTILINE)

_DATACLASS = ("fedstrata.core.method.method", "fedstrata.problems._parameters.pytree")


class Extension(griffe.Extension):
    """Runs over the package before its pages are written."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put a fence around examples: Markdown would take ``>>>`` for quotations."""
        if obj.docstring:
            fenced = r"\n\g<indent>```pycon\n\g<0>\n\g<indent>```\n"
            obj.docstring.value = _EXAMPLE.sub(fenced, obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Give classes that a decorator of the project makes into dataclasses their signature."""
        made = any(decorator.callable_path in _DATACLASS for decorator in cls.decorators)
        if not made or "__init__" in cls.members:
            return
        keyword = griffe.ParameterKind.positional_or_keyword
        fields = [
            griffe.Parameter(field.name, annotation=field.annotation, kind=keyword, default=field.value)
            for field in cls.members.values()
            if field.is_attribute and field.annotation is not None
        ]
        parameters = griffe.Parameters(griffe.Parameter("self", kind=keyword), *fields)
        cls.set_member("__init__", griffe.Function("__init__", parent=cls, parameters=parameters))
