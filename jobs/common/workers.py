"""Reads the records of workers in Redis: their state now, their points of the last hour, and RQ's registration.

A worker writes its `WorkerSample` to `tokenmill:worker:<name>` every two seconds. Every ten seconds, it puts a `Point`
at the head of the list `tokenmill:samples:<name>`. Names of fields follow vLLM's metrics.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from redis import Redis

from jobs.common.display import is_unicode, printable, safe_name
from jobs.common.keys import (
    SILENT_S,
    WORKER_STATS_TTL_S,
    fleet_key,
    loading_key,
    served_key,
    worker_key,
)
from jobs.common.rq_jobs import WORKER_PREFIX, WORKERS_KEY
from jobs.common.stored import count, json_object, text

#: Seconds between two points.
POINT_PERIOD_S = 10.0
#: The most points that are kept. They cover an hour.
MAX_POINTS = 360
#: The most jobs that a sample names. They are the oldest jobs that the worker holds.
MAX_HELD_NAMED = 20
#: The state of a worker that loads its model.
LOADING = "loading"
#: The most seconds for which a worker counts as loading.
LOADING_S = 600.0
#: The state of a worker that claims nothing because Redis came back with older data.
RESTORED = "restored"
RESTORED_TEXT = (
    "Redis came back with older data, and prompts that were answered since may be queued again: "
    "`tokenmill restore-check` says what to do"
)
#: The state of a worker that claims nothing because of `rq suspend`.
SUSPENDED = "suspended"
SUSPENDED_TEXT = "all workers are suspended and claim nothing: `rq resume` lets them go on"
#: How long a silent worker is still listed. RQ keeps its registration for the same time by default (--worker-ttl).
LISTED_S = 480.0
#: The most characters of a text in a worker's record.
MAX_TEXT_CHARS = 4096
#: The most entries of a list in a worker's record.
MAX_ENTRIES = 1000


def _number(value: object) -> float | None:
    """Read a number from 0 to 2**53, such as seconds or a share. Return None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 2**53 else None


def _text(value: object) -> str | None:
    """Read a text that is fit to be shown. Return None for anything else."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not is_unicode(value):
        return None
    return printable(value)


def _texts(value: object) -> list[str] | None:
    """Read a list, and return its texts that are fit to be shown. Return None if it is no list or very long."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        return None
    texts = [_text(entry) for entry in value]
    return [text for text in texts if text is not None]


def _counts(value: object) -> dict[str, int] | None:
    """Read counts by name. Return None if the value is no mapping or very large."""
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        return None
    counts: dict[str, int] = {}
    for name, number in value.items():
        shown_name = _text(name)
        checked_number = count(number)
        if shown_name is not None and checked_number is not None:
            counts[shown_name] = checked_number
    return counts


