"""The metrics of the server for Prometheus: its requests, its streams, and the batches of all servers.

No label holds a key or an id. The label `endpoint` is the path of a route, never the path that a client sent. The label
`project` is the name of a key's project.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis import Redis
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.runs.watching.api_records import batch_runs, batch_status, recorded_batches

PATH = "/metrics"
#: The entry of a request's scope that holds the path of the route.
ENDPOINT = "tokenmill.endpoint"
UPLOADS = "/v1/files"
#: The bounds of the histograms, in seconds.
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
#: The age in seconds up to which batches are counted: a day longer than any batch may take.
COUNTED_S = 8 * 24 * 3600
#: The statuses that are remembered, because a batch does not leave them.
_FINAL_STATUSES = ("completed", "cancelled")


class Metrics:
    """The metrics of one server. Safe to use from many threads."""

    def __init__(self, connection: Redis) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        registry = self._registry
        self.requests = Counter(
            "tokenmill_api_requests",
            "Requests by the status of their answer; 499: the client went away.",
            ("endpoint", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "tokenmill_api_request_seconds",
            "From a request to the end of its answer. A stream's answer ends with its last event.",
            ("endpoint",),
            buckets=_BOUNDS_S,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "tokenmill_api_time_to_first_token_seconds",
            "From a request to the first event of its stream.",
            ("endpoint",),
            buckets=_BOUNDS_S,
            registry=registry,
        )
        self.open_streams = Gauge(
            "tokenmill_api_open_streams",
            "Streams that have begun and not ended.",
            registry=registry,
        )
        self.uploaded_bytes = Counter(
            "tokenmill_api_uploaded_bytes", "Bytes of uploads that have come in.", registry=registry
        )
        self.limited = Counter(
            "tokenmill_api_limited",
            "Requests that were refused because their project was at a limit.",
            ("project", "reason"),
            registry=registry,
        )
        registry.register(_BatchCollector(connection))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as a body, and its content type. accept: the request's header. Raises RedisError."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _BatchCollector(Collector):
    """Counts batches by their status. Each exposition reads only batches that had not ended at the previous one."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._clock = clock
        #: By id of a batch: its status, if it is final.
        self._final_statuses: Mapping[str, str] = {}

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without numbers, so that its registration reads nothing from Redis."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """Yield the number of batches by project and status. Raises RedisError."""
        earliest = self._clock() - COUNTED_S
        recorded = recorded_batches(self._connection)
        batches = [batch for batch in recorded if batch.created_at >= earliest]
        open_batches = [batch for batch in batches if batch.id not in self._final_statuses]
        runs = batch_runs(self._connection, open_batches)

        final_statuses: dict[str, str] = {}
        counts: Tally[tuple[str, str]] = Tally()
        for batch in batches:
            status = self._final_statuses.get(batch.id)
            if status is None and batch.run in runs:
                status = batch_status(runs[batch.run])
            if status is None:
                continue  # Redis has forgotten the run
            counts[batch.project, status] += 1
            if status in _FINAL_STATUSES:
                final_statuses[batch.id] = status
        self._final_statuses = final_statuses

        family = self._family()
        for labels, count in sorted(counts.items()):
            family.add_metric(labels, count)
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "tokenmill_api_batches",
            "Batches of the last 8 days by state. Each server reports all of them: take the maximum, not the sum.",
            labels=("project", "status"),
        )


class Metered:
    """Wraps an application, and counts the requests whose scope has an ENDPOINT."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _MeteredRequest(self._metrics, scope, receive, send)
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            request.end()


class _MeteredRequest:
    """One request. Its messages are counted on their way to and from the application."""

    def __init__(self, metrics: Metrics, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics = metrics
        self._scope = scope
        self._receive = receive
        self._send = send
        self._began_at = time.monotonic()
        self._status: int | None = None
        self._is_stream = False
        self._has_begun = False

    async def receive(self) -> Message:
        """Return the client's next message. Count the bytes of an upload."""
        message = await self._receive()
        if self._scope.get(ENDPOINT) == UPLOADS:
            self._metrics.uploaded_bytes.inc(len(message.get("body", b"")))
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the client. Note the status, and the beginning of a stream."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = _is_event_stream(message)
            if self._is_stream:
                self._metrics.open_streams.inc()
        elif self._is_stream and not self._has_begun:
            self._has_begun = True
            self._metrics.first_token_seconds.labels(self._endpoint).observe(self._duration_s)
        await self._send(message)

    def end(self) -> None:
        """Count the request."""
        if self._is_stream:
            self._metrics.open_streams.dec()
        if ENDPOINT in self._scope and self._status is not None:
            self._metrics.requests.labels(self._endpoint, str(self._status)).inc()
            self._metrics.request_seconds.labels(self._endpoint).observe(self._duration_s)

    @property
    def _endpoint(self) -> str:
        return str(self._scope.get(ENDPOINT, ""))

    @property
    def _duration_s(self) -> float:
        return time.monotonic() - self._began_at


def _is_event_stream(message: Message) -> bool:
    for name, value in message["headers"]:
        if name.lower() == b"content-type":
            return bool(value.startswith(b"text/event-stream"))
    return False
