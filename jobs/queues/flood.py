"""Finds out whose jobs wait in a queue, and cancels the waiting jobs of one producer.

A job's producer is its run, or the text that its `meta` has under `producer`. No payload is read.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.display import safe_name
from jobs.runs.plans.names import run_and_shard

#: The most jobs whose producers are read. In a longer queue, these jobs are spread over its length.
MAX_READ = 10_000
_PAGE = 1000
#: How long cancelled jobs are kept, so that producers can see what became of them. RQ would keep them for ever.
_KEPT_S = 3600
#: A larger `meta` is not read.
_MAX_META_BYTES = 4096
#: Stands for the producer of a job that names none.
UNNAMED = "-"
#: The beginning of the name under which a run's jobs are counted.
RUN = "run "

#: Cancels the named jobs among the queue's entries from `first` to `last`, except jobs that a worker has taken. `first`
#: and `last` are negative, so they count from the queue's end. Each cancelled entry is first replaced by "". One LREM
#: then removes all entries that are "", because each LREM walks through the queue.
_TAKE = """
local waiting, cancelled = KEYS[1], KEYS[2]
local first, last, job_prefix, executions_prefix, moment, kept_s = unpack(ARGV, 1, 6)
local is_meant = {}
for i = 7, #ARGV do is_meant[ARGV[i]] = true end

local entries, taken = redis.call('LRANGE', waiting, first, last), 0
for i, id in ipairs(entries) do
  if is_meant[id] and redis.call('EXISTS', executions_prefix .. id) == 0 then
    redis.call('LSET', waiting, last - #entries + i, '')
    redis.call('HSET', job_prefix .. id, 'status', 'canceled')
    redis.call('EXPIRE', job_prefix .. id, kept_s)
    redis.call('ZADD', cancelled, moment, id)
    taken = taken + 1
  end
end
if taken > 0 then redis.call('LREM', waiting, -taken, '') end
return taken
"""


@dataclass(frozen=True)
class Producers:
    """How many waiting jobs of a queue each producer has.

    num_waiting: the number of waiting jobs. num_read: the number of jobs whose producer was read. num_jobs: how many of
    these jobs each producer has, the largest number first.
    """

    num_waiting: int
    num_read: int
    num_jobs: Mapping[str, int]

    @property
    def is_sample(self) -> bool:
        """Whether some waiting jobs were not read, so that `estimate` is not exact."""
        return self.num_read < self.num_waiting

    def estimate(self, producer: str) -> int:
        """Estimate how many of all waiting jobs belong to a producer."""
        return round(self.num_jobs[producer] * self.num_waiting / max(1, self.num_read))


def read_producers(connection: Redis, queue: str) -> Producers:
    """Return whose jobs wait in a queue. At most MAX_READ jobs are read. Raises RedisError."""
    key = rq_jobs.QueueKeys(queue).waiting
    num_waiting: Any = connection.llen(key)
    num_pages = min(MAX_READ // _PAGE, math.ceil(num_waiting / _PAGE))
    counts: Counter[str] = Counter()
    for page in range(num_pages):
        # The pages are spread evenly over the queue. In a queue longer than MAX_READ, jobs between pages are not read.
        first = page * num_waiting // num_pages
        first_of_next_page = (page + 1) * num_waiting // num_pages
        last = min(first_of_next_page, first + _PAGE) - 1
        entries: Any = connection.lrange(key, first, last)
        job_ids = list(map(stored.text, entries))
        counts.update(_producers(connection, job_ids))
    return Producers(num_waiting, counts.total(), dict(counts.most_common()))


def _producers(connection: Redis, job_ids: Sequence[str]) -> list[str]:
    """Return the producer of each job, safe to show."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hstrlen(rq_jobs.job_key(job_id), "meta")
        # A producer may have written a value of another type to a job's key. Then only that job counts as unnamed.
        meta_sizes: list[Any] = pipe.execute(raise_on_error=False)
        readable_flags = [type(size) is int and 0 < size <= _MAX_META_BYTES for size in meta_sizes]
        for job_id, is_readable in zip(job_ids, readable_flags, strict=True):
            if is_readable:
                pipe.hget(rq_jobs.job_key(job_id), "meta")
        metas = iter(pipe.execute(raise_on_error=False))

    producers = []
    for job_id, is_readable in zip(job_ids, readable_flags, strict=True):
        producer = UNNAMED
        if is_readable:
            meta = stored.json_object(next(metas))
            producer = named_producer(meta) or UNNAMED
        run_shard = run_and_shard(job_id)
        if run_shard is not None:
            run, _shard = run_shard
            producer = f"{RUN}{run}"
        producers.append(producer)
    return producers


def named_producer(meta: Mapping[str, Any]) -> str:
    """Return the producer that a job's `meta` names, safe to show; "" if it names none."""
    producer = meta.get("producer")
    return safe_name(producer) if isinstance(producer, str) else ""


def cancel_waiting(connection: Redis, queue: str, producer: str) -> int:
    """Cancel the waiting jobs of a producer, the last ones first; return their number. Raises RedisError.

    Jobs that a worker takes meanwhile go on. Jobs that depend on a cancelled job still wait, as they do in RQ itself.
    Cancelled jobs are deleted an hour later. Only the workers' Redis user may run the script that cancels jobs.
    """
    keys = rq_jobs.QueueKeys(queue)
    take = connection.register_script(_TAKE)
    job_prefix = rq_jobs.job_key("")
    executions_prefix = rq_jobs.executions_key("")
    length: Any = connection.llen(keys.waiting)
    num_passed = 0  # jobs of other producers, which stay at the queue's end
    num_cancelled = 0
    while num_passed + num_cancelled < length:
        # Positions counted from the queue's end: -1 is the last job.
        first = -num_passed - _PAGE
        last = -num_passed - 1
        entries: Any = connection.lrange(keys.waiting, first, last)
        if not entries:
            break
        job_ids = list(map(stored.text, entries))
        producer_of_each = _producers(connection, job_ids)
        # The arguments of the script: six values, and then the ids of the jobs to cancel.
        args: list[Any] = [first, last, job_prefix, executions_prefix, time.time(), _KEPT_S]
        for job_id, producer_of_job in zip(job_ids, producer_of_each, strict=True):
            if producer_of_job == producer:
                args.append(job_id)
        num_taken: int = take(keys=[keys.waiting, keys.cancelled], args=args)
        num_cancelled += num_taken
        num_passed += len(job_ids) - num_taken
    return num_cancelled
