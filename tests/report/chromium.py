"""A real browser, driven by the devtools protocol over a pipe: nothing but the standard library.

with Chromium(profile) as browser:
    page = browser.open(url, width=390, dark=True)
    page("document.title")                   # JavaScript, its value (promises are awaited)
    page.complaints                          # what the console said, and errors that nobody caught
    page.requests                            # addresses other than the page's own, and data
    page.screenshot(path)
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
ABSENT = f"no browser on the PATH: install one of {', '.join(NAMES)} (Debian: apt-get install chromium)"
LIMIT = 60.0  # seconds for any answer

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # its own services find nobody either
    "--remote-debugging-pipe",  # commands on file 3, answers on file 4, each ended by a zero byte
)


class Page:
    """An open page."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = False

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol to this page, and its answer."""
        return self.browser.send(method, self.session, **params)

    def __call__(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"].get("exception", {}).get("description", answer))
        return answer["result"].get("value")

    def wait(self, script: str, limit: float = 30.0) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + limit
        while not (value := self(script)):
            if time.monotonic() > end:
                raise AssertionError(f"not true after {limit:g} s: {script}; console: {self.complaints}")
            time.sleep(0.05)
        return value

    def until(self, done: Callable[[], bool], limit: float = 20.0) -> None:
        """Wait for something outside of the page."""
        end = time.monotonic() + limit
        while not done():
            assert time.monotonic() < end, f"not true after {limit:g} s"
            time.sleep(0.05)

    def close(self) -> None:
        """Close it."""
        self.browser.send("Target.closeTarget", targetId=self.target)

    def click(self, selector: str, number: int = 0) -> None:
        """A click of the mouse in the middle of an element."""
        box = self(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "if (!e) return null; e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        assert box, f"there is no {selector} number {number}"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **pressed)

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """The page, or a rectangle of it, as a PNG file."""
        some = {} if clip is None else {"clip": clip}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, **some)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """An event of this page."""
        match method:
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.consoleAPICalled":
                self.complaints.append(
                    " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
                )
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                if not (url := params["request"]["url"]).startswith(("file:", "data:", "blob:")):
                    self.requests.append(url)


class Chromium:
    """The browser: a process that ends with the `with` block."""

    def __init__(self, profile: Path) -> None:
        assert FOUND, ABSENT
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [FOUND, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The shell gives the two ends the numbers that the browser expects, and becomes it.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        with (profile.parent / f"{profile.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["/bin/bash", "-c", shell, "bash", *command],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._buffer, self._next = ours_in, ours_out, b"", 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(10)
        finally:
            os.close(self._in)
            os.close(self._out)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page at some width (a phone's below 500), light or dark."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        phone = width < 500
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.loaded = False
        page.send("Page.navigate", url=url)
        end = time.monotonic() + LIMIT
        while not page.loaded:
            assert time.monotonic() < end, f"{url} did not load"
            self._hear(1.0)
        return page

    def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its answer."""
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            for answer in self._hear(1.0):
                if answer.get("id") == number:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    return answer["result"]
        raise AssertionError(f"the browser did not answer {method} in {LIMIT:g} s")

    def _hear(self, seconds: float) -> list[dict[str, Any]]:
        """Messages that have come; events go to their page."""
        if not select.select([self._in], [], [], seconds)[0]:
            return []
        chunk = os.read(self._in, 1 << 20)
        if not chunk:
            raise OSError("the browser has ended")
        *whole, self._buffer = (self._buffer + chunk).split(b"\0")
        answers = []
        for message in map(json.loads, whole):
            if "id" in message:
                answers.append(message)
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].heard(message["method"], message["params"])
        return answers
