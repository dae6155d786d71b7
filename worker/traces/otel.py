"""Sends spans of jobs by OTLP over HTTP; the variables of OpenTelemetry's SDK say where to.

Attributes follow its semantic conventions for generative AI and for messaging. None holds a prompt, an answer or an
error's text. Names are sent printable: a lone surrogate would cost every span of its batch.
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
from worker.traces.job_trace import NO_CARRIER, JobTrace, Traces

FLUSH_S = 3.0
"""How long the worker's exit waits for a collector that does not answer; what is not sent by then is lost."""

_OPERATIONS = {"jobs.chat": "chat", "jobs.complete": "text_completion", "jobs.embed": "embeddings"}
_FIELDS = ("traceparent", "tracestate")
_MAX_FIELD_CHARS = 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Attributes = Mapping[str, str | int | tuple[str, ...]]


class _Ids(NamedTuple):
    """A job's span, the one above it, and what the meta of child jobs gets."""

    own: SpanContext
    parent: SpanContext | None
    carrier: Mapping[str, str]


class OtelTraces(Traces):
    """Traces the jobs whose meta has a producer's trace context, or all. `close` ends its thread.

    begins: a job without one begins a trace, if OTEL_TRACES_SAMPLER takes it. exporter: sends spans, in a thread of its
    own, and drops those that it is too slow for.
    """

    def __init__(
        self, worker_name: str, model: str, version: str, *, begins: bool, exporter: SpanExporter | None = None
    ) -> None:
        self._model, self._begins = model, begins
        instance = safe_name(worker_name)
        named = {"service.name": "tokenmill", "service.instance.id": instance, "service.version": version}
        self._resource = Resource(named).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("tokenmill", version)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._contexts = TraceContextTextMapPropagator()
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())

    def begin(self, execution_id: str, meta: Any) -> JobTrace | None:
        ids = self._ids(execution_id, meta)
        return None if ids is None else JobTrace(ids, time.time())

    def carrier(self, execution_id: str, meta: Any) -> Mapping[str, str]:
        ids = self._ids(execution_id, meta)
        return NO_CARRIER if ids is None else ids.carrier

    def ended(self, trace: JobTrace, job: EndedJob, written_at: float) -> None:
        for span in self._spans(trace, job, written_at):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining spans, for FLUSH_S at most."""
        sending = threading.Thread(target=self._processor.shutdown, name="tokenmill-traces", daemon=True)
        sending.start()
        sending.join(FLUSH_S)

    def _ids(self, execution_id: str, meta: Any) -> _Ids | None:
        """Return the same ids for an execution each time; None for a job without a trace."""
        given = meta if isinstance(meta, dict) else {}
        carrier = {
            name: value
            for name in _FIELDS
            if isinstance(value := given.get(name), str) and len(value) <= _MAX_FIELD_CHARS
        }
        parent_context = self._contexts.extract(carrier)
        parent = trace.get_current_span(parent_context).get_span_context()
        if not parent.is_valid and not self._begins:
            return None
        trace_id = parent.trace_id if parent.is_valid else _number(execution_id, 16)
        if self._sampler.should_sample(parent_context, trace_id, "job").decision is Decision.DROP:
            return None
        own = SpanContext(trace_id, _number(execution_id, 8), False, _SAMPLED, parent.trace_state)
        names = {
            "traceparent": f"00-{trace_id:032x}-{own.span_id:016x}-01",
            "tracestate": parent.trace_state.to_header(),
        }
        carrier = {name: value for name, value in names.items() if value}
        return _Ids(own, parent if parent.is_valid else None, carrier)

    def _spans(self, told: JobTrace, end: EndedJob, written_at: float) -> list[ReadableSpan]:
        """Make a job's span, and below it one for each of its stages."""
        root, parent, _ = told.ids
        # The producer's clock may be ahead of this one: nothing begins after what comes behind it.
        moments = [end.enqueued_at, told.claimed_at, end.began_at, told.first_token_at, told.finished_at]
        times = _ascending([*moments, end.ended_at, written_at])
        enqueued, claimed, began, first, finished, ended, written = times
        failed = end.outcome != "finished"
        reason = safe_name(end.reason or end.outcome)
        status = Status(StatusCode.ERROR, reason) if failed else Status(StatusCode.UNSET)
        whole, kind = (enqueued, written), SpanKind.CONSUMER
        spans = [self._span(end.function, root, parent, whole, _of_job(end), kind, status)]

        def child(name: str, of: SpanContext, start: float, stop: float, more: Attributes) -> SpanContext:
            number = _number(f"{root.span_id:016x}{name}", 8)
            context = SpanContext(root.trace_id, number, False, _SAMPLED, root.trace_state)
            spans.append(self._span(name, context, of, (start, stop), more))
            return context

        if end.enqueued_at is not None:
            child("queued", root, enqueued, claimed, {})
        child("held", root, claimed, began if end.began_at is not None else ended, {})
        if end.began_at is not None and end.is_function:
            child("run", root, began, ended, {})
        elif end.began_at is not None and told.finished_at is not None:
            operation = _OPERATIONS.get(end.function, end.function.rpartition(".")[2])
            attributes = _of_model(told, operation, self._model)
            generating = child(f"{operation} {self._model}", root, began, finished, attributes)
            if told.first_token_at is not None:
                child("prefill", generating, began, first, {})
                child("generation", generating, first, finished, {})
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
        return ReadableSpan(
            safe_name(name),
            context,
            parent,
            self._resource,
            {key: safe_name(value) if isinstance(value, str) else value for key, value in attributes.items()},
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=int(times[0] * 1e9),
            end_time=int(times[1] * 1e9),
            instrumentation_scope=self._scope,
        )


def _of_job(end: EndedJob) -> Attributes:
    found: dict[str, str | int] = {
        "messaging.system": "rq",
        "messaging.operation.type": "process",
        "messaging.destination.name": end.queue,
        "messaging.message.id": end.job_id,
        "tokenmill.outcome": end.outcome,
    }
    if end.reason:
        found["error.type"] = end.reason
    if end.rows:
        found |= {"tokenmill.rows": end.rows, "tokenmill.row_errors": end.row_errors}
    return found


def _of_model(told: JobTrace, operation: str, model: str) -> Attributes:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": tuple(sorted(told.finish_reasons)),
        "gen_ai.usage.input_tokens": told.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": told.cached_tokens,
        "gen_ai.usage.output_tokens": told.completion_tokens,
    }


def _ascending(moments: list[float | None]) -> list[float]:
    """Limit each known moment to the next known one; an unknown one is the next."""
    found: list[float] = []
    limit = float("inf")
    for moment in reversed(moments):
        limit = limit if moment is None else min(limit, moment)
        found.append(limit)
    return found[::-1]


def _number(text: str, num_bytes: int) -> int:
    """Derive a number from a text, other than 0, which stands for none."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=num_bytes).digest()) or 1
