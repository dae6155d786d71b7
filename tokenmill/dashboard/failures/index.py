"""Remembers what each failed job failed with, so that a page need not read a hundred thousand errors."""

import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import rq_jobs, stored
from jobs.common.rq_jobs import JobStatus
from tokenmill.dashboard.failures.groups import Cause, Group, Remedy, cause_of

#: Jobs that are read in one round trip.
CHUNK = 250
#: The most failed jobs that are remembered; of more, the newest of each queue.
MAX_JOBS = 200_000
#: After a sweep, nothing is read for this many times the seconds that it took.
REST = 4.0


@dataclass(frozen=True)
class GroupSeen:
    """A group as a page shows it. first_at, last_at: when its jobs ended, in Unix seconds. sample: its newest job."""

    cause: Cause
    num_jobs: int
    first_at: float | None
    last_at: float | None
    sample: tuple[str, str]


class FailureIndex:
    """Groups the failed jobs of all queues by their cause. Safe to call from many threads.

    It walks through the queues' registries, chunk by chunk, as far as it is given time for, and reads only jobs that it
    does not know. A sweep that has come to the end also finds out which jobs are gone.
    """

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, str]] = {}
        self._groups: dict[str, Group] = {}
        self._sweep: Iterator[None] | None = None
        self._sweep_s = 0.0
        self._rests_until = float("-inf")
        self.is_whole = False

    @property
    def num_jobs(self) -> int:
        """Return how many jobs have been read so far."""
        return len(self._known)

    def advance(self, queues: Sequence[str], seconds: float) -> None:
        """Read on for some time. queues: those with failed jobs. Raises RedisError."""
        until = self._clock() + seconds
        while self._clock() < until:
            if not self._step(queues):
                break

    def finish(self, queues: Sequence[str], tell: Callable[[int], None]) -> None:
        """Read until each job is known. tell: is told how many are known so far. Raises RedisError."""
        self._rests_until = float("-inf")
        while self._step(queues):
            tell(self.num_jobs)

    def _step(self, queues: Sequence[str]) -> bool:
        """Read one chunk. Returns False at the end of a sweep, and while it rests."""
        with self._lock:
            began = self._clock()
            if self._sweep is None:
                if began < self._rests_until:
                    return False
                self._sweep = self._walk(list(queues))
                self._sweep_s = 0.0
            sweep = self._sweep
            try:
                next(sweep)
            except StopIteration:
                self.is_whole = True
                self._sweep = None
            except BaseException:
                self._sweep = None
                raise
            ended = self._clock()
            self._sweep_s += ended - began
            if self._sweep is None:
                self._rests_until = ended + REST * self._sweep_s
        return self._sweep is not None

    def _walk(self, queues: Sequence[str]) -> Iterator[None]:
        """Look at each failed job once, the newest of each queue first. Stops after each chunk."""
        most = MAX_JOBS // max(1, len(queues))
        present: set[tuple[str, str]] = set()
        for queue in queues:
            failed = rq_jobs.QueueKeys(queue).failed
            for rank in range(0, most, CHUNK):
                entries: Any = self._connection.zrevrange(
                    failed, rank, rank + CHUNK - 1, withscores=True
                )
                if not entries:
                    break
                self._see(queue, [(stored.text(entry), score) for entry, score in entries], present)
                yield

        absent = [job for job in self._known if job not in present]
        for start in range(0, len(absent), CHUNK):
            # A job that ended amid the sweep has moved the others, so that it may have passed over one.
            self._drop_gone(absent[start : start + CHUNK])
            yield

    def _see(
        self, queue: str, entries: Sequence[tuple[str, float]], present: set[tuple[str, str]]
    ) -> None:
        unknown = []
        for job_id, score in entries:
            job = (queue, job_id)
            present.add(job)
            known = self._known.get(job)
            if known is None or known[0] != score:
                unknown.append((job_id, score))
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id, _ in unknown:
                pipe.hmget(rq_jobs.job_key(job_id), "ended_at", "status")
                pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
            # Anybody may have put another kind of value there.
            replies = iter(pipe.execute(raise_on_error=False))
        for job_id, score in unknown:
            fields = next(replies)
            results = next(replies)
            ended_at, status = fields if isinstance(fields, list) else (None, None)
            error = (
                rq_jobs.error_text(results[0][1]) if isinstance(results, list) and results else ""
            )
            is_stopped = rq_jobs.job_status(status) is JobStatus.STOPPED
            self._add(queue, job_id, score, cause_of(error, is_stopped=is_stopped), ended_at)

    def _add(self, queue: str, job_id: str, score: float, cause: Cause, ended_at: Any) -> None:
        self._remove(queue, job_id)
        group = self._groups.setdefault(cause.key, Group(cause))
        group.add(queue, job_id, stored.moment(ended_at))
        self._known[queue, job_id] = (score, cause.key)

    def _remove(self, queue: str, job_id: str) -> None:
        known = self._known.pop((queue, job_id), None)
        if known is None:
            return
        group = self._groups[known[1]]
        del group.jobs[queue, job_id]
        if not group.jobs:
            del self._groups[known[1]]

    def _drop_gone(self, jobs: Sequence[tuple[str, str]]) -> None:
        with self._connection.pipeline(transaction=False) as pipe:
            for queue, job_id in jobs:
                pipe.zscore(rq_jobs.QueueKeys(queue).failed, job_id)
            scores = pipe.execute(raise_on_error=False)
        for (queue, job_id), score in zip(jobs, scores, strict=True):
            if not isinstance(score, float):
                self._remove(queue, job_id)

    def look_at(self, queue: str, job_ids: Sequence[str]) -> None:
        """Read some jobs of a queue at once, if they are among its failed ones. Raises RedisError."""
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.zscore(rq_jobs.QueueKeys(queue).failed, job_id)
            scores = pipe.execute(raise_on_error=False)
        entries = []
        for job_id, score in zip(job_ids, scores, strict=True):
            if isinstance(score, float):
                entries.append((job_id, score))
        with self._lock:
            self._see(queue, entries, set())

    def forget(self, queue: str, job_ids: Sequence[str]) -> None:
        """Forget jobs that are failed no more."""
        with self._lock:
            for job_id in job_ids:
                self._remove(queue, job_id)

    def groups(self, queue: str = "", text: str = "") -> list[GroupSeen]:
        """Return the groups, those with most jobs first.

        queue: only jobs of this queue; all by default. text: only groups whose error has it, in any case of letters.
        """
        shown = []
        with self._lock:
            for group in self._groups.values():
                cause = group.cause
                if text.lower() not in f"{cause.kind}: {cause.folded}".lower():
                    continue
                jobs = group.within(queue)
                if not jobs:
                    continue
                times = [ended_at for ended_at in jobs.values() if ended_at is not None]
                newest = max(jobs, key=lambda job: jobs[job] or 0.0)
                shown.append(
                    GroupSeen(
                        cause, len(jobs), min(times, default=None), max(times, default=None), newest
                    )
                )
        shown.sort(key=lambda seen: (-seen.num_jobs, -(seen.last_at or 0.0)))
        return shown

    def newest(
        self, first: int, most: int, queue: str, keys: Collection[str] | None
    ) -> list[tuple[str, str]]:
        """Return jobs as pairs of queue and id, those that ended last first, without the first ones.

        queue: only jobs of this queue, unless it is "". keys: only jobs of these groups; of all if it is None.
        """
        with self._lock:
            chosen = [group for key, group in self._groups.items() if keys is None or key in keys]
            entries = [
                (ended_at or 0.0, job)
                for each in chosen
                for job, ended_at in each.within(queue).items()
            ]
        return [job for _, job in heapq.nlargest(first + most, entries)[first:]]

    def jobs_of(self, queue: str = "", group: str = "") -> list[tuple[str, str]]:
        """Return all jobs of a group, or of all groups, as pairs of queue and id, the oldest first."""
        with self._lock:
            jobs = [
                (score, job)
                for job, (score, key) in self._known.items()
                if group in ("", key) and queue in ("", job[0])
            ]
        return [job for _, job in sorted(jobs)]

    def cause(self, group: str) -> Cause | None:
        """Return a group's cause; None if it has no jobs any more."""
        with self._lock:
            found = self._groups.get(group)
            return None if found is None else found.cause

    def remedy(self, queue: str, job_id: str) -> Remedy:
        """Return whether trying a job again can help."""
        with self._lock:
            known = self._known.get((queue, job_id))
            return Remedy.UNKNOWN if known is None else self._groups[known[1]].cause.remedy
