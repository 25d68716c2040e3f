"""Sends spans that are over by OTLP over HTTP. Their ids are given: a span that is sent twice is the same one."""

from __future__ import annotations

import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from orchestrator.specs.span import Span

FLUSH_MS = 5000  # at the end of the service


class _GivenIds(IdGenerator):
    """The ids of the span that this thread begins."""

    def __init__(self) -> None:
        self._next = threading.local()

    def give(self, trace_id: int, span_id: int) -> None:
        self._next.ids = trace_id, span_id

    def generate_trace_id(self) -> int:
        """The trace that was given."""
        return int(self._next.ids[0])

    def generate_span_id(self) -> int:
        """The span that was given."""
        return int(self._next.ids[1])


class Spans:
    """A queue of bounded length and a thread that sends it; what a receiver that is away cannot get is dropped."""

    def __init__(self) -> None:
        self._ids = _GivenIds()
        resource = Resource({"service.name": "orc"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("orchestrator")

    def send(self, span: Span) -> None:
        """Queue a span. Returns at once."""
        self._ids.give(span.trace_id, span.span_id)
        context = None
        if span.parent_id is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            above = SpanContext(span.trace_id, span.parent_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(above))
        begun = self._tracer.start_span(
            span.name, context, attributes=dict(span.attributes), start_time=int(1e9 * span.begins_s)
        )
        if span.error:
            begun.set_status(Status(StatusCode.ERROR, span.error))
        begun.end(int(1e9 * max(span.begins_s, span.ends_s)))

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()
