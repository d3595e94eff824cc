"""The methods that fit a problem, and their requirements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex, overload

from fedstrata.core.problem import Problem
from fedstrata.methods import METHODS, Method
from fedstrata.problems.conversions import as_bilevel, as_multisequence
from fedstrata.support import html
from fedstrata.support.shown import aligned


@dataclass(frozen=True)
class Fit:
    """A method that fits.

    Attributes:
        name: the name of the method's class, ``fs.<name>``.
        method: the class.
        needs: the oracles that it evaluates: function values, gradients, second-order products.
        assumes: the assumptions of its theory.
        data: ``"clients"``, or ``"clients and server"``.
        participation: ``"any"``, or ``"all"`` if it needs every client in every round.
        reveals: ``"averages"`` (fit for secure aggregation) or ``"replies"``.
        via: the conversion to apply first, e.g. ``"as_bilevel"``; empty if none is needed.
    """

    name: str
    method: type[Method]
    needs: str
    assumes: str
    data: str
    participation: str
    reveals: str
    via: str = ""


class Fits(tuple[Fit, ...]):
    """The methods that fit, in the order of `fedstrata.recommend` for typical constants."""

    @property
    def names(self) -> list[str]:
        """The names of the methods."""
        return [fit.name for fit in self]

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Fit: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Fit, ...]: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> Fit | tuple[Fit, ...]:
        """By position, or by the method's name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for fit in self:
            if fit.name == key:
                return fit
        raise KeyError(f"{key} does not fit; these do: {', '.join(self.names) or 'none'}.")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("method", "needs", "assumes", "data", "participation", "reveals")]
        for fit in self:
            name = f"{fit.name} (fs.{fit.via})" if fit.via else fit.name
            rows.append((name, fit.needs, fit.assumes, fit.data, fit.participation, fit.reveals))
        return rows

    def _repr_html_(self) -> str:
        return html.table(self._rows(), left=None)

    def __repr__(self) -> str:
        return "\n".join(aligned(self._rows()))


def applicable(problem: Problem) -> Fits:
    """The methods that fit a problem, and their requirements.

    Args:
        problem: any problem object.

    They are ordered like `fedstrata.recommend`'s, but for typical constants instead of measured ones. The
    last ones are baselines, methods for other objectives, and methods that need a conversion (`as_bilevel`,
    `as_multisequence`), which is named.

    Left out are methods that do not support the problem's sets or levels, and those that differentiate a
    function without derivatives (`fedstrata.black_box`).

    >>> import fedstrata as fs
    >>> fits = applicable(fs.Minimax(lambda x, y, s: (x - s["a"]) @ y - y @ y))
    >>> fits["LocalSGDA"].needs, fits["SimFBO"].via
    ('gradients', 'as_bilevel')
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            f"applicable takes a problem object such as fs.Bilevel(upper, lower), not {problem!r}."
        )
    found = fitting(problem)
    for convert in (as_bilevel, as_multisequence):
        try:
            converted = convert(problem)
        except (TypeError, ValueError):
            continue
        for name, cls in METHODS.items():
            if name not in found and cls.fits(converted):
                found[name] = _fit(cls, converted, convert.__name__)
    from fedstrata.advice.recommend import typical_order  # which imports this module

    return Fits(typical_order(problem, [found[name] for name in sorted(found, key=str.lower)]))


def fitting(problem: Problem) -> dict[str, Fit]:
    """The methods that fit without a conversion, by name."""
    names = sorted((name for name, cls in METHODS.items() if cls.fits(problem)), key=str.lower)
    return {name: _fit(METHODS[name], problem, "") for name in names}


def _fit(cls: type[Method], problem: Problem, via: str) -> Fit:
    return Fit(
        name=cls.__name__,
        method=cls,
        needs=cls.needs_for(problem),
        assumes=problem.assumes,
        data="clients and server"
        if any(level.samples == "server" for level in problem.levels)
        else "clients",
        participation="any" if cls.full_participation is None else "all",
        reveals=cls.reveals_on(problem),
        via=via,
    )
