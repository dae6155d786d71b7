"""A worker's numbers as Prometheus reads them.

Names of the engine's follow vLLM's, with `tokenmill_` in the place of `vllm:` (promtool refuses a colon), and
those of queues rq-exporter's. Label values are the operator's queues, the model, and names of a bounded
number.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jobs.common.display import safe_name
from worker.metrics.tally import Histogram
from worker.metrics.watched_worker import Shown, WatchedWorker

_QUEUE_HELP = "Jobs of a queue by status. Every worker of a queue tells the same: take the maximum."


class Exporter:
    """Writes the exposition. For any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def serve(self, worker: WatchedWorker) -> None:
        """The model is loaded, and this is the worker."""
        self._registry.register(_WorkerCollector(worker))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All numbers, and their content type. accept: the header of the request."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _WorkerCollector(Collector):
    def __init__(self, worker: WatchedWorker) -> None:
        self._worker = worker
        self._model = safe_name(str(worker.facts.get("model", "")))

    def collect(self) -> Iterator[Metric]:
        shown, stats = self._worker.reporter.shown, self._worker.reporter.engine_stats
        yield from self._of_queues(shown)
        yield from self._of_jobs(shown)
        yield from self._of_redis()
        yield from self._gauges(shown, stats)
        yield from self._counters(shown, stats)
        yield from self._of_steps(stats)
        yield from self._of_requests()

    def _of_queues(self, shown: Shown) -> Iterator[Metric]:
        name, queues = (safe_name(str(self._worker.facts.get("worker", ""))), ",".join(self._worker.queue_names))
        workers = GaugeMetricFamily("rq_workers", "Workers, this one.", labels=["name", "state", "queues"])
        workers.add_metric([name, shown.state, queues], 1)
        yield workers
        info = GaugeMetricFamily(
            "tokenmill_worker_info",
            "What the worker serves.",
            labels=["name", "model_name", "dtype", "attention_backend", "version"],
        )
        facts = [str(self._worker.facts.get(each, "")) for each in ("dtype", "attention_backend", "version")]
        info.add_metric([name, self._model, *facts], 1)
        yield info
        jobs = GaugeMetricFamily("rq_jobs", _QUEUE_HELP, labels=["queue", "status"])
        for queue, by_status in shown.queued.items():
            for status, number in by_status.items():
                jobs.add_metric([queue, status], number)
        yield jobs

    def _of_jobs(self, shown: Shown) -> Iterator[Metric]:
        counts = self._worker.counts
        held = GaugeMetricFamily("tokenmill_jobs_held", "Jobs claimed here and not ended.", labels=["queue", "kind"])
        for queue in self._worker.queue_names:
            for kind in ("engine", "function"):
                held.add_metric([queue, kind], shown.held.get((queue, kind), 0))
        yield held
        ended = CounterMetricFamily("tokenmill_jobs", "Jobs ended here.", labels=["queue", "outcome", "reason"])
        for (queue, outcome, reason), number in dict(counts.jobs).items():
            ended.add_metric([queue, outcome, reason], number)
        yield ended
        rows = CounterMetricFamily("tokenmill_rows", "Rows of finished shards.", labels=["queue", "outcome", "reason"])
        for (queue, outcome, reason), number in dict(counts.rows).items():
            rows.add_metric([queue, outcome, reason], number)
        yield rows
        yield CounterMetricFamily(
            "tokenmill_claims_lost", "Jobs cancelled or taken over while held.", counts.claims_lost
        )
        yield _by_queue("tokenmill_job_queue_time_seconds", "From a job's enqueueing to its begin.", counts.queue_times)
        yield _by_queue("tokenmill_job_latency_seconds", "From a job's enqueueing to its end.", counts.latencies)

    def _of_redis(self) -> Iterator[Metric]:
        counts = self._worker.counts
        sent = CounterMetricFamily(
            "tokenmill_redis_round_trips", "Commands or pipelines sent to Redis.", labels=["client"]
        )
        sent.add_metric(["worker"], counts.round_trips)
        sent.add_metric(["functions"], counts.round_trips_of_functions)
        yield sent
        errors = CounterMetricFamily(
            "tokenmill_redis_errors", "Turns of the I/O thread that Redis ended.", labels=["error"]
        )
        for error, number in {"ConnectionError": 0, **counts.redis_errors}.items():
            errors.add_metric([error], number)
        yield errors

    def _gauges(self, shown: Shown, stats: Mapping[str, Any]) -> Iterator[Metric]:
        num_blocks = stats.get("num_blocks", 0)
        usage = 1 - stats.get("free_blocks", 0) / num_blocks if num_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences in the batch.", stats.get("num_running", 0)),
            ("num_requests_waiting", "Sequences that wait in the engine.", stats.get("num_waiting", 0)),
            ("max_num_seqs", "Sequences that the batch has room for.", shown.point.max_num_seqs),
            ("kv_cache_usage_perc", "KV cache in use; 1 means all of it.", usage),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)

    def _counters(self, shown: Shown, stats: Mapping[str, Any]) -> Iterator[Metric]:
        cached = stats.get("cached_tokens", 0)
        prompt = stats.get("prefill_tokens", 0) + cached
        for name, text, value in (
            ("num_preemptions", "Sequences that had to give way.", stats.get("num_preemptions", 0)),
            ("prompt_tokens", "Tokens of prompts, computed or cached.", prompt),
            ("generation_tokens", "Tokens generated.", stats.get("generation_tokens", 0)),
            ("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.", prompt),
            ("prefix_cache_hits", "Tokens of prompts found there.", cached),
            ("steps", "Steps of the engine.", stats.get("num_steps", 0)),
        ):
            yield self._one(CounterMetricFamily, name, text, value)

    def _of_steps(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        seconds = CounterMetricFamily("tokenmill_step_seconds", "Time of steps by part.", labels=["model_name", "part"])
        for part, value in stats.get("step_seconds", {}).items():
            seconds.add_metric([self._model, part], value)
        yield seconds
        sizes: tuple[int, ...] = stats.get("batch_sizes", ())
        if sizes:
            histogram = Histogram([1 << i for i in range(len(sizes) - 1)])
            histogram.counts, histogram.total = list(sizes), stats.get("num_scheduled", 0)
            yield self._histogram("iteration_requests", "Sequences of a step.", histogram)

    def _of_requests(self) -> Iterator[Metric]:
        counts = self._worker.counts
        done = CounterMetricFamily(
            "tokenmill_request_success", "Samples by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, number in dict(counts.requests).items():
            done.add_metric([self._model, reason], number)
        yield done
        text = "From a request's arrival in the engine to its first token."
        yield self._histogram("time_to_first_token_seconds", text, counts.first_token)
        text = "From a request's arrival in the engine to its end."
        yield self._histogram("e2e_request_latency_seconds", text, counts.e2e)

    def _one(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family: Metric = kind(f"tokenmill_{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)  # type: ignore[attr-defined]
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.total)
        return family


def _by_queue(name: str, text: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["queue"])
    for queue, histogram in dict(histograms).items():
        family.add_metric([queue], histogram.cumulative(), histogram.total)
    return family
