"""Reads the records of workers: the state of each, points of the last hour, and RQ's registration.

A worker writes its `WorkerSample` to `tokenmill:worker:<name>` every two seconds, and a `Point` to the list
`tokenmill:samples:<name>`, the latest first, every ten seconds. Names follow vLLM's metrics.
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
#: How many points are kept: the points of an hour.
MAX_POINTS = 360
#: The most jobs that a sample names. These are the oldest jobs that the worker holds.
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
#: How long a silent worker is still listed. RQ keeps it as long, with the default --worker-ttl.
LISTED_S = 480.0
#: The most characters of a text in a worker's record.
MAX_TEXT_CHARS = 4096
#: The most entries of a list in a worker's record.
MAX_ENTRIES = 1000


def _number(value: object) -> float | None:
    """Read a number from 0 to 2**53, such as seconds or a share. Return None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1 << 53 else None


def _text(value: object) -> str | None:
    """Read a text that is fit to be shown. Return None for anything else."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not is_unicode(value):
        return None
    return printable(value)


def _texts(value: object) -> list[str] | None:
    """Read a list, and return its texts that are fit to be shown. Return None for a very long list, or no list."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        return None
    texts = [_text(entry) for entry in value]
    return [text for text in texts if text is not None]


def _counts(value: object) -> dict[str, int] | None:
    """Read counts by name. Return None for anything but a mapping, or for a very large one."""
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        return None
    counts: dict[str, int] = {}
    for name, number in value.items():
        shown = _text(name)
        checked = count(number)
        if shown is not None and checked is not None:
            counts[shown] = checked
    return counts


