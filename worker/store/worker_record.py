"""A worker's record in Redis, its name and its leases."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.utils import utcparse

from jobs.common.display import safe_name
from jobs.common.keys import (
    FAR_S,
    RQ,
    SILENT_S,
    WORKER_STATS_TTL_S,
    fleet_key,
    held_key,
    loading_key,
    samples_key,
    served_key,
    worker_key,
)
from jobs.common.redis_info import is_full
from jobs.common.release import commit
from jobs.common.rq_jobs import WORKER_PREFIX, WORKERS_KEY, execution_key
from jobs.common.stored import text
from jobs.common.workers import LOADING, MAX_POINTS, Point, served_text

_REGISTRIES = {
    "started": "wip",
    "finished": "finished",
    "failed": "failed",
    "deferred": "deferred",
    "scheduled": "scheduled",
}
"""For each status, the name of the registry in RQ's keys."""


def process_facts() -> dict[str, Any]:
    """Return facts about this process: where it runs, and which version it is."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version("tokenmill"),
        "commit": commit(),
    }


def resident_bytes() -> int:
    """Return the bytes of memory that this process has now; 0 if that is not known."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
        num_pages = int(fields[1])  # the second field is the resident memory
    except (OSError, ValueError, IndexError):
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def shown_loading(
    client: Redis, worker_name: str, queue_names: Sequence[str], model: str, source: str
) -> Iterator[None]:
    """Context in which Redis shows that a worker loads its model. source: the model's folder or hub id."""
    key = loading_key(worker_name)
    member = f"{WORKER_PREFIX}{worker_name}"
    began_at = time.time()
    facts = {
        "worker": worker_name,
        "state": LOADING,
        "model": model,
        "model_source": source,
        **process_facts(),
        "queues": list(queue_names),
        "started_at": began_at,
        "updated_at": began_at,
    }

    with client.pipeline(transaction=False) as pipe:
        pipe.sadd(WORKERS_KEY, member)
        pipe.set(key, json.dumps(facts), ex=WORKER_STATS_TTL_S)
        pipe.execute(raise_on_error=False)

    try:
        yield
    finally:
        with suppress(RedisError):
            # A worker that has ended without serving is removed from the list of workers.
            if client.delete(key) and not client.exists(worker_key(worker_name)):
                client.srem(WORKERS_KEY, member)