#: By type: the function that reads a record's field of this type. It returns None for a value that no worker writes.
_READ: Mapping[Any, Callable[[object], Any]] = {
    float: _number,
    int: count,
    str: _text,
    Sequence[str]: _texts,
    Mapping[str, int]: _counts,
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The numbers of one worker at one moment. Counts begin with the worker's start.

    at: Unix seconds by the worker's clock. prompt_tokens: tokens of prompts, computed or cached.
    num_requests_running: sequences in the batch. kv_cache_usage: a share from 0 to 1.
    jobs_held: jobs that the worker has claimed and not ended. rows: answered rows of files.
    depth: how many jobs wait in each of the worker's queues, the most urgent queue first.
    ended: how many jobs ended on this worker, by queue. ended_badly: how many of them did not finish successfully.
    waited_ms, ran_ms: the waiting times and run times of these ended jobs, added up by queue.
    """

    at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    max_num_seqs: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    jobs_held: int = 0
    jobs_finished: int = 0
    jobs_failed: int = 0
    rows: int = 0
    depth: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    ended_badly: Mapping[str, int] = field(default_factory=dict)
    waited_ms: Mapping[str, int] = field(default_factory=dict)
    ran_ms: Mapping[str, int] = field(default_factory=dict)

    @property
    def batch_fill(self) -> float:
        """Return the share of the batch that is filled, from 0 to 1."""
        if self.max_num_seqs == 0:
            return 0.0
        return min(1.0, self.num_requests_running / self.max_num_seqs)

    def to_object(self) -> dict[str, Any]:
        """Return the fields as a dict that can be written as JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the fields as JSON text."""
        return json.dumps(self.to_object(), separators=(",", ":"))

    @classmethod
    def from_object(cls, stored: Mapping[str, Any], **more: Any) -> Self:
        """Return the record that a stored object describes. more: values for fields that are not stored.

        Producers may write records too. So a value of the wrong type counts as missing.
        """
        values: dict[str, Any] = {}
        for record_field in fields(cls):
            read = _READ[record_field.type]
            value = read(stored.get(record_field.name))
            if value is not None:
                values[record_field.name] = value
        return cls(**{**values, **more})


@dataclass(frozen=True, kw_only=True)
class WorkerSample(Point):
    """The last state that a worker has written.

    silent_s: how many seconds ago the worker wrote it, by Redis' clock. started_at: Unix seconds.
    state: "idle", "busy", "suspended", "restored" (see `RESTORED`), "draining" (it finishes its running jobs),
    "loading" (its model) or "stopped".
    models: all names by which jobs may ask for the worker's model or for an adapter. adapters: the adapters' names.
    fingerprint, max_model_len: see ServedModel.
    clock_formats: see ServedModel, as one text (jobs.context.served_model.joined_formats).
    model_source: the folder or hub id from which the model was loaded.
    host, pid, memory_bytes: the worker's machine, and the id and memory of its process.
    format: the format of plans that the worker reads (FORMAT in jobs.common.keys).
    queues: the worker's queues, the most urgent first. held: how many jobs it holds, by queue.
    held_jobs: the ids of the oldest held jobs, at most MAX_HELD_NAMED.
    claimed: for each of the worker's queues, how many jobs all workers together have claimed and not begun.
    """

    name: str = ""
    silent_s: float = 0.0
    state: str = ""
    model: str = ""
    model_source: str = ""
    models: Sequence[str] = ()
    adapters: Sequence[str] = ()
    fingerprint: str = ""
    max_model_len: int = 0
    clock_formats: str = ""
    dtype: str = ""
    attention_backend: str = ""
    host: str = ""
    pid: int = 0
    memory_bytes: int = 0
    version: str = ""
    commit: str = ""
    format: int = 0
    queues: Sequence[str] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    held_jobs: Sequence[str] = ()
    claimed: Mapping[str, int] = field(default_factory=dict)
    started_at: float = 0.0
    stuck_threads: int = 0

    @property
    def up_s(self) -> float:
        """Return the seconds since the worker started.

        They are counted by the worker's clock until its last sample, and by Redis' clock since then.
        """
        return max(0.0, self.at - self.started_at) + self.silent_s

    @property
    def is_silent(self) -> bool:
        """Whether the worker has written nothing for so long that it must be frozen, cut off or dead."""
        limit_s = LOADING_S if self.state == LOADING else SILENT_S
        return self.silent_s > limit_s


def worker_names(connection: Redis) -> list[str]:
    """Return the names of registered workers, sorted. These include RQ's own workers, and recently killed ones."""
    keys: Any = connection.smembers(WORKERS_KEY)
    return sorted(text(key).removeprefix(WORKER_PREFIX) for key in keys)


_FIELDS = (
    "state",
    "queues",
    "current_job",
    "successful_job_count",
    "failed_job_count",
    "last_heartbeat",
)


@dataclass(frozen=True)
class Worker:
    """A worker, as Redis knows it.

    queues: the queues that it serves. registered: the fields that RQ stores, safe to show; {} once the fields of a
    killed worker have expired. sample: the last sample that it wrote; None for RQ's own workers, which write none.
    """

    name: str
    queues: Sequence[str]
    registered: Mapping[str, str]
    sample: WorkerSample | None

    @property
    def is_silent(self) -> bool:
        """Whether the worker has been silent for too long. RQ's own workers write no samples and are never silent."""
        return self.sample is not None and self.sample.is_silent


def read_workers(connection: Redis, names: Sequence[str] | None = None) -> list[Worker]:
    """Return the workers that are registered or wrote a sample in the last LISTED_S seconds. Raises RedisError.

    names: only these workers are returned; by default, all are.
    """
    if names is None:
        # RQ also lists the workers of each queue. Producers have no rights to these lists, so they are not used.
        names = worker_names(connection)
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(WORKER_PREFIX + name, _FIELDS)
            pipe.get(worker_key(name))
            pipe.pttl(worker_key(name))
            pipe.get(loading_key(name))
            pipe.pttl(loading_key(name))
        # Producers may write to these keys too, so some replies may be errors. An error leaves out only one worker.
        replies = iter(pipe.execute(raise_on_error=False))

    workers = []
    for name in names:
        # The replies come in the order of the commands above.
        registration = next(replies)
        record = next(replies)
        record_ttl_ms = next(replies)
        loading_record = next(replies)
        loading_record_ttl_ms = next(replies)
        serving_sample = _sample(name, record, record_ttl_ms)
        loading_sample = _sample(name, loading_record, loading_record_ttl_ms)
        sample = _later(serving_sample, loading_sample)
        worker = _worker(name, registration, sample)
        is_sample_recent = sample is not None and sample.silent_s <= LISTED_S
        if worker.registered or is_sample_recent:
            workers.append(worker)
    return workers


def _worker(name: str, registration: Any, sample: WorkerSample | None) -> Worker:
    """Return a worker. registration: the values of _FIELDS, or an error of Redis."""
    queues: list[str] = []
    registered: dict[str, str] = {}
    if isinstance(registration, list):
        for field_name, value in zip(_FIELDS, registration, strict=True):
            if value:
                registered[field_name] = safe_name(value)
            if value and field_name == "queues":
                queues = text(value).split(",")
    return Worker(name, queues, registered, sample)


def _sample(name: str, raw: Any, ttl_ms: Any) -> WorkerSample | None:
    """Return the sample in a stored record; None if there is none.

    ttl_ms: how long the record's key has yet to live. The worker sets it to WORKER_STATS_TTL_S at each sign of life.
    """
    record = json_object(raw)
    if not record:
        return None
    silent_s = 0.0
    if ttl_ms >= 0:  # negative if the key has no time to live
        silent_s = max(0.0, WORKER_STATS_TTL_S - ttl_ms / 1000)
    # The field is called "updated_at" in the record, and "at" in a WorkerSample.
    record["at"] = record.get("updated_at")
    return WorkerSample.from_object(record, name=name, silent_s=silent_s)


def _later(serving: WorkerSample | None, loading: WorkerSample | None) -> WorkerSample | None:
    """Return the later of two samples under one worker name.

    A killed worker's sample stays while its successor of the same name loads a model. So there may be two.
    """
    if serving is None or loading is None:
        return serving or loading
    return loading if loading.silent_s < serving.silent_s else serving


def listening_on(workers: Iterable[Worker], queue: str) -> list[Worker]:
    """Return the workers that listen on a queue."""
    return [worker for worker in workers if queue in worker.queues]


def models_on(workers: Iterable[Worker], queue: str) -> set[str] | None:
    """Return the names of the models and adapters that a queue's workers serve.

    Returns None if one of RQ's own workers listens on the queue, because such a worker does not say what it serves.
    """
    models: set[str] = set()
    for worker in listening_on(workers, queue):
        if worker.sample is None:
            return None
        if not worker.is_silent:  # a killed worker's sample stays for minutes
            models.update(worker.sample.models)
    return models


def other_length_text(workers: Iterable[Worker], queue: str, pin: str) -> str:
    """Return a sentence about a worker that serves the pinned model with another length limit; "" for no such worker.

    Only workers of `queue` count. pin: names the model with its length limit; see PinnedModel.pin.
    """
    # The pin's first line is `<fingerprint>/<length>`. Further lines name adapters.
    model_line, _, _ = pin.partition("\n")
    fingerprint, _, length = model_line.rpartition("/")
    for worker in workers:
        sample = worker.sample
        if sample is None or worker.is_silent or queue not in worker.queues:
            continue
        has_other_length = sample.max_model_len != 0 and str(sample.max_model_len) != length
        if fingerprint in sample.models and has_other_length:
            return f"{safe_name(worker.name)} serves it with up to {sample.max_model_len} tokens"
    return ""


def are_paused(workers: Iterable[Worker]) -> bool:
    """Whether any worker has paused because Redis came back with older data."""
    return _is_any_in_state(RESTORED, workers)


def are_suspended(workers: Iterable[Worker]) -> bool:
    """Whether `rq suspend` has suspended all workers. A worker shows that state only after its last job has ended."""
    return _is_any_in_state(SUSPENDED, workers)


def _is_any_in_state(state: str, workers: Iterable[Worker]) -> bool:
    """Whether any worker is in this state. Silent workers do not count."""
    for worker in workers:
        sample = worker.sample
        if sample is not None and sample.state == state and not worker.is_silent:
            return True
    return False


def claimed_jobs(workers: Iterable[Worker]) -> dict[str, int]:
    """Return how many jobs of each queue are claimed and not begun, as the latest sample about the queue says.

    A worker's sample counts the jobs of all workers.
    """
    samples = [worker.sample for worker in workers if worker.sample is not None]
    samples.sort(key=lambda sample: sample.silent_s, reverse=True)  # the oldest first
    claimed: dict[str, int] = {}
    for sample in samples:
        claimed.update(sample.claimed)
    return claimed


#: The fields that a worker writes to its `served_key`.
_SERVED = ("queues", "model", "models", "dtype", "max_model_len", "clock_formats")


def read_serving(connection: Redis, queue: str) -> list[WorkerSample]:
    """Return what a queue's living workers serve, from keys that only workers may write. Raises RedisError.

    The samples have only the fields that `served_text` writes.
    """
    # The set is sorted by the last sign of life. Only the workers with the latest signs are read.
    names: Any = connection.zrange(fleet_key(queue), -MAX_ENTRIES, -1)
    if not names:
        return []
    served_texts: Any = connection.mget([served_key(text(name)) for name in names])
    samples = []
    for served in served_texts:
        sample = WorkerSample.from_object(json_object(served))
        if queue in sample.queues:
            samples.append(sample)
    return samples


def served_text(facts: Mapping[str, Any]) -> str:
    """Return the text that a worker writes to its `served_key`: some of the facts about it, as JSON."""
    return json.dumps({name: facts[name] for name in _SERVED if name in facts})