#: Reads a record's field by its type. None stands for a value that no worker writes.
_READ: Mapping[Any, Callable[[object], Any]] = {
    float: _number,
    int: count,
    str: _text,
    Sequence[str]: _texts,
    Mapping[str, int]: _counts,
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One moment of one worker. Counts are since its start.

    at: Unix seconds by the worker's clock. prompt_tokens: computed or cached. num_requests_running: sequences in the
    batch. kv_cache_usage: 0 to 1. jobs_held: claimed and not ended. rows: answered rows of files. depth: the waiting
    jobs of each of its queues, the most urgent queue first.
    ended, ended_badly, waited_ms, ran_ms: by queue, the jobs that ended here, how many of them did not finish, and how
    long all these jobs together have waited and run.
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
        """Return the fields as an object of JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the fields as JSON text."""
        return json.dumps(self.to_object(), separators=(",", ":"))

    @classmethod
    def from_object(cls, stored: Mapping[str, Any], **more: Any) -> Self:
        """Read a record. Producers may write records too, so a value of another type counts as missing.

        more: fields that no record has.
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
    """The state of a worker now.

    silent_s: the seconds since it wrote this sample, by Redis' clock. started_at: Unix seconds.
    state: "idle", "busy", "suspended", "restored" (see `RESTORED`), "draining" (it finishes what runs), "loading" (its
    model) or "stopped".
    models: all names by which jobs may ask for its model or for an adapter. adapters: the adapters' names.
    fingerprint, max_model_len: see ServedModel.
    clock_formats: see ServedModel, as one text (jobs.context.served_model.joined_formats).
    model_source: the folder or hub id from which its model was loaded. host, pid, memory_bytes: where its process
    runs, its id and its memory.
    format: the format of plans that it reads (FORMAT in jobs.common.keys).
    queues: the most urgent first. held: how many jobs it holds, by queue. held_jobs: the oldest of these jobs, at most
    MAX_HELD_NAMED. claimed: for each of its queues, how many jobs all workers have taken and not begun.
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
        """The seconds since it started: by its own clock until its last sample, and since then by Redis' clock."""
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
    """A worker in Redis.

    queues: the queues that it serves. registered: RQ's fields, safe to show; {} once the fields of a killed worker have
    expired. sample: the last sample that it wrote; None for RQ's own workers, which write no samples.
    """

    name: str
    queues: Sequence[str]
    registered: Mapping[str, str]
    sample: WorkerSample | None

    @property
    def is_silent(self) -> bool:
        """Whether the worker must be frozen, cut off or dead. RQ's own workers are never silent."""
        return self.sample is not None and self.sample.is_silent


def read_workers(connection: Redis, names: Sequence[str] | None = None) -> list[Worker]:
    """Return the workers that are registered or wrote a sample within LISTED_S. Raises RedisError.

    names: only these workers; all by default. RQ's lists of each queue's workers are not read, because producers would
    need rights to them.
    """
    names = worker_names(connection) if names is None else names
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(WORKER_PREFIX + name, _FIELDS)
            for key in (worker_key(name), loading_key(name)):
                pipe.get(key)
                pipe.pttl(key)
        # Producers may write to these keys too. So a reply may be an error. Then only that worker is left out.
        replies = iter(pipe.execute(raise_on_error=False))

    workers = []
    for name in names:
        # The replies come in the order of the commands above.
        registration = next(replies)
        record = next(replies)
        left_ms = next(replies)
        loading_record = next(replies)
        loading_left_ms = next(replies)
        registered: dict[str, bytes] = {}
        if isinstance(registration, list):
            fields_and_values = zip(_FIELDS, registration, strict=True)
            registered = {key: value for key, value in fields_and_values if value}
        loaded_sample = _sample(name, record, left_ms)
        loading_sample = _sample(name, loading_record, loading_left_ms)
        sample = _later(loaded_sample, loading_sample)
        is_sample_recent = sample is not None and sample.silent_s <= LISTED_S
        if registered or is_sample_recent:
            queues = text(registered["queues"]).split(",") if "queues" in registered else []
            shown = {key: safe_name(value) for key, value in registered.items()}
            workers.append(Worker(name, queues, shown, sample))
    return workers


def _sample(name: str, raw: Any, left_ms: Any) -> WorkerSample | None:
    """Return a worker's sample; None if it has none. left_ms: how long its key still lives, which shows its age."""
    record = json_object(raw)
    if not record:
        return None
    silent_s = 0.0
    if left_ms >= 0:  # negative if the key has no time to live
        silent_s = max(0.0, WORKER_STATS_TTL_S - left_ms / 1000)
    # A record calls "updated_at" what a WorkerSample calls "at".
    record["at"] = record.get("updated_at")
    return WorkerSample.from_object(record, name=name, silent_s=silent_s)


def _later(sample: WorkerSample | None, loading: WorkerSample | None) -> WorkerSample | None:
    """Return the later of a worker's two samples. A killed worker's sample stays while its successor loads a model."""
    if sample is None or loading is None:
        return sample or loading
    return loading if loading.silent_s < sample.silent_s else sample


def listening_on(workers: Iterable[Worker], queue: str) -> list[Worker]:
    """Return the workers that listen on a queue."""
    return [worker for worker in workers if queue in worker.queues]


def models_on(workers: Iterable[Worker], queue: str) -> set[str] | None:
    """Return the names of the models and adapters that a queue's workers serve; None if a worker does not say which."""
    models: set[str] = set()
    for worker in listening_on(workers, queue):
        if worker.sample is None:
            return None
        if not worker.is_silent:  # a killed worker's sample stays for minutes
            models.update(worker.sample.models)
    return models


def other_lengths(workers: Iterable[Worker], queue: str, pin: str) -> str:
    """Say which worker of a queue serves a pinned model with another length; "" if none does.

    pin: see PinnedModel.pin.
    """
    # The first line is `<fingerprint>/<length>`. Further lines name adapters.
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


def are_held(workers: Iterable[Worker]) -> bool:
    """Whether the workers claim nothing because Redis came back with older data."""
    return _is_any(RESTORED, workers)


def are_suspended(workers: Iterable[Worker]) -> bool:
    """Whether `rq suspend` holds all workers. A worker shows this state only once it has finished what it holds."""
    return _is_any(SUSPENDED, workers)


def _is_any(state: str, workers: Iterable[Worker]) -> bool:
    """Whether a worker that is not silent is in a state."""
    samples = [
        worker.sample for worker in workers if worker.sample is not None and not worker.is_silent
    ]
    return any(sample.state == state for sample in samples)


def claimed_jobs(workers: Iterable[Worker]) -> dict[str, int]:
    """Return how many jobs of each queue are taken and not begun, as the latest sample says."""
    samples = [worker.sample for worker in workers if worker.sample is not None]
    oldest_first = sorted(samples, key=lambda sample: -sample.silent_s)
    claimed: dict[str, int] = {}
    for sample in oldest_first:
        # A later sample replaces what an earlier one says of a queue.
        claimed.update(sample.claimed)
    return claimed


#: The fields that a worker writes to its `served_key`.
_SERVED = ("queues", "model", "models", "dtype", "max_model_len", "clock_formats")


def read_serving(connection: Redis, queue: str) -> list[WorkerSample]:
    """Return what a queue's living workers serve, from keys that only workers may write. Raises RedisError.

    The samples have only the fields of `served_text`.
    """
    names: Any = connection.zrange(fleet_key(queue), -MAX_ENTRIES, -1)
    if not names:
        return []
    served: Any = connection.mget([served_key(text(name)) for name in names])
    samples = [WorkerSample.from_object(json_object(raw)) for raw in served if raw is not None]
    return [sample for sample in samples if queue in sample.queues]


def served_text(facts: Mapping[str, Any]) -> str:
    """Return the text of a worker's `served_key`: some fields of its sample."""
    return json.dumps({name: facts[name] for name in _SERVED if name in facts})
