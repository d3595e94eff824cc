"""``python -m benchmarks.rates [METHOD …]``: a table of the laws."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.rates import bilevel, compositions, limits, selection, single_level
from benchmarks.rates.law import slope

LAWS = (*single_level.LAWS, *bilevel.LAWS, *selection.LAWS, *compositions.LAWS, *limits.LAWS)


def main(names: Sequence[str]) -> None:
    """Print a table of the laws, or of those of some methods."""
    unknown = sorted(set(names) - {law.method for law in LAWS})
    if unknown:
        known = ", ".join(dict.fromkeys(law.method for law in LAWS))
        raise SystemExit(f"There is no {', '.join(unknown)}; there are {known}.")
    print("| method | theorem | quantity | against | from … to | predicted | measured | values |")
    print("|---|---|---|---|---|---:|---:|---|")
    for law in LAWS:
        if names and law.method not in names:
            continue
        rise, error, values = slope(law)
        ends = f"{law.sizes[0]} … {law.sizes[-1]}"
        shown = ", ".join(f"{v:.3g}" for v in values)
        uncertain = f" ± {error:.2f}" if len(values) > 2 else ""
        row = [law.method, law.theorem, law.quantity, law.against, ends, f"{law.predicted:+.2f}"]
        print(f"| {' | '.join(row)} | {rise:+.2f}{uncertain} | {shown} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
