"""Enqueues jobs and names RQ's keys. In `jobs`, only this module imports rq.

RQ's keys are read directly, for two reasons. RQ's own accessors also clean up, which only workers should do. They also
unpack data of any size, which any producer may have written.
"""

import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from redis import Redis
from rq import Queue, registry
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.defaults import UNSERIALIZABLE_RETURN_VALUE_PAYLOAD
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.job import JobStatus as JobStatus
from rq.job import Retry as Retry
from rq.rate_limit import RateLimitRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import now, utcformat
from rq.worker.base import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS

from jobs.common import stored
from jobs.common.keys import RQ
from jobs.common.keys import executions_key as executions_key

#: The key of a set: the keys of all queues.
QUEUES_KEY = Queue.redis_queues_keys
#: The beginning of a queue's key.
QUEUE_PREFIX = Queue.redis_queue_namespace_prefix
#: The key of a set: the keys of all workers.
WORKERS_KEY = REDIS_WORKER_KEYS
#: The beginning of a worker's key.
WORKER_PREFIX = BaseWorker.redis_worker_namespace_prefix

#: While this key is set, no worker claims anything.
SUSPENDED_KEY = WORKERS_SUSPENDED

RATE_LIMITS_KEY = RateLimitRegistry.rl_keys_key
JOB_PREFIX = Job.redis_job_namespace_prefix
#: How a job ended, in the entries of `results_key`.
ResultType = Result.Type
#: What stands in an entry of `results_key` for a value that JSON cannot hold.
NO_JSON_VALUE = UNSERIALIZABLE_RETURN_VALUE_PAYLOAD


class QueueKeys:
    """The keys of a queue.

    waiting: a list of the ids of waiting jobs. popped: a list of the ids of jobs that RQ's own workers are taking off
    the queue. All other keys are sorted sets. `started` holds `<job>:<execution>`; the other sets hold job ids.
    """

    def __init__(self, name: str) -> None:
        self.waiting = f"{QUEUE_PREFIX}{name}"
        self.popped = IntermediateQueue.get_intermediate_queue_key(self.waiting)
        self.started = registry.StartedJobRegistry.key_template.format(name)
        self.finished = registry.FinishedJobRegistry.key_template.format(name)
        self.failed = registry.FailedJobRegistry.key_template.format(name)
        self.deferred = registry.DeferredJobRegistry.key_template.format(name)
        self.ready = registry.ReadyJobRegistry.key_template.format(name)
        self.scheduled = registry.ScheduledJobRegistry.key_template.format(name)
        self.cancelled = registry.CanceledJobRegistry.key_template.format(name)


def job_key(job_id: str) -> str:
    """Return the key of a job's hash."""
    return Job.key_for(job_id)


def relatives_keys(job_id: str) -> tuple[str, str]:
    """Return the keys of a job's dependents and of its dependencies."""
    return Job.dependents_key_for(job_id), f"{JOB_PREFIX}:{job_id}:dependencies"


def dependency_ids(connection: Redis, job_id: str) -> list[str]:
    """Return the ids of the jobs that a job depends on."""
    raw: Any = connection.hget(job_key(job_id), "dependency_ids")
    ids: list[str] = json.loads(raw or b"[]")
    return ids


def execution_key(job_id: str, execution_id: str) -> str:
    """Return the key of an execution's hash."""
    return f"{RQ}:execution:{job_id}:{execution_id}"


def rate_limit_key(limit: str) -> str:
    """Return the key of a rate limit's hash, which says how many jobs with this limit may be queued or run at once."""
    return f"{RQ}:rl:{limit}"


def rate_limited_key(limit: str) -> str:
    """Return the key of the jobs that wait because of a rate limit."""
    return f"{rate_limit_key(limit)}:rate_limited"


def results_key(job_id: str) -> str:
    """Return the key of the stream of a job's results."""
    return f"{RQ}:results:{job_id}"


def result_type(entry: Mapping[bytes, bytes]) -> ResultType | None:
    """Return how a job ended, as an entry of its results says; None if the entry does not say it."""
    for kind in ResultType:
        if b"%d" % kind.value == entry.get(b"type"):
            return kind
    return None


def command_channel(worker: str) -> str:
    """Return the channel on which a worker takes commands."""
    return PUBSUB_CHANNEL_TEMPLATE % worker


def job_status(raw: object) -> JobStatus | None:
    """Read a stored status. Return None for anything else."""
    for status in JobStatus:
        if status.encode() == raw:
            return status
    return None


def time_text() -> str:
    """Return the present time as RQ writes it."""
    return utcformat(now())


def job_queue(connection: Redis, name: str) -> Queue:
    """Return RQ's queue of this name, for jobs whose payload is JSON. This may ask Redis for its version."""
    return Queue(name, connection=connection, serializer=JSONSerializer)


#: Describes a job that is enqueued together with others.
prepared_job = Queue.prepare_data
#: The most bytes of an error's text after unpacking. A worker writes far less.
MAX_ERROR_BYTES = 1 << 20


def error_text(entry: Mapping[bytes, bytes]) -> str:
    """Return the traceback in an entry of a job's results; "" if there is none."""
    packed = _decoded(entry, b"exc_string")
    traceback = stored.unpack_at_most(packed, MAX_ERROR_BYTES)
    return "" if traceback is None else stored.text(traceback)


def last_value(connection: Redis, job_id: str) -> dict[str, Any]:
    """Return the JSON object that a job returned last; {} if it returned no such object."""
    return stored.json_object(last_result(connection, job_id))


def last_result(connection: Redis, job_id: str) -> bytes:
    """Return the JSON of the value that a job returned last; b"" if there is none. The JSON may have any size."""
    return _decoded(last_entry(connection, job_id), b"return_value")


def last_entry(connection: Redis, job_id: str) -> Mapping[bytes, bytes]:
    """Return the last entry of a job's results; {} if there is none."""
    entries: Any = connection.xrevrange(results_key(job_id), count=1)
    if not entries:
        return {}
    _, last = entries[0]
    return last  # type: ignore[no-any-return]


def _decoded(entry: Mapping[bytes, bytes], field: bytes) -> bytes:
    """Return the bytes in a field of an entry; b"" if the field is missing or damaged."""
    try:
        return b64decode(entry.get(field) or b"")
    except ValueError:
        return b""
