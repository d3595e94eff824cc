"""The page "which method": a ladder of questions, and beside each the methods that `fs.applicable` finds.

From the same, what each method reveals, for the page on security.
"""

import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedstrata as fs


class Rung(NamedTuple):
    """A question, the tutorial and the class that a "yes" leads to, and a problem for `applicable`."""

    question: str
    tutorial: str
    answer: str
    problem: Any


RUNGS = [
    Rung(
        "Should the <b>worst</b> count more than the mean: the worst samples, the worst group, a rate "
        "that no group may miss?",
        "robust",
        "fs.dro, fs.fairness",
        fs.dro.chi2(lambda x, s: 0.0, lam=1.0),
    ),
    Rung(
        "Does <b>every sample</b> have somebody who answers x, by an optimum or an equilibrium of its own?",
        "mpec",
        "fs.MPEC",
        fs.MPEC(lambda x, y, s: 0.0, lambda x, y, s: y),
    ),
    Rung(
        "Does <b>every client</b> fit a model of its own near the server's, and has the server data, too?",
        "personalised",
        "fs.Personalized",
        fs.Personalized(lambda x, s: 0.0, lambda x, y: 0.0, lambda x, y, s: 0.0),
    ),
    Rung(
        "Is there a variable that makes the same function <b>large</b> which x makes small?",
        "minimax",
        "fs.Minimax",
        fs.Minimax(lambda x, y, s: 0.0),
    ),
    Rung(
        "Is x judged at the <b>optimum of another function</b>, which depends on x?",
        "bilevel",
        "fs.Bilevel",
        fs.Bilevel(lambda x, y, s: 0.0, lambda x, y, s: 0.0),
    ),
    Rung(
        "Has the loss <b>many optima</b>, and a second function says which is wanted?",
        "selection",
        "fs.Selection",
        fs.Selection(lambda x, s: 0.0, lambda x: 0.0),
    ),
    Rung(
        "Is a nonlinear function applied to a <b>mean over all clients</b>, or several in a row?",
        "composition",
        "fs.Composition",
        fs.Composition([lambda x, s: x, lambda z: 0.0]),
    ),
    Rung(
        "Are there unknowns that <b>wait for each other</b>, given by equations and not by optima?",
        "multi-sequence",
        "fs.MultiSequence",
        fs.MultiSequence(lambda x, Z, s: x, [lambda x, z, s: z]),
    ),
    Rung("Otherwise", "minimisation", "fs.Minimization", fs.Minimization(lambda x, s: 0.0)),
]


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Replace ``<!-- ladder -->`` and ``<!-- reveals -->``."""
    if "<!-- reveals -->" in markdown:
        markdown = markdown.replace("<!-- reveals -->", reveals())
    return markdown.replace("<!-- ladder -->", ladder(page)) if "<!-- ladder -->" in markdown else markdown


def reveals() -> str:
    """What each method needs the server to see on each class of problems, as a Markdown table."""
    rows = ["| problem | averages suffice | single replies are asked for |", "|---|---|---|"]
    for rung in RUNGS:
        found: dict[str, list[str]] = {"averages": [], "replies": []}
        for fit in fs.applicable(rung.problem):
            if not fit.via:
                found[fit.reveals].append(f"`{fit.name}`")
        names = " ".join(f"`{name}`" for name in rung.answer.split(", "))
        rows.append(f"| {names} | {', '.join(found['averages'])} | {', '.join(found['replies'])} |")
    return "\n".join(rows)


def ladder(page: Page) -> str:
    """All rungs, as one element without blank lines."""

    def link(target: str, words: str) -> str:
        return f'<a href="{get_relative_url(target, page.url)}">{escape(words)}</a>'

    def methods(fits: Iterable[Any]) -> str:
        found: dict[str, list[str]] = {}
        for fit in fits:
            if not fit.via:
                kind = "values" if fit.needs.startswith("function values") else "gradients"
                masked = "" if fit.reveals == "averages" else "<sup>†</sup>"
                found.setdefault(kind, []).append(link(f"api/{fit.name}/", fit.name) + masked)
        return "".join(
            f"<span><i>{kind}</i> {', '.join(names)}</span>" for kind, names in sorted(found.items())
        )

    rows = []
    for rung in RUNGS:
        names = ", ".join(link(f"api/{one[3:]}/", one) for one in rung.answer.split(", "))
        answer = f"<b>{names}</b> · {link(f'tutorials/{rung.tutorial}/', 'tutorial')}"
        arrow = "<i>→</i>" if rung is RUNGS[-1] else "<i>yes →</i>"
        rows.append(
            f'<div class="rung"><div class="question">{rung.question}</div>{arrow}'
            f'<div class="answer">{answer}{methods(fs.applicable(rung.problem))}</div></div>'
        )
    return '<div class="ladder">' + '<div class="no">no ↓</div>'.join(rows) + "</div>"
