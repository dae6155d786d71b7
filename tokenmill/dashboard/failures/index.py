"""Remembers what each failed job failed with, so that a page need not read a hundred thousand errors."""

import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from jobs.common import rq_jobs, stored
from jobs.common.rq_jobs import JobStatus
from tokenmill.dashboard.failures.groups import Cause, Group, Job, Remedy, cause_of

#: Jobs that are read in one round trip.
CHUNK = 100
#: Seconds for which a thread reads on behind a page. A page asks for itself again every two seconds.
READ_ON_S = 3.0
#: The most failed jobs that are remembered; of more, the newest of each queue.
MAX_JOBS = 200_000
#: After a sweep, nothing is read for this many times the seconds that it took.
REST = 4.0


@dataclass(frozen=True)
class GroupSeen:
    """A group as a page shows it.

    first_at, last_at: when its jobs ended, in Unix seconds. sample: its newest job. message: what that job failed with.
    """

    cause: Cause
    num_jobs: int
    first_at: float | None
    last_at: float | None
    sample: Job
    message: str


class FailureIndex:
    """Groups the failed jobs of all queues by their cause. Safe to call from many threads.

    It walks through the queues' registries, chunk by chunk, as far as it is given time for, and reads only jobs that it
    does not know. A sweep that has come to the end also finds out which jobs are gone.
    """

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[Job, tuple[float, str]] = {}
        self._groups: dict[Job, Group] = {}
        self._sweep: Iterator[None] | None = None
        self._sweep_s = 0.0
        self._rests_until = float("-inf")
        self._reader = threading.Thread()
        self._is_closed = threading.Event()
        self.is_whole = False

    @property
    def num_jobs(self) -> int:
        """Return how many jobs have been read so far."""
        return len(self._known)

    def advance(self, queues: Sequence[str], seconds: float) -> None:
        """Read on for some time. If there is more, a thread reads on for as long as pages are asked for.

        queues: those with failed jobs. Raises RedisError.
        """
        until = self._clock() + seconds
        is_more = True
        while is_more and self._clock() < until:
            is_more = self._step(queues)
        self._name_groups()
        if is_more and not self._reader.is_alive():
            self._reader = threading.Thread(
                target=self._read_on, args=(list(queues),), name="tokenmill-failures", daemon=True
            )
            self._reader.start()

    def _name_groups(self) -> None:
        """Read the newest job of each group again whose message went with the job that was newest before."""
        unnamed: dict[str, list[str]] = {}  # jobs by queue
        with self._lock:
            nameless = [group for group in self._groups.values() if not group.message_job]
            for group in nameless[:CHUNK]:
                _, (queue, job_id) = group.newest_first()[0]
                unnamed.setdefault(queue, []).append(job_id)
                _, key = self._known[queue, job_id]
                self._known[queue, job_id] = (float("-inf"), key)  # so it counts as changed
        for queue, job_ids in unnamed.items():
            self.look_at(queue, job_ids)

    def _read_on(self, queues: Sequence[str]) -> None:
        """Read until the next page is asked for, with rests as long as the reading. Others need the processor too."""
        until = self._clock() + READ_ON_S
        is_more = True
        while is_more and self._clock() < until:
            began = self._clock()
            try:
                is_more = self._step(queues)
            except RedisError:
                break  # the next page says it
            if self._is_closed.wait(self._clock() - began):
                break

    def close(self) -> None:
        """End the thread that reads on."""
        self._is_closed.set()
        if self._reader.is_alive():
            self._reader.join()

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
        present: set[Job] = set()
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

    def _see(self, queue: str, entries: Sequence[tuple[str, float]], present: set[Job]) -> None:
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
        group = self._groups.setdefault((queue, cause.key), Group(queue, cause))
        group.add(job_id, stored.moment(ended_at), cause.message)
        self._known[queue, job_id] = (score, cause.key)

    def _remove(self, queue: str, job_id: str) -> None:
        known = self._known.pop((queue, job_id), None)
        if known is None:
            return
        group = self._groups[queue, known[1]]
        group.remove(job_id)
        if not group.jobs:
            del self._groups[queue, known[1]]

    def _drop_gone(self, jobs: Sequence[Job]) -> None:
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
        with self._lock:
            by_cause: dict[str, list[Group]] = {}
            for group in self._groups.values():
                messages = f"{group.cause.folded}\n{group.cause.kind}: {group.message}"
                words = f"{group.cause.kind}: {messages}"
                if queue in ("", group.queue) and text.lower() in words.lower():
                    by_cause.setdefault(group.cause.key, []).append(group)
            shown = [_seen(groups) for groups in by_cause.values()]
        shown.sort(key=lambda seen: (-seen.num_jobs, -(seen.last_at or 0.0)))
        return shown

    def newest(
        self, first: int, most: int, queue: str, keys: Collection[str] | None
    ) -> list[tuple[float, Job]]:
        """Return at most `most` jobs behind the first ones, those that ended last first.

        Each job stands behind the time at which it ended, in Unix seconds. The time is 0 if it is unknown.
        queue: only jobs of this queue, unless it is "". keys: only jobs of these groups; of all if it is None.
        """
        with self._lock:
            chosen = [
                group.newest_first()
                for (name, key), group in self._groups.items()
                if queue in ("", name) and (keys is None or key in keys)
            ]
        merged = heapq.merge(*chosen, key=lambda entry: -entry[0])
        return list(islice(merged, first, first + most))

    def jobs_of(self, queue: str = "", group: str = "") -> list[Job]:
        """Return all jobs of a group, or of all groups, as pairs of queue and id, the oldest first."""
        with self._lock:
            jobs = [
                (score, job)
                for job, (score, key) in self._known.items()
                if group in ("", key) and queue in ("", job[0])
            ]
        return [job for _, job in sorted(jobs)]

    def remedy(self, queue: str, job_id: str) -> Remedy:
        """Return whether trying a job again can help."""
        with self._lock:
            known = self._known.get((queue, job_id))
            return Remedy.UNKNOWN if known is None else self._groups[queue, known[1]].cause.remedy


def _seen(groups: Sequence[Group]) -> GroupSeen:
    """Return the groups of several queues with one cause as one."""
    newest_group = max(groups, key=lambda group: group.newest_first()[0][0])
    newest_at, sample = newest_group.newest_first()[0]
    oldest = [
        next((at for at, _ in reversed(group.newest_first()) if at), None) for group in groups
    ]
    oldest_at = min((at for at in oldest if at is not None), default=None)
    return GroupSeen(
        groups[0].cause,
        sum(len(group.jobs) for group in groups),
        oldest_at,
        newest_at or None,
        sample,
        newest_group.message,
    )
