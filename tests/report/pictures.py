"""Pictures of a report's page for the documentation: `python -m tests.report.pictures FOLDER docs/assets`.

A part of the page at a desktop's width, light, and its top at a phone's, dark.
"""

import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from .chromium import ABSENT, FOUND, Chromium, Page


def part(page: Page, first: str, last: str, margin: int = 24) -> dict[str, float]:
    """The rectangle from the top of one element to the bottom of another, as wide as the page."""
    top, bottom = page(
        f"[document.querySelector({json.dumps(first)}).getBoundingClientRect().top + scrollY,"
        f" document.querySelector({json.dumps(last)}).getBoundingClientRect().bottom + scrollY]"
    )
    start = max(0.0, top - margin)
    width = page("document.documentElement.clientWidth")
    return {"x": 0, "y": start, "width": width, "height": bottom + margin - start, "scale": 1}


def shrunk(path: Path) -> None:
    """The same picture with a palette, a third of the size."""
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main(folder: str, target: str) -> None:
    """Draw them."""
    if FOUND is None:
        sys.exit(ABSENT)
    url, places = (Path(folder) / "report.html").resolve().as_uri(), Path(target)
    with tempfile.TemporaryDirectory() as profile, Chromium(Path(profile) / "user") as browser:
        for name, width, dark, first, last in (
            ("report-desktop", 1000, False, "h1", "#results"),
            ("report-phone", 390, True, "h1", ".lead figcaption"),
        ):
            page = browser.open(url, width=width, dark=dark)
            page.wait("document.documentElement.classList.contains('ready')")
            file = places / f"{name}.png"
            page.screenshot(file, clip=part(page, first, last))
            shrunk(file)
            print(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
