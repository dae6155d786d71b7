"""Writes a worker's numbers in Prometheus' format.

The engine's names follow vLLM's, with `tokenmill_` in place of `vllm:` (promtool refuses a colon), and the queues'
names rq-exporter's. Label values are bounded in number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        """Show this worker's numbers, now that the model is loaded."""
        self._registry.register(_WorkerCollector(worker))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all numbers, and their content type. accept: the header of the request."""
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
        labels = ["name", "state", "queues"]
        yield _family(GaugeMetricFamily, "rq_workers", "Workers, this one.", labels, [((name, shown.state, queues), 1)])
        labels = ["name", "model_name", "dtype", "attention_backend", "version"]
        facts = [str(self._worker.facts.get(each, "")) for each in labels[2:]]
        of_all = [((name, self._model, *facts), 1)]
        yield _family(GaugeMetricFamily, "tokenmill_worker_info", "What the worker serves.", labels, of_all)
        jobs = [
            ((queue, status), number)
            for queue, by_status in shown.queued.items()
            for status, number in by_status.items()
        ]
        yield _family(GaugeMetricFamily, "rq_jobs", _QUEUE_HELP, ["queue", "status"], jobs)

    def _of_jobs(self, shown: Shown) -> Iterator[Metric]:
        counts, labels = self._worker.counts, ["queue", "outcome", "reason"]
        kinds = [(queue, kind) for queue in self._worker.queue_names for kind in ("engine", "function")]
        held = [(each, shown.held.get(each, 0)) for each in kinds]
        text = "Jobs claimed here and not ended."
        yield _family(GaugeMetricFamily, "tokenmill_jobs_held", text, ["queue", "kind"], held)
        ended, rows = dict(counts.jobs).items(), dict(counts.rows).items()
        yield _family(CounterMetricFamily, "tokenmill_jobs", "Jobs ended here.", labels, ended)
        yield _family(CounterMetricFamily, "tokenmill_rows", "Rows of finished shards.", labels, rows)
        yield CounterMetricFamily(
            "tokenmill_claims_lost", "Jobs cancelled or taken over while held.", counts.claims_lost
        )
        yield _by_queue("tokenmill_job_queue_time_seconds", "From a job's enqueueing to its begin.", counts.queue_times)
        yield _by_queue("tokenmill_job_latency_seconds", "From a job's enqueueing to its end.", counts.latencies)

    def _of_redis(self) -> Iterator[Metric]:
        counts = self._worker.counts
        text = "Commands or pipelines sent to Redis."
        sent = [(("worker",), counts.round_trips), (("functions",), counts.round_trips_of_functions)]
        yield _family(CounterMetricFamily, "tokenmill_redis_round_trips", text, ["client"], sent)
        text = "Turns of the I/O thread that Redis ended."
        errors = [((error,), number) for error, number in {"ConnectionError": 0, **counts.redis_errors}.items()]
        yield _family(CounterMetricFamily, "tokenmill_redis_errors", text, ["error"], errors)

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
        seconds = [((self._model, part), value) for part, value in stats.get("step_seconds", {}).items()]
        labels = ["model_name", "part"]
        yield _family(CounterMetricFamily, "tokenmill_step_seconds", "Time of steps by part.", labels, seconds)
        sizes: tuple[int, ...] = stats.get("batch_sizes", ())
        if sizes:
            histogram = Histogram([1 << i for i in range(len(sizes) - 1)])
            histogram.counts, histogram.total = list(sizes), stats.get("num_scheduled", 0)
            yield self._histogram("iteration_requests", "Sequences of a step.", histogram)

    def _of_requests(self) -> Iterator[Metric]:
        counts = self._worker.counts
        done = [((self._model, reason), number) for reason, number in dict(counts.requests).items()]
        text, labels = "Samples by how they ended.", ["model_name", "finished_reason"]
        yield _family(CounterMetricFamily, "tokenmill_request_success", text, labels, done)
        text = "From a request's arrival in the engine to its first token."
        yield self._histogram("time_to_first_token_seconds", text, counts.first_token)
        text = "From a request's arrival in the engine to its end."
        yield self._histogram("e2e_request_latency_seconds", text, counts.e2e)

    def _one(self, kind: Any, name: str, text: str, value: float) -> Metric:
        return _family(kind, f"tokenmill_{name}", text, ["model_name"], [((self._model,), value)])

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.total)
        return family


def _family(
    kind: Any, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Make a metric. rows: values of the labels, and the number."""
    family = kind(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    made: Metric = family
    return made


def _by_queue(name: str, text: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["queue"])
    for queue, histogram in dict(histograms).items():
        family.add_metric([queue], histogram.cumulative(), histogram.total)
    return family
