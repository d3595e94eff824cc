"""A party's status over HTTP, read-only: `/metrics` (Prometheus), `/healthz`, and a page at `/`.

It listens on loopback unless told otherwise, and holds numbers and names of sites, never samples.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple


class Gauge(NamedTuple):
    """One metric.

    Attributes:
        name: the name after ``fedstrata_``; it ends in ``_total`` if the number only grows.
        value: the number.
        help: its description.
        labels: its labels, such as the site.
    """

    name: str
    value: float
    help: str
    labels: Mapping[str, str] = {}


Tells = Callable[[], list[Gauge]]


def as_text(gauges: list[Gauge]) -> str:
    """Prometheus' text format.

    >>> print(as_text([Gauge("round", 3, "the round", {"run": "a"})]), end="")
    # HELP fedstrata_round the round
    # TYPE fedstrata_round gauge
    fedstrata_round{run="a"} 3
    """
    lines, known = [], set()
    for name, value, words, labels in sorted(gauges, key=lambda g: g.name):  # a name's lines must be together
        if name not in known:
            known.add(name)
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP fedstrata_{name} {words}", f"# TYPE fedstrata_{name} {kind}"]
        inner = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        lines.append(f"fedstrata_{name}{'{' + inner + '}' if inner else ''} {value:.12g}")
    return "\n".join(lines) + "\n"


def as_page(gauges: list[Gauge], title: str, css: str = "") -> str:
    """A page that reloads every two seconds, without a script."""
    rows = "".join(
        f"<tr><td class='text'>{html.escape(g.help)}</td>"
        f"<td class='key'>{html.escape(', '.join(g.labels.values()))}</td><td>{g.value:,.6g}</td></tr>"
        for g in gauges
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta http-equiv='refresh' content='2'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{html.escape(title)}</title><style>{css}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><div class='scroll'><table>{rows}</table></div></body></html>"
    )


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def address_of(where: str) -> tuple[str, int]:
    """``"9464"`` is that port on loopback, ``"0.0.0.0:9464"`` on all interfaces.

    Raises:
        ValueError: if it is neither.
    """
    host, _, port = where.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--watch needs a port, or host:port, but is {where!r}.")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextmanager
def served(tells: Tells, where: str | None, title: str, css: str = "") -> Iterator[int | None]:
    """Serve the status during a block, and yield the port; nothing if ``where`` is None."""
    if where is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # a silent connection keeps a thread no longer

        def do_GET(self) -> None:
            """Answer; other paths do not exist."""
            pages: dict[str, tuple[str, Callable[[], str]]] = {
                "/metrics": ("text/plain; version=0.0.4", lambda: as_text(tells())),
                "/healthz": ("text/plain", lambda: "ok\n"),
                "/": ("text/html", lambda: as_page(tells(), title, css)),
            }
            kind, make = pages.get(self.path, ("text/plain", lambda: "not found\n"))
            content = make().encode()
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log a scrape every few seconds."""

    try:
        server = ThreadingHTTPServer(address_of(where), Handler)
    except OSError as error:
        raise OSError(f"--watch cannot listen on {where}: {error.strerror}.") from error
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
