"""Writes the metrics of queues and of Redis for Prometheus, even while no worker runs.

The dashboard serves metrics only for the queues that its operator names. It does not use RQ's list of queues
(`rq:queues`), because producers may write any name into it. A worker with a scheduler serves the metrics of its own
queues, so that alerts and scaling need no dashboard.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis import Redis

from jobs.common.redis_info import WRITES, RedisHealth
from jobs.queues.numbers import QueueNumbers, read_numbers


def job_family(jobs: Mapping[str, Mapping[str, int]]) -> Metric:
    """Return the metric of the queues' jobs. jobs: the number of jobs, by queue and status."""
    family = GaugeMetricFamily(
        "rq_jobs",
        "Jobs of a queue by status. Each worker of a queue reports all of them: take the maximum, not the sum.",
        labels=["queue", "status"],
    )
    for queue, by_status in jobs.items():
        for status, count in by_status.items():
            family.add_metric([queue, status], count)
    return family


def queue_families(numbers: QueueNumbers) -> Iterator[Metric]:
    """Yield all metrics of queues and of Redis, except the metric of `job_family`."""
    metrics_by_queue: Sequence[tuple[str, str, Mapping[str, float]]] = (
        (
            "tokenmill_jobs_due",
            "Scheduled jobs whose time has come and that no worker's scheduler has queued yet.",
            numbers.due,
        ),
        (
            "tokenmill_oldest_job_seconds",
            "How long the job at the head of a queue has waited; 0 for an empty queue.",
            numbers.head_ages,
        ),
        (
            "tokenmill_runs_deadline_at_risk",
            "Runs of a queue that are not expected to end before their deadline.",
            numbers.at_risk,
        ),
    )
    for name, text, values in metrics_by_queue:
        family = GaugeMetricFamily(name, text, labels=["queue"])
        for queue, value in values.items():
            family.add_metric([queue], value)
        yield family
    if numbers.redis is not None:
        yield from _redis_families(numbers.redis)


def _redis_families(redis: RedisHealth) -> Iterator[Metric]:
    """Yield the metrics of Redis itself."""
    yield GaugeMetricFamily(
        "tokenmill_redis_memory_bytes", "Memory that Redis uses.", value=redis.used_bytes
    )
    yield GaugeMetricFamily(
        "tokenmill_redis_memory_limit_bytes",
        "Redis' maxmemory, or all memory of its machine if none is set.",
        value=redis.limit_bytes,
    )
    failures = GaugeMetricFamily(
        "tokenmill_redis_write_failed",
        "1 if the last write of this kind to Redis' disk failed.",
        labels=["what"],
    )
    for name in WRITES:
        failures.add_metric([name], name in redis.failed_writes)
    yield failures


class QueueMetrics(Collector):
    """Reads Redis whenever Prometheus asks for the metrics. Any thread may call its methods."""

    def __init__(self, connection: Redis, queues: Sequence[str]) -> None:
        self._connection = connection
        self._queues = tuple(dict.fromkeys(queues))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as a text, and the text's content type. Raises RedisError. accept: the Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield a metric family for each metric. Raises RedisError."""
        numbers = read_numbers(self._connection, self._queues)
        yield job_family(numbers.jobs)
        yield from queue_families(numbers)
