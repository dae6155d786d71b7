"""Sends spans of jobs by OTLP over HTTP. The environment variables of OpenTelemetry's SDK name the collector.

Attributes follow OpenTelemetry's semantic conventions for generative AI and for messaging. No attribute holds a prompt,
an answer or the text of an error. Names are made printable: a name with a lone surrogate could not be sent, and neither
could the other spans of its batch.
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
"""Seconds that the worker's exit waits for a collector that does not answer. Then the spans that remain are lost."""

_OPERATIONS = {"jobs.chat": "chat", "jobs.complete": "text_completion", "jobs.embed": "embeddings"}
_FIELDS = ("traceparent", "tracestate")
_MAX_FIELD_CHARS = 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, str | int | tuple[str, ...]]


class _TraceContexts(NamedTuple):
    """The trace contexts of a job.

    span: the context of the job's span. parent: the context of the producer's span, if there is one.
    carrier: the trace context for the jobs that this job enqueues.
    """

    span: SpanContext
    parent: SpanContext | None
    carrier: Mapping[str, str]


class OtelTraces(Traces):
    """Traces the jobs whose meta has a producer's trace context, or all jobs.

    traces_all: whether a job without a trace context gets a new trace. OTEL_TRACES_SAMPLER may still leave out the job.
    exporter: sends the spans; the default exporter uses OTLP. A thread calls the exporter until `close`. If the
    exporter is too slow, spans are dropped.
    """

    def __init__(
        self,
        worker_name: str,
        model: str,
        version: str,
        *,
        traces_all: bool,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._model = model
        self._traces_all = traces_all
        instance = safe_name(worker_name)
        attributes = {
            "service.name": "tokenmill",
            "service.instance.id": instance,
            "service.version": version,
        }
        self._resource = Resource(attributes).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("tokenmill", version)
        # The provider is made only for its sampler, which OTEL_TRACES_SAMPLER names.
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        """Begin the trace of a claimed job. Returns None if the job is not traced."""
        contexts = self._trace_contexts(execution_id, meta)
        return None if contexts is None else JobTrace(contexts, time.time())

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        """Return the trace context that a job gives to the jobs it enqueues; empty if the job is not traced."""
        contexts = self._trace_contexts(execution_id, meta)
        return {} if contexts is None else contexts.carrier

    def note_end(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        """Send the spans of a job whose end was written at `written_at` (Unix seconds)."""
        for span in self._spans(trace, job, written_at):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining spans, for at most FLUSH_S seconds, and end the thread that calls the exporter."""
        sender = threading.Thread(
            target=self._processor.shutdown, name="tokenmill-traces", daemon=True
        )
        sender.start()
        sender.join(FLUSH_S)

    def _trace_contexts(self, execution_id: str, meta: Any) -> _TraceContexts | None:
        """Return the trace contexts of an execution; None for a job that is not traced.

        The same execution always gets the same ids.
        """
        parent_context = self._propagator.extract(_producers_carrier(meta))
        parent = trace.get_current_span(parent_context).get_span_context()
        if not parent.is_valid and not self._traces_all:
            return None
        trace_id = parent.trace_id if parent.is_valid else _derived_id(execution_id, 16)
        sampling = self._sampler.should_sample(parent_context, trace_id, "job")
        if sampling.decision is Decision.DROP:
            return None

        span = SpanContext(
            trace_id,
            _derived_id(execution_id, 8),
            is_remote=False,
            trace_flags=_SAMPLED,
            trace_state=parent.trace_state,
        )
        child_carrier = {"traceparent": f"00-{trace_id:032x}-{span.span_id:016x}-01"}
        trace_state = parent.trace_state.to_header()
        if trace_state:
            child_carrier["tracestate"] = trace_state
        if not parent.is_valid:
            return _TraceContexts(span, None, child_carrier)
        return _TraceContexts(span, parent, child_carrier)

    def _spans(self, notes: JobTrace, job: EndedJob, written_at: float) -> list[ReadableSpan]:
        """Return a job's span, and a child span for each of its stages."""
        moments = [
            job.enqueued_at,
            notes.claimed_at,
            job.began_at,
            notes.first_token_at,
            notes.finished_at,
            job.ended_at,
            written_at,
        ]
        # The producer's clock may be ahead of this machine's. No stage may begin after the next one.
        enqueued, claimed, began, first_token, finished, ended, written = _ascending(moments)
        contexts: _TraceContexts = notes.contexts
        root = contexts.span
        spans = [self._job_span(contexts, job, (enqueued, written))]

        def add_child(
            name: str, parent: SpanContext, start: float, stop: float, attributes: Attributes
        ) -> SpanContext:
            """Add a span below another one. Returns the new span's context."""
            context = _child_context(root, name)
            spans.append(self._span(name, context, parent, (start, stop), attributes))
            return context

        if job.enqueued_at is not None:
            add_child("queued", root, enqueued, claimed, {})
        has_begun = job.began_at is not None
        held_until = began if has_begun else ended
        add_child("held", root, claimed, held_until, {})
        if has_begun and job.is_function:
            add_child("run", root, began, ended, {})
        elif has_begun and notes.finished_at is not None:
            _, _, short_name = job.function_name.rpartition(".")
            operation = _OPERATIONS.get(job.function_name, short_name)
            attributes = _model_attributes(notes, operation, self._model)
            model_span = add_child(f"{operation} {self._model}", root, began, finished, attributes)
            if notes.first_token_at is not None:
                add_child("prefill", model_span, began, first_token, {})
                add_child("generation", model_span, first_token, finished, {})
        add_child("end", root, ended, written, {})
        return spans

    def _job_span(
        self, contexts: _TraceContexts, job: EndedJob, times: tuple[float, float]
    ) -> ReadableSpan:
        """Return the span of a whole job. times: see `_span`."""
        status = Status(StatusCode.UNSET)
        if job.outcome != "finished":
            status = Status(StatusCode.ERROR, safe_name(job.reason or job.outcome))
        attributes = _job_attributes(job)
        kind = SpanKind.CONSUMER
        return self._span(
            job.function_name, contexts.span, contexts.parent, times, attributes, kind, status
        )

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


def _producers_carrier(meta: Any) -> Mapping[str, str]:
    """Return the trace context in a job's meta, which may be of any type."""
    fields = meta if isinstance(meta, dict) else {}
    carrier = {}
    for name in _FIELDS:
        value = fields.get(name)
        if isinstance(value, str) and len(value) <= _MAX_FIELD_CHARS:
            carrier[name] = value
    return carrier


def _child_context(root: SpanContext, name: str) -> SpanContext:
    """Return the context of a span below a job's span. root: the context of the job's span."""
    return SpanContext(
        root.trace_id,
        _derived_id(f"{root.span_id:016x}{name}", 8),
        is_remote=False,
        trace_flags=_SAMPLED,
        trace_state=root.trace_state,
    )


def _job_attributes(job: EndedJob) -> Attributes:
    """Return the attributes of a job's span."""
    attributes: dict[str, str | int] = {
        "messaging.system": "rq",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.queue,
        "messaging.message.id": job.job_id,
        "tokenmill.outcome": job.outcome,
    }
    if job.reason:
        attributes["error.type"] = job.reason
    if job.rows:
        attributes |= {"tokenmill.rows": job.rows, "tokenmill.row_errors": job.row_errors}
    return attributes


def _model_attributes(notes: JobTrace, operation: str, model: str) -> Attributes:
    """Return the attributes of the span that shows the model's work. Their names are OpenTelemetry's."""
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
    """Return the moments in ascending order: a moment that is later than a following one is moved back to it.

    An unknown moment becomes the same as the moment that follows it.
    """
    latest_first: list[float] = []
    limit = float("inf")
    for moment in reversed(moments):
        if moment is not None:
            limit = min(limit, moment)
        latest_first.append(limit)
    return latest_first[::-1]


def _derived_id(text: str, num_bytes: int) -> int:
    """Derive an id from a text. The id is never 0, because 0 would mean that there is no id."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=num_bytes).digest()
    return int.from_bytes(digest) or 1