def living_namesake(client: Redis, worker_name: str, hostname: str) -> str:
    """Return the living worker that already has this name, such as "process 7 on host gpu1"; "" if there is none.

    A killed worker leaves its name behind for minutes. So a worker of this machine counts as living on two conditions:
    it wrote something in the last SILENT_S seconds, and a process has its process id. This process does not count,
    because in a restarted container it may have got the killed worker's process id. Raises RedisError.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.hmget(f"{WORKER_PREFIX}{worker_name}", "hostname", "pid", "death")
        pipe.exists(served_key(worker_name))
        worker_fields, has_written_lately = pipe.execute()
    host_field, pid_field, death = worker_fields
    if host_field is None or death is not None:
        return ""

    host = host_field.decode(errors="replace")
    pid_text = (pid_field or b"").decode(errors="replace")
    is_here = host == hostname
    may_live = has_written_lately and _is_other_process(pid_text)
    if is_here and not may_live:
        return ""
    return safe_name(f"process {pid_text} on host {host}")


def successor(client: Redis, worker_name: str, birth: datetime) -> str:
    """Return the process that took a worker's name later, such as "process 7 on host gpu1"; "" if there is none.

    birth: when the worker itself began. An older process does not count, because a failover or a backup may bring its
    entry back. Raises RedisError.
    """
    fields: Any = client.hmget(f"{WORKER_PREFIX}{worker_name}", "hostname", "pid", "birth")
    host, pid, registered_birth = [text(field or b"") for field in fields]
    try:
        is_younger = utcparse(registered_birth) > birth
    except ValueError:
        return ""
    return safe_name(f"process {pid} on host {host}") if is_younger else ""


def end_leases_of(client: Redis, worker_name: str, queue_names: Sequence[str]) -> int:
    """End the leases of a dead worker, so that other workers take up its jobs soon. Returns the number of these leases.

    If that worker lives after all, it renews its leases, or finds that it has lost the jobs. No job ends twice. Raises
    RedisError.
    """
    with client.pipeline(transaction=False) as pipe:  # used for three round trips
        for name in queue_names:
            pipe.hkeys(held_key(name))
        # Somebody may have put another kind of value at a key. Then the reply is an error, and this key is left out.
        replies = pipe.execute(raise_on_error=False)
        members_by_queue = [reply for reply in replies if isinstance(reply, list)]

        keys = []
        for member in chain(*members_by_queue):
            job_id, _, execution_id = text(member).rpartition(":")
            key = execution_key(job_id, execution_id)
            keys.append(key)
            pipe.hget(key, "worker_name")
        holders = pipe.execute(raise_on_error=False)

        num_ended = 0
        for key, holder in zip(keys, holders, strict=True):
            if holder == worker_name.encode():
                pipe.delete(key)
                num_ended += 1
        pipe.execute()
    return num_ended


def _is_other_process(pid_text: str) -> bool:
    """Whether another process of this machine has this id and still runs."""
    is_number = pid_text.isascii() and pid_text.isdigit()
    if not is_number or int(pid_text) == os.getpid():
        return False
    try:
        os.kill(int(pid_text), 0)  # sends nothing, but fails if there is no such process
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # there is such a process, of another user
    return not _is_zombie(int(pid_text))


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended, but its parent has not read its exit status; False if that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # The state comes after the program's name, which stands in parentheses and may hold any character.
    _, _, state_and_more = stat.rpartition(")")
    return state_and_more.lstrip().startswith("Z")


class WorkerRecord:
    """Writes a worker's record to Redis: RQ's worker hash, our statistics, and the points of the last hour."""

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        queue_names: Sequence[str],
        beat: Callable[[Redis, str, str | None], None],
        facts: Mapping[str, Any],
        clock: Callable[[], float] = time.time,
        *,
        changing_facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Make the record of a worker.

        beat: writes RQ's worker hash. facts: values that never change. changing_facts: returns values that may change.
        clock: returns Unix seconds by Redis' clock.
        """
        self._changing_facts = changing_facts
        self._clock = clock
        self._client = client
        self._beat = beat
        self._name = worker_name
        self._queue_names = queue_names
        self._key = worker_key(worker_name)
        self._points_key = samples_key(worker_name)
        self._facts = {**facts, "queues": list(queue_names), "started_at": time.time()}
        self._has_written = False

    def count(self) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
        """Return the number of jobs by queue and status, and the number of workers that serve each queue."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in self._queue_names:
                pipe.llen(f"{RQ}:queue:{name}")
                for registry in _REGISTRIES.values():
                    pipe.zcard(f"{RQ}:{registry}:{name}")
                pipe.hlen(held_key(name))
                # When a claimed job begins, it gets a score FAR_S in the future. No other job has such a score.
                pipe.zcount(f"{RQ}:wip:{name}", self._clock() + FAR_S / 2, "+inf")
                pipe.zcount(fleet_key(name), self._clock() - SILENT_S, "+inf")
            replies = iter(pipe.execute())  # read below in the order of the commands above

        jobs: dict[str, dict[str, int]] = {}
        workers: dict[str, int] = {}
        for name in self._queue_names:
            jobs[name] = {}
            for status in ("queued", *_REGISTRIES):
                jobs[name][status] = int(next(replies))
            num_held = int(next(replies))
            num_begun = int(next(replies))
            jobs[name]["claimed"] = max(0, num_held - num_begun)
            workers[name] = int(next(replies))
        return jobs, workers

    def show(
        self, state: str, job_id: str | None, counters: Mapping[str, Any], point: Point
    ) -> None:
        """Write the heartbeat, the state, one running job, and the statistics. Redis keeps the statistics for an hour.

        A full Redis refuses these writes. But it lets the worker prolong the time to live of the earlier record. So the
        worker does not count as silent.
        """
        try:
            self._write(state, job_id, counters, point)
            self._has_written = True
        except RedisError as error:
            # Until this worker has written, the keys may hold what a killed worker with this name wrote.
            if is_full(error) and self._has_written:
                self._client.expire(self._key, WORKER_STATS_TTL_S)
                self._client.expire(served_key(self._name), SILENT_S)
            raise

    def _write(
        self, state: str, job_id: str | None, counters: Mapping[str, Any], point: Point
    ) -> None:
        """Write the arguments of `show` to Redis. Raises RedisError."""
        self._beat(self._client, state, job_id)
        moment = self._clock()
        facts = {**self._facts, **self._changing_facts()}
        with self._client.pipeline(transaction=False) as pipe:
            for name in self._queue_names:
                pipe.zadd(fleet_key(name), {self._name: moment})
                pipe.zremrangebyscore(fleet_key(name), "-inf", moment - WORKER_STATS_TTL_S)
                pipe.expire(fleet_key(name), WORKER_STATS_TTL_S)
            pipe.set(served_key(self._name), served_text(facts), ex=SILENT_S)
            pipe.execute()
        stats = {
            **facts,
            "state": state,
            **point.to_object(),
            **counters,
            "memory_bytes": resident_bytes(),
            "updated_at": point.at,
        }
        self._client.set(self._key, json.dumps(stats), ex=WORKER_STATS_TTL_S)

    def add_point(self, point: Point) -> None:
        """Add a point to the points of the last hour."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.lpush(self._points_key, point.to_text())
            pipe.ltrim(self._points_key, 0, MAX_POINTS - 1)
            pipe.expire(self._points_key, WORKER_STATS_TTL_S)
            pipe.execute()
