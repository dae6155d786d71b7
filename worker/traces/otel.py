"""Sends spans of jobs by OTLP over HTTP. The environment variables of OpenTelemetry's SDK name the collector.

Attributes follow its semantic conventions for generative AI and for messaging. No attribute holds a prompt, an answer
or the text of an error. Names are sent in printable characters, because all spans of a batch are lost if one name has a
lone surrogate.
"""

import threading
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from jobs.common.display import safe_name
from worker.metrics.tally import EndedJob
from worker.traces.job_trace import JobTrace, Traces

FLUSH_S = 3.0
"""Seconds that the worker's exit waits for a collector that does not answer. Spans that are not sent then are lost."""

_OPERATIONS = {"jobs.chat": "chat", "jobs.complete": "text_completion", "jobs.embed": "embeddings"}
_FIELDS = ("traceparent", "tracestate")
_MAX_FIELD_CHARS = 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, str | int | tuple[str, ...]]


class _Ids(NamedTuple):
    """The contexts of a job's span and of its parent, and the trace context for jobs that this job enqueues."""

    span: SpanContext
    parent: SpanContext | None
    carrier: Mapping[str, str]


class OtelTraces(Traces):
    """Traces the jobs whose meta has a producer's trace context, or all jobs. `close` ends its thread.

    begins: whether a job without a trace context gets a new trace, if OTEL_TRACES_SAMPLER selects it.
    exporter: sends spans in its own thread, and drops spans while it is too slow.
    """

    def __init__(
        self,
        worker_name: str,
        model: str,
        version: str,
        *,
        begins: bool,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._model = model
        self._begins = begins
        instance = safe_name(worker_name)
        attributes = {
            "service.name": "tokenmill",
            "service.instance.id": instance,
            "service.version": version,
        }
        self._resource = Resource(attributes).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("tokenmill", version)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._contexts = TraceContextTextMapPropagator()
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        """Begin the trace of a claimed job. Returns None if the job is not traced."""
        ids = self._ids(execution_id, meta)
        return None if ids is None else JobTrace(ids, time.time())

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        """Return the trace context for jobs that this job enqueues."""
        ids = self._ids(execution_id, meta)
        return {} if ids is None else ids.carrier

    def ended(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        """Send the spans of a job whose end was written at `written_at` (Unix seconds)."""
        for span in self._spans(trace, job, written_at):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining spans, for FLUSH_S at most."""
        sending = threading.Thread(
            target=self._processor.shutdown, name="tokenmill-traces", daemon=True
        )
        sending.start()
        sending.join(FLUSH_S)

    def _ids(self, execution_id: str, meta: Any) -> _Ids | None:
        """Return the ids of an execution, the same each time; None for a job without a trace."""
        fields = meta if isinstance(meta, dict) else {}
        producers_carrier = {}
        for name in _FIELDS:
            value = fields.get(name)
            if isinstance(value, str) and len(value) <= _MAX_FIELD_CHARS:
                producers_carrier[name] = value

        parent_context = self._contexts.extract(producers_carrier)
        parent = trace.get_current_span(parent_context).get_span_context()
        if not parent.is_valid and not self._begins:
            return None
        trace_id = parent.trace_id if parent.is_valid else _number(execution_id, 16)
        if self._sampler.should_sample(parent_context, trace_id, "job").decision is Decision.DROP:
            return None

        span = SpanContext(
            trace_id,
            _number(execution_id, 8),
            is_remote=False,
            trace_flags=_SAMPLED,
            trace_state=parent.trace_state,
        )
        child_carrier = {"traceparent": f"00-{trace_id:032x}-{span.span_id:016x}-01"}
        trace_state = parent.trace_state.to_header()
        if trace_state:
            child_carrier["tracestate"] = trace_state
        if not parent.is_valid:
            return _Ids(span, None, child_carrier)
        return _Ids(span, parent, child_carrier)

    def _spans(self, notes: JobTrace, end: EndedJob, written_at: float) -> list[ReadableSpan]:
        """Make a job's span, and a child span for each of its stages."""
        root, parent, _ = notes.ids
        moments = [
            end.enqueued_at,
            notes.claimed_at,
            end.began_at,
            notes.first_token_at,
            notes.finished_at,
            end.ended_at,
            written_at,
        ]
        # The producer's clock may be ahead of this machine's. No stage may begin after the next one.
        enqueued, claimed, began, first_token, finished, ended, written = _ascending(moments)

        failed = end.outcome != "finished"
        reason = safe_name(end.reason or end.outcome)
        status = Status(StatusCode.ERROR, reason) if failed else Status(StatusCode.UNSET)
        whole = (enqueued, written)
        kind = SpanKind.CONSUMER
        spans = [self._span(end.function, root, parent, whole, _job_attributes(end), kind, status)]

        def child(
            name: str, parent: SpanContext, start: float, stop: float, attributes: Attributes
        ) -> SpanContext:
            """Add a span below another one; return its context."""
            span_id = _number(f"{root.span_id:016x}{name}", 8)
            context = SpanContext(
                root.trace_id,
                span_id,
                is_remote=False,
                trace_flags=_SAMPLED,
                trace_state=root.trace_state,
            )
            spans.append(self._span(name, context, parent, (start, stop), attributes))
            return context

        if end.enqueued_at is not None:
            child("queued", root, enqueued, claimed, {})
        has_begun = end.began_at is not None
        held_until = began if has_begun else ended
        child("held", root, claimed, held_until, {})
        if has_begun and end.is_function:
            child("run", root, began, ended, {})
        elif has_begun and notes.finished_at is not None:
            _, _, short_name = end.function.rpartition(".")
            operation = _OPERATIONS.get(end.function, short_name)
            attributes = _model_attributes(notes, operation, self._model)
            generating = child(f"{operation} {self._model}", root, began, finished, attributes)
            if notes.first_token_at is not None:
                child("prefill", generating, began, first_token, {})
                child("generation", generating, first_token, finished, {})
        child("end", root, ended, written, {})
        return spans

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
    ) -> ReadableSpan:
        """Return a span that has ended. times: its beginning and its end, in Unix seconds."""
        began_at, ended_at = times
        safe_attributes = {}
        for key, value in attributes.items():
            safe_attributes[key] = safe_name(value) if isinstance(value, str) else value
        return ReadableSpan(
            safe_name(name),
            context,
            parent,
            self._resource,
            safe_attributes,
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=int(began_at * 1e9),
            end_time=int(ended_at * 1e9),
            instrumentation_scope=self._scope,
        )


def _job_attributes(end: EndedJob) -> Attributes:
    """Return what a job's span says about the job."""
    attributes: dict[str, str | int] = {
        "messaging.system": "rq",
        "messaging.operation.type": "process",
        "messaging.destination.name": end.queue,
        "messaging.message.id": end.job_id,
        "tokenmill.outcome": end.outcome,
    }
    if end.reason:
        attributes["error.type"] = end.reason
    if end.rows:
        attributes |= {"tokenmill.rows": end.rows, "tokenmill.row_errors": end.row_errors}
    return attributes


def _model_attributes(notes: JobTrace, operation: str, model: str) -> Attributes:
    """Return what the span of the model's work says, by OpenTelemetry's names."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": tuple(sorted(notes.finish_reasons)),
        "gen_ai.usage.input_tokens": notes.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": notes.cached_tokens,
        "gen_ai.usage.output_tokens": notes.completion_tokens,
    }


def _ascending(moments: list[float | None]) -> list[float]:
    """Limit each moment to the next known one. An unknown moment becomes the next known one."""
    latest_first: list[float] = []
    limit = float("inf")
    for moment in reversed(moments):
        if moment is not None:
            limit = min(limit, moment)
        latest_first.append(limit)
    return latest_first[::-1]


def _number(text: str, num_bytes: int) -> int:
    """Derive an id from a text. The id is never 0, which would mean that there is none."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=num_bytes).digest()
    return int.from_bytes(digest) or 1
