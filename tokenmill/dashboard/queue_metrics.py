"""What the dashboard tells Prometheus: how many jobs of some queues are where, also while no worker runs.

A worker tells the same of its queues under the same name and labels (worker/metrics/exporter.py), so that
`max by (queue, status) (rq_jobs)` is right with and without workers. The operator names the queues,
because producers may write anything into RQ's own list.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis import Redis

from jobs.common.workers import claimed_jobs, read_workers
from jobs.queues import count_queues
from jobs.runs.watching.reading import read_at_risk

#: RQ's statuses by the name under which `count_queues` has them.
_STATUSES = {"waiting": "queued", "executing": "started"}


class QueueMetrics(Collector):
    """Asks Redis with each exposition. For any thread."""

    def __init__(self, connection: Redis, queues: Sequence[str]) -> None:
        self._connection, self._queues = connection, tuple(dict.fromkeys(queues))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all numbers and their content type. accept: the header of the request. Raises RedisError."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(
            "rq_jobs",
            "Jobs of a queue by status. Every worker of a queue tells the same: take the maximum.",
            labels=["queue", "status"],
        )
        late = GaugeMetricFamily(
            "tokenmill_jobs_due",
            "Scheduled jobs whose time has come and that no worker's scheduler has queued yet.",
            labels=["queue"],
        )
        claimed = claimed_jobs(read_workers(self._connection)) if self._queues else {}
        for queue in count_queues(self._connection, self._queues):
            jobs.add_metric([queue.name, "claimed"], claimed.get(queue.name, 0))
            for place, count in queue.counts.items():
                jobs.add_metric([queue.name, _STATUSES.get(place, place)], count)
            late.add_metric([queue.name], queue.due)
        yield jobs
        yield late

        at_risk = GaugeMetricFamily(
            "tokenmill_runs_deadline_at_risk",
            "Runs of a queue that are not expected to end before their deadline.",
            labels=["queue"],
        )
        runs = read_at_risk(self._connection) if self._queues else []
        runs_of = Counter(run.queue for run in runs)
        for queue_name in self._queues:
            at_risk.add_metric([queue_name], runs_of[queue_name])
        yield at_risk
