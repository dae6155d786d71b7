"""Writes a worker's numbers in Prometheus' format.

The engine's metrics have vLLM's names, with `tokenmill_` in place of `vllm:`, because promtool refuses a colon. The
queues' metrics have rq-exporter's names. Every label has a limited number of values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jobs.common.display import safe_name
from jobs.queues.metrics import job_family, queue_families
from worker.metrics.tally import Histogram, Tally

_GAUGE = GaugeMetricFamily
_COUNTER = CounterMetricFamily
_HISTOGRAM = HistogramMetricFamily


class _Metric(NamedTuple):
    """A metric. values_by_labels: a number or a Histogram for each combination of the labels' values."""

    family_class: Any
    name: str
    help: str
    labels: Sequence[str]
    values_by_labels: Iterable[tuple[Sequence[str], Any]]


def _by_label(values: Mapping[str, Any]) -> list[tuple[tuple[str], Any]]:
    """Return the `values_by_labels` of a metric with one label. values: the numbers or Histograms by label value."""
    return [((label_value,), value) for label_value, value in values.items()]


class Exporter:
    """Writes all metrics in Prometheus' format. Any thread may use it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def serve(self, facts: Mapping[str, Any], queue_names: Sequence[str], counts: Tally) -> None:
        """Show a worker's numbers from now on. Called when the worker's model is loaded.

        facts: the values of the worker's Redis key.
        """
        self._registry.register(_WorkerCollector(facts, queue_names, counts))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all numbers and their content type. accept: the request's Accept header."""
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
        """Yield the metric families of the methods below, then the families of the queues."""
        metrics = (
            *self._worker_metrics(),
            *self._job_metrics(),
            *self._redis_metrics(),
            *self._batch_metrics(),
            *self._token_metrics(),
            *self._step_metrics(),
            *self._request_metrics(),
        )
        for metric in metrics:
            family = metric.family_class(metric.name, metric.help, labels=metric.labels)
            for label_values, value in metric.values_by_labels:
                if isinstance(value, Histogram):
                    family.add_metric(label_values, value.cumulative(), value.total)
                else:
                    family.add_metric(label_values, value)
            yield family
        yield job_family(self._counts.statistics.jobs_by_queue)
        numbers = self._counts.queue_numbers
        if numbers is not None:
            yield from queue_families(numbers)

    def _worker_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics that say what the worker is."""
        facts = self._facts
        name = safe_name(str(facts.get("worker", "")))
        state = self._counts.statistics.state
        queues = ",".join(self._queue_names)
        # The labels say everything, so the value is always 1.
        worker_info = [((name, state, queues), 1)]
        yield _Metric(
            _GAUGE, "rq_workers", "This worker.", ("name", "state", "queues"), worker_info
        )

        fact_names = ("dtype", "attention_backend", "version")
        fact_values = [str(facts.get(fact_name, "")) for fact_name in fact_names]
        model_info = [((name, self._model, *fact_values), 1)]
        labels = ("name", "model_name", *fact_names)
        yield _Metric(
            _GAUGE, "tokenmill_worker_info", "What the worker serves.", labels, model_info
        )

    def _job_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of jobs."""
        counts = self._counts
        held_jobs = []
        for queue in self._queue_names:
            for kind in ("engine", "function"):
                num_held = counts.statistics.held_by_kind.get((queue, kind), 0)
                held_jobs.append(((queue, kind), num_held))
        yield _Metric(
            _GAUGE,
            "tokenmill_jobs_held",
            "Jobs claimed here and not ended.",
            ("queue", "kind"),
            held_jobs,
        )

        # `dict` makes a copy, here and below, because the I/O thread may add a label meanwhile.
        jobs = dict(counts.jobs).items()
        rows = dict(counts.rows).items()
        labels = ("queue", "outcome", "reason")
        yield _Metric(_COUNTER, "tokenmill_jobs", "Jobs ended here.", labels, jobs)
        yield _Metric(_COUNTER, "tokenmill_rows", "Rows of finished shards.", labels, rows)

        yield _Metric(
            _COUNTER,
            "tokenmill_claims_lost",
            "Jobs cancelled or taken over while held.",
            labels=(),
            values_by_labels=[((), counts.claims_lost)],
        )
        yield self._takeovers()
        yield _Metric(
            _COUNTER,
            "tokenmill_unforeseen_errors",
            "Errors about one job that nobody foresaw: they end that job alone. Each is a bug to report.",
            ("queue", "error"),
            dict(counts.unforeseen_errors).items(),
        )
        yield _Metric(
            _HISTOGRAM,
            "tokenmill_job_queue_time_seconds",
            "From a job's enqueueing to its beginning.",
            ("queue",),
            _by_label(dict(counts.queue_times)),
        )
        yield _Metric(
            _HISTOGRAM,
            "tokenmill_job_latency_seconds",
            "From a job's enqueueing to its end.",
            ("queue",),
            _by_label(dict(counts.latencies)),
        )

    def _takeovers(self) -> _Metric:
        """Return the metric of jobs that were taken over."""
        # Prometheus shows no increase for a counter that begins at 1, so the counter for the first death begins at 0.
        num_takeovers = {(queue, 1): 0 for queue in self._queue_names}
        num_takeovers.update(dict(self._counts.takeovers))
        takeovers = []
        for (queue, deaths), num_jobs in num_takeovers.items():
            takeovers.append(((queue, str(deaths)), num_jobs))
        return _Metric(
            _COUNTER,
            "tokenmill_jobs_taken_over",
            "Jobs taken over from dead workers, or after a fault, by the number of deaths and faults of the job.",
            ("queue", "deaths"),
            takeovers,
        )

    def _redis_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of this worker's use of Redis."""
        yield _Metric(
            _COUNTER,
            "tokenmill_redis_round_trips",
            "Commands or pipelines sent to Redis.",
            ("client",),
            _by_label(self._counts.round_trips),
        )
        # Prometheus shows no increase for a counter that begins at 1, so the usual error's counter begins at 0.
        num_errors = {"ConnectionError": 0, **self._counts.redis_errors}
        yield _Metric(
            _COUNTER,
            "tokenmill_redis_errors",
            "Turns of the I/O thread that ended with an error of Redis.",
            ("error",),
            _by_label(num_errors),
        )

    def _of_model(self, family_class: Any, name: str, help_text: str, value: Any) -> _Metric:
        """Return a metric whose only label is the model. name: without `tokenmill_`. value: a number or Histogram."""
        return _Metric(
            family_class, f"tokenmill_{name}", help_text, ("model_name",), [((self._model,), value)]
        )

    def _batch_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of the engine's batch and its KV cache."""
        point = self._counts.statistics.point
        gauges = (
            ("num_requests_running", "Sequences in the batch.", point.num_requests_running),
            (
                "num_requests_waiting",
                "Sequences that wait in the engine.",
                point.num_requests_waiting,
            ),
            ("max_num_seqs", "Sequences that the batch has room for.", point.max_num_seqs),
            ("kv_cache_usage_perc", "KV cache in use; 1 means all of it.", point.kv_cache_usage),
        )
        for name, help_text, value in gauges:
            yield self._of_model(_GAUGE, name, help_text, value)
        yield self._of_model(
            _COUNTER, "num_preemptions", "Sequences that had to give way.", point.num_preemptions
        )

    def _token_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of tokens. Every token of a prompt is looked up in the prefix cache."""
        point = self._counts.statistics.point
        counters = (
            ("prompt_tokens", "Tokens of prompts, computed or cached.", point.prompt_tokens),
            ("generation_tokens", "Tokens generated.", point.generation_tokens),
            (
                "prefix_cache_queries",
                "Tokens of prompts looked up in the prefix cache.",
                point.prompt_tokens,
            ),
            (
                "prefix_cache_hits",
                "Tokens of prompts found in the prefix cache.",
                point.cached_tokens,
            ),
        )
        for name, help_text, value in counters:
            yield self._of_model(_COUNTER, name, help_text, value)

    def _step_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of the engine's steps."""
        of_model = self._of_model
        stats = self._counts.statistics.engine_stats
        yield of_model(_COUNTER, "steps", "Steps of the engine.", stats.get("num_steps", 0))
        yield of_model(
            _COUNTER,
            "adapter_steps",
            "Steps with rows of adapters, which run without CUDA graphs.",
            stats.get("adapter_steps", 0),
        )

        # Element i counts the steps with at most 2**i sequences but more than 2**(i - 1). The last element counts all
        # larger steps.
        num_steps_by_size = stats.get("batch_sizes", ())
        if num_steps_by_size:
            num_bounds = len(num_steps_by_size) - 1
            batch_sizes = Histogram([2**i for i in range(num_bounds)])
            batch_sizes.counts = list(num_steps_by_size)
            batch_sizes.total = stats.get("num_scheduled", 0)
            yield of_model(_HISTOGRAM, "iteration_requests", "Sequences of a step.", batch_sizes)

        step_seconds = []
        for part, part_s in stats.get("step_seconds", {}).items():
            step_seconds.append(((self._model, part), part_s))
        yield _Metric(
            _COUNTER,
            "tokenmill_step_seconds",
            "Time of steps by part.",
            ("model_name", "part"),
            step_seconds,
        )

    def _request_metrics(self) -> Iterator[_Metric]:
        """Yield the metrics of requests that have ended in the engine."""
        counts = self._counts
        yield self._of_model(
            _HISTOGRAM,
            "time_to_first_token_seconds",
            "From a request's arrival in the engine to its first token.",
            counts.times_to_first_token,
        )
        yield self._of_model(
            _HISTOGRAM,
            "e2e_request_latency_seconds",
            "From a request's arrival in the engine to its end.",
            counts.e2e_latencies,
        )
        ended_samples = []
        for reason, num_samples in dict(counts.samples).items():
            ended_samples.append(((self._model, reason), num_samples))
        yield _Metric(
            _COUNTER,
            "tokenmill_request_success",
            "Samples by how they ended.",
            ("model_name", "finished_reason"),
            ended_samples,
        )
