"""A job's trace, as a collector of OpenTelemetry's receives it."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from engine import Completion
from engine.schedule.outputs import RequestMetrics
from tests.rq_workers import Workers, wait_until
from worker.metrics.tally import EndedJob
from worker.traces.otel import OtelTraces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
META = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
EXECUTION = "0123456789abcdef0123456700000001"
SECRET = "secret words"


class Collector:
    """Receives OTLP over HTTP. spans: all so far. bodies: as they came."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def values(of: Any) -> dict[str, Any]:
    """The attributes of a span or resource."""
    found = {}
    for each in of.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return found


def tree(spans: list[Span]) -> dict[str, str]:
    """The parent's name of each span, by its name."""
    names = {span.span_id: span.name for span in spans}
    assert len(names) == len(spans)
    return {span.name: names.get(span.parent_span_id, span.parent_span_id.hex()) for span in spans}


def sent(traces: OtelTraces, collector: Collector, meta: Any = META, **how: Any) -> list[Span]:
    """The spans of a job of this meta that took six seconds."""
    trace = traces.begin(EXECUTION, meta)
    assert trace is not None
    now = time.time()
    trace.claimed_at = now - 5
    at = time.monotonic()
    for index in range(2):
        told = RequestMetrics(at - 4, at - 3 + index, at - 2)
        trace.note_sample(Completion("r", index, [1, 2, 3], SECRET, "stop", 7, 4, metrics=told))
    trace.finished_at = now - 2
    usual = {
        "outcome": "finished",
        "reason": "",
        "is_function": False,
        "function_name": "jobs.chat",
    }
    times = {"enqueued_at": now - 6, "began_at": now - 4, "ended_at": now - 1}
    usual |= {"job_id": "one", "queue": "prompts"}
    traces.note_end(trace, EndedJob(**{**usual, **times, **how}), written_at=now)
    traces.close()
    return collector.spans


@pytest.fixture
def traces(collector: Collector) -> OtelTraces:
    exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")
    return OtelTraces("node-1", "m", "1", traces_all=False, exporter=exporter)


def test_a_job_is_one_tree_of_spans_below_its_producers(
    traces: OtelTraces, collector: Collector
) -> None:
    spans = sent(traces, collector)
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.trace_state for span in spans} == {"vendor=x"}
    assert tree(spans) == {
        "jobs.chat": PARENT,
        "queued": "jobs.chat",
        "held": "jobs.chat",
        "chat m": "jobs.chat",
        "prefill": "chat m",
        "generation": "chat m",
        "end": "jobs.chat",
    }
    took = {
        span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in spans
    }
    expected = {
        "jobs.chat": 6,
        "queued": 1,
        "held": 1,
        "chat m": 2,
        "prefill": 1,
        "generation": 1,
        "end": 1,
    }
    assert took == pytest.approx(expected, abs=0.2)
    found = {span.name: values(span) for span in spans}
    assert found["chat m"] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 6,
    }
    assert found["jobs.chat"]["messaging.message.id"] == "one"
    assert (
        collector.resources[0].items()
        >= {"service.name": "tokenmill", "service.instance.id": "node-1"}.items()
    )
    assert SECRET.encode() not in b"".join(collector.bodies)


def test_a_job_that_fails_says_by_what_and_clocks_that_differ_turn_no_span_around(
    traces: OtelTraces, collector: Collector
) -> None:
    late = time.time() + 100
    how = {"outcome": "failed", "reason": "PromptTooLong", "enqueued_at": late, "began_at": None}
    spans = sent(traces, collector, **how)
    assert set(tree(spans)) == {"jobs.chat", "queued", "held", "end"}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    assert (spans[0].status.code, spans[0].status.message) == (2, "PromptTooLong")
    assert values(spans[0])["error.type"] == "PromptTooLong"


@pytest.mark.parametrize("meta", [None, UNSAMPLED, {"traceparent": "x" * 10_000}])
def test_without_a_producers_word_or_against_it_nothing_is_traced(
    traces: OtelTraces, meta: Any
) -> None:
    assert traces.begin(EXECUTION, meta) is None
    assert traces.carrier(EXECUTION, meta) == {}
    traces.close()


def test_where_all_are_traced_a_job_begins_a_trace_and_its_children_are_of_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")
    every = OtelTraces("node-1", "m", "1", traces_all=True, exporter=exporter)
    assert every.begin(EXECUTION, UNSAMPLED) is None
    own = every.begin(EXECUTION, {})
    assert own is not None
    shard = every.begin("f" * 32, every.carrier(EXECUTION, {}))
    assert shard is not None
    assert shard.contexts.parent is not None
    above = shard.contexts.parent.trace_id, shard.contexts.parent.span_id
    assert above == (own.contexts.span.trace_id, own.contexts.span.span_id)
    [root] = [span for span in sent(every, collector, {}) if span.name == "jobs.chat"]
    assert root.parent_span_id == b""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    never = OtelTraces("node-1", "m", "1", traces_all=True, exporter=exporter)
    assert never.begin(EXECUTION, META) is None


def test_a_prompt_and_a_run_are_traced_by_a_real_worker(
    workers: Workers, collector: Collector, tmp_path: Path
) -> None:
    """The context goes by the job's meta, and from a run's planning to its shards."""
    provider = TracerProvider()
    tracer = provider.get_tracer("producer")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    queue = workers.queue("bulk")
    with tracer.start_as_current_span("send") as span:
        inject(meta := {})
        queue.enqueue("jobs.complete", SECRET, job_id="one", meta=meta)
        files = {"input": [str(tmp_path / "in.jsonl")], "output": str(tmp_path / "out")}
        sizes = {"prompt_column": "prompt", "rows_per_shard": 1}
        queue.enqueue("jobs.score_parquet", kwargs={**files, **sizes}, job_id="plan", meta=meta)
    queue.enqueue("jobs.complete", SECRET, job_id="untraced")
    worker = workers.start(
        TOKENMILL_TRACES="producers",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_SERVICE_NAME="ours",
    )
    wait_until(lambda: (tmp_path / "out" / "_SUCCESS").exists())
    worker.terminate()
    assert worker.wait(timeout=60) == 0, workers.log(worker)
    jobs = {
        values(each)["messaging.message.id"]: each for each in collector.spans if each.kind == 5
    }
    context = span.get_span_context()
    assert {each.trace_id for each in collector.spans} == {context.trace_id.to_bytes(16)}
    assert {jobs[name].parent_span_id for name in ("one", "plan")} == {context.span_id.to_bytes(8)}
    shards = [each for each in jobs.values() if each.name == "jobs.score_shard"]
    assert [each.parent_span_id for each in shards] == [jobs["plan"].span_id] * 2
    assert "untraced" not in jobs
    assert {
        each.name for each in collector.spans if each.parent_span_id == jobs["one"].span_id
    } >= {*("queued", "held", "end", "text_completion fake")}
    assert collector.resources[0]["service.name"] == "ours"
    assert SECRET.encode() not in b"".join(collector.bodies)
