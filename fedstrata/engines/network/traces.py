"""OpenTelemetry's spans of exchanges: the time of each site, with and without the network.

    exchange            at the server: until the last site has answered
      site              one for each: until its answer was there
        answer          at the site: its own computation

The three share a trace: the server's span travels in a message's header. Like accounts, spans hold names and
counts, never numbers of a message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedstrata.engines.network.audit import described
from fedstrata.engines.network.transport import Connected, Outcome, Request, Through
from fedstrata.engines.network.wire import Header

PARENT = "traceparent"  # the header's entry, as in W3C's Trace Context


class Traces:
    """The export of a party's spans.

    Args:
        service: the party's name.
        exporter: an exporter of OpenTelemetry; by default over HTTP to ``OTEL_EXPORTER_OTLP_ENDPOINT``.

    Raises:
        ValueError: if OpenTelemetry is not installed.
    """

    def __init__(self, service: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            raise ValueError(f'--traces needs `pip install "fedstrata[otel]"` ({error}).') from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fedstrata")
        self._context = TraceContextTextMapPropagator()

    def end(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    @contextmanager
    def answering(self, header: Header) -> Iterator[None]:
        """At a site: the span of an answer, within the server's."""
        parent = self._context.extract({PARENT: str(header.get(PARENT, ""))})
        with self._tracer.start_as_current_span("answer", parent, attributes=_facts(header)):
            yield

    def exchange(self, transport: Connected, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """At the server: the spans of an exchange and of its sites."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        facts = _facts(next(iter(requests.values())).header) if requests else {}
        with self._tracer.start_as_current_span("exchange", attributes=facts):
            began, spans, asked = time.time_ns(), {}, {}
            for i, (header, arrays) in requests.items():
                own = {"site": transport.names[i], "numbers_down": described(header, arrays)["down"]}
                spans[i] = self._tracer.start_span("site", attributes=own, start_time=began)
                carried: dict[str, str] = {}
                self._context.inject(carried, set_span_in_context(spans[i]))
                asked[i] = Request({**header, **carried}, arrays)
            replies, failures = transport.exchange(asked, timeout)
            for i, span in spans.items():
                took = timeout
                if i in replies:
                    took = transport.took[i]
                    span.set_attribute("numbers_up", described(*replies[i])["down"])
                else:
                    span.set_status(Status(StatusCode.ERROR, f"{failures[i].kind}: {failures[i].why[:200]}"))
                span.end(min(began + int(1e9 * took), time.time_ns()))
        return replies, failures


@contextmanager
def sent(service: str, wanted: bool) -> Iterator[Traces | None]:
    """A party's spans, if it wants them; at the end of the block all are sent."""
    if not wanted:
        yield None
        return
    traces = Traces(service)
    try:
        yield traces
    finally:
        traces.end()


class Traced(Through):
    """A server's transport with a span for every exchange."""

    def __init__(self, inner: Connected, traces: Traces) -> None:
        super().__init__(inner)
        self.traces = traces

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """See `Transport.exchange`."""
        return self.traces.exchange(self.inner, requests, timeout)


def _facts(header: Header) -> dict[str, Any]:
    """The attributes of a request's span."""
    facts = {"op": header.get("op"), "run": header.get("run"), "round": header.get("round")}
    match header.get("what"):
        case [program, k, phase, *_]:
            facts |= {"program": program, "exchange": k, "phase": phase}
    return {name: value for name, value in facts.items() if isinstance(value, str | int)}
