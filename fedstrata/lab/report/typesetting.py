"""Labels for people: keys become words, and formulas written in Unicode are set with their scripts.

Formulas become plain HTML (sub, sup) rather than MathML: browsers do not break a MathML formula over lines,
and a phone would have to scroll. They need neither a script nor a font.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η", "theta": "θ",
    "kappa": "κ", "lam": "λ", "mu": "μ", "nu": "ν", "rho": "ρ", "sigma": "σ", "tau": "τ",
}  # fmt: skip
AXES = {
    "round": "communication round", "exchanges": "exchanges", "bytes_up": "bytes uploaded",
    "bytes_down": "bytes downloaded", "oracle_calls": "oracle calls", "seconds": "time [s]",
}  # fmt: skip


def readable(text: str) -> str:
    """A key, or a heading made of keys, as a reader wants it.

    >>> [readable(key) for key in ("test_loss", "eta", "gamma_client", "best worst_accuracy", "label")]
    ['test loss', 'η', 'γ_client', 'best worst accuracy', 'method']
    """
    if text == "label":
        return "method"
    return re.sub(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*", _token, text)


def _token(found: re.Match[str]) -> str:
    first, *rest = found[0].split("_")
    if first in GREEK:
        return "_".join([GREEK[first], *(GREEK.get(part, part) for part in rest)][:2])
    # One letter with a subscript is a symbol: x_use.
    return found[0] if len(first) == 1 else " ".join([first, *rest])


def capital(text: str) -> str:
    """With a capital letter in front, the rest as it is; a symbol stays.

    >>> capital("test AUC"), capital("f at the end"), capital("η")
    ('Test AUC', 'f at the end', 'η')
    """
    return text[:1].upper() + text[1:] if text[1:2].isalpha() else text


def label_of(series: str) -> str:
    """A series' name on an axis."""
    return AXES.get(series, readable(series))


_MARKS = r"[\u0300-\u036f]*"
_SCRIPT = r"(?:\{[^{}]*\}|[^\W\d_]+|[+−-]?\d+|\*)"
_SCRIPTED = re.compile(
    rf"((?<![A-Za-z_])(?:argmin|argmax|max|min|sup|inf|mean)|(?<![A-Za-z_])(?:[A-Z]{{2,3}}|[^\W\d_]{_MARKS})|[)\]‖Σ∏])"
    rf"((?:[_^]{_SCRIPT})+)"
)
_PART = re.compile(rf"([_^])({_SCRIPT})")


def scripted(text: str, plain: Callable[[str], str], script: Callable[[str, str, str], str]) -> str:
    """A text with its sub- and superscripts set.

    Args:
        text: such as ``γ_ℓ as in section 5.1``, ``y^{t−1}``; ``bytes_up`` has none.
        plain: what becomes of the rest.
        script: of a base, ``_`` or ``^``, and what stands there (the base is empty for a second script).
    """
    made, end = [], 0
    for found in _SCRIPTED.finditer(text):
        made.append(plain(text[end : found.start()]))
        base = found[1]
        for mark, inner in _PART.findall(found[2]):
            made.append(script(base, mark, inner.strip("{}")))
            base = ""
        end = found.end()
    return "".join([*made, plain(text[end:])])


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _tags(base: str, mark: str, inner: str) -> str:
    tag = "sub" if mark == "_" else "sup"
    return f"{_escape(base)}<{tag}>{_escape(inner)}</{tag}>"


def typeset(text: str) -> str:
    """A line of text as HTML, its scripts set.

    >>> typeset("γ_ℓ < y^{t−1}, bytes_up")
    'γ<sub>ℓ</sub> &lt; y<sup>t−1</sup>, bytes_up'
    """
    return scripted(text, _escape, _tags)


def formula(text: str) -> str:
    """A formula as HTML: one line for each of its parts."""
    parts = re.split(r";\s+|,\s{2,}", text)
    return (
        f'<span class="formula">{"".join(f"<span>{typeset(part.strip())}</span>" for part in parts)}</span>'
    )
