"""Writes a worker's numbers in Prometheus' format.

The engine's metrics have vLLM's names, with `tokenmill_` in place of `vllm:`, because promtool refuses a colon. The
queues' metrics have rq-exporter's names. The number of label values is bounded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jobs.common.display import safe_name
from jobs.queues.metrics import job_family, waiting_families
from worker.metrics.tally import Histogram, Tally

_GAUGE = GaugeMetricFamily
_COUNTER = CounterMetricFamily
_HISTOGRAM = HistogramMetricFamily


class _Metric(NamedTuple):
    """A metric. rows: pairs of label values and a number or a Histogram."""

    family: Any
    name: str
    help: str
    labels: Sequence[str]
    rows: Iterable[tuple[Sequence[str], Any]]


class Exporter:
    """Writes all metrics in Prometheus' format. For any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def serve(self, facts: Mapping[str, Any], queue_names: Sequence[str], counts: Tally) -> None:
        """Show a worker's numbers from now on, once its model is loaded. facts: the values of its key in Redis."""
        self._registry.register(_WorkerCollector(facts, queue_names, counts))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all numbers and their content type. accept: the request's header of that name."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _WorkerCollector(Collector):
    """Reads a worker's numbers for each exposition."""

    def __init__(self, facts: Mapping[str, Any], queue_names: Sequence[str], counts: Tally) -> None:
        self._facts = facts
        self._queue_names = queue_names
        self._counts = counts
        self._model = safe_name(str(facts.get("model", "")))

    def collect(self) -> Iterator[Metric]:
        """Yield a metric family for each metric of the methods below."""
        metrics = (*self._worker_metrics(), *self._job_metrics(), *self._engine_metrics())
        for metric in metrics:
            family = metric.family(metric.name, metric.help, labels=metric.labels)
            for label_values, value in metric.rows:
                if isinstance(value, Histogram):
                    family.add_metric(label_values, value.cumulative(), value.total)
                else:
                    family.add_metric(label_values, value)
            yield family
        yield job_family(self._counts.shown.jobs_by_queue)
        numbers = self._counts.queue_numbers
        if numbers is not None:
            yield from waiting_families(numbers)

    def _worker_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics that say what the worker is."""
        facts = self._facts
        shown = self._counts.shown
        name = safe_name(str(facts.get("worker", "")))
        queues = ",".join(self._queue_names)
        this_worker = [((name, shown.state, queues), 1)]
        yield _Metric(
            _GAUGE, "rq_workers", "This worker.", ("name", "state", "queues"), this_worker
        )

        fact_names = ("dtype", "attention_backend", "version")
        fact_values = [str(facts.get(fact_name, "")) for fact_name in fact_names]
        served = [((name, self._model, *fact_values), 1)]
        labels = ("name", "model_name", *fact_names)
        yield _Metric(_GAUGE, "tokenmill_worker_info", "What the worker serves.", labels, served)

    def _job_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of jobs and of Redis."""
        counts = self._counts
        held = []
        for queue in self._queue_names:
            for kind in ("engine", "function"):
                num_held = counts.shown.held_by_kind.get((queue, kind), 0)
                held.append(((queue, kind), num_held))
        yield _Metric(
            _GAUGE,
            "tokenmill_jobs_held",
            "Jobs claimed here and not ended.",
            ("queue", "kind"),
            held,
        )

        # These are copies, here and below, because the I/O thread may add a label meanwhile.
        jobs = dict(counts.jobs).items()
        rows = dict(counts.rows).items()
        labels = ("queue", "outcome", "reason")
        yield _Metric(_COUNTER, "tokenmill_jobs", "Jobs ended here.", labels, jobs)
        yield _Metric(_COUNTER, "tokenmill_rows", "Rows of finished shards.", labels, rows)

        lost = [((), counts.claims_lost)]
        yield _Metric(
            _COUNTER, "tokenmill_claims_lost", "Jobs cancelled or taken over while held.", (), lost
        )

        # Prometheus would not see the first death in a counter that begins at 1.
        takeovers = {(queue, 1): 0 for queue in self._queue_names} | dict(counts.takeovers)
        taken_over = [
            ((queue, str(deaths)), number) for (queue, deaths), number in takeovers.items()
        ]
        yield _Metric(
            _COUNTER,
            "tokenmill_jobs_taken_over",
            "Jobs taken over from dead workers, or after a fault, by the number of deaths and faults of the job.",
            ("queue", "deaths"),
            taken_over,
        )

        yield _Metric(
            _COUNTER,
            "tokenmill_unforeseen_errors",
            "Errors about one job that nobody foresaw: they end that job alone. Each is a bug to report.",
            ("queue", "error"),
            dict(counts.unforeseen_errors).items(),
        )

        for name, until, times in (
            ("queue_time", "begin", counts.queue_times),
            ("latency", "end", counts.latencies),
        ):
            by_queue = [((queue,), histogram) for queue, histogram in dict(times).items()]
            yield _Metric(
                _HISTOGRAM,
                f"tokenmill_job_{name}_seconds",
                f"From a job's enqueueing to its {until}.",
                ("queue",),
                by_queue,
            )

        round_trips = [((client,), number) for client, number in counts.round_trips.items()]
        yield _Metric(
            _COUNTER,
            "tokenmill_redis_round_trips",
            "Commands or pipelines sent to Redis.",
            ("client",),
            round_trips,
        )

        # Prometheus would not see the first error either.
        redis_errors = {"ConnectionError": 0, **counts.redis_errors}
        errors = [((error,), number) for error, number in redis_errors.items()]
        yield _Metric(
            _COUNTER,
            "tokenmill_redis_errors",
            "Turns of the I/O thread that Redis ended.",
            ("error",),
            errors,
        )

    def _engine_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of the engine."""
        counts = self._counts
        point = self._counts.shown.point
        stats = self._counts.shown.engine_stats
        arrival = "From a request's arrival in the engine to its"
        # Of each metric: its family, its name without prefix, its help, and its only value.
        metrics: list[tuple[Any, str, str, Any]] = [
            (_GAUGE, "num_requests_running", "Sequences in the batch.", point.num_requests_running),
            (
                _GAUGE,
                "num_requests_waiting",
                "Sequences that wait in the engine.",
                point.num_requests_waiting,
            ),
            (_GAUGE, "max_num_seqs", "Sequences that the batch has room for.", point.max_num_seqs),
            (
                _GAUGE,
                "kv_cache_usage_perc",
                "KV cache in use; 1 means all of it.",
                point.kv_cache_usage,
            ),
            (_COUNTER, "num_preemptions", "Sequences that had to give way.", point.num_preemptions),
            (
                _COUNTER,
                "prompt_tokens",
                "Tokens of prompts, computed or cached.",
                point.prompt_tokens,
            ),
            (_COUNTER, "generation_tokens", "Tokens generated.", point.generation_tokens),
            (
                _COUNTER,
                "prefix_cache_queries",
                "Tokens of prompts looked up in the prefix cache.",
                point.prompt_tokens,
            ),
            (_COUNTER, "prefix_cache_hits", "Tokens of prompts found there.", point.cached_tokens),
            (_COUNTER, "steps", "Steps of the engine.", stats.get("num_steps", 0)),
            (
                _COUNTER,
                "adapter_steps",
                "Steps with rows of adapters, which run without CUDA graphs.",
                stats.get("adapter_steps", 0),
            ),
            (
                _HISTOGRAM,
                "time_to_first_token_seconds",
                f"{arrival} first token.",
                counts.first_token,
            ),
            (_HISTOGRAM, "e2e_request_latency_seconds", f"{arrival} end.", counts.e2e),
        ]

        # sizes[i]: the number of steps with more than 2**(i - 1) and at most 2**i sequences. The last one: all larger.
        sizes = stats.get("batch_sizes", ())
        if sizes:
            batch_sizes = Histogram([1 << i for i in range(len(sizes) - 1)])
            batch_sizes.counts = list(sizes)
            batch_sizes.total = stats.get("num_scheduled", 0)
            metrics.append((_HISTOGRAM, "iteration_requests", "Sequences of a step.", batch_sizes))
        for family, name, help_text, value in metrics:
            rows = [((self._model,), value)]
            yield _Metric(family, f"tokenmill_{name}", help_text, ("model_name",), rows)

        seconds_by_part = stats.get("step_seconds", {})
        yield _Metric(
            _COUNTER,
            "tokenmill_step_seconds",
            "Time of steps by part.",
            ("model_name", "part"),
            [((self._model, part), seconds) for part, seconds in seconds_by_part.items()],
        )

        num_by_reason = dict(counts.requests)
        yield _Metric(
            _COUNTER,
            "tokenmill_request_success",
            "Samples by how they ended.",
            ("model_name", "finished_reason"),
            [((self._model, reason), number) for reason, number in num_by_reason.items()],
        )
