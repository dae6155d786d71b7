"""Remembers why each failed job failed, so that a page need not read a hundred thousand errors."""

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

#: The most jobs that are read in one round trip.
CHUNK = 100
#: The seconds for which a thread reads on after a page was answered. An open page updates itself every two seconds.
READ_ON_S = 3.0
#: The most failed jobs that are remembered. If there are more, the newest jobs of each queue are remembered.
MAX_JOBS = 200_000
#: The rest after a sweep, as a multiple of the time that the sweep took.
REST = 4.0


@dataclass(frozen=True)
class GroupSeen:
    """The failed jobs of all queues that have one cause, as a page shows them.

    first_at, last_at: when the earliest and the latest job ended, in Unix seconds; None if that is not known.
    sample: the newest job. message: the message of its error.
    """

    cause: Cause
    num_jobs: int
    first_at: float | None
    last_at: float | None
    sample: Job
    message: str


class FailureIndex:
    """Groups the failed jobs of all queues by their cause. Safe to call from many threads.

    A sweep goes through the failed jobs of all queues, chunk by chunk, and reads only jobs that are not known yet. At
    its end, it forgets jobs that are gone. Each call of `advance` or `finish` carries the sweep some chunks further.

    is_whole: whether a sweep has come to its end. clock: monotonic seconds.
    """

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        #: By job: its score among the failed jobs, and the key of its cause.
        self._known: dict[Job, tuple[float, str]] = {}
        #: The groups by queue and key of the cause.
        self._groups: dict[tuple[str, str], Group] = {}
        #: The sweep that is under way, and the seconds that its chunks have taken.
        self._sweep: Iterator[None] | None = None
        self._sweep_s = 0.0
        #: When the rest after the last sweep ends.
        self._rest_ends_at = float("-inf")
        self._reader = threading.Thread()
        self._is_closed = threading.Event()
        self.is_whole = False

    @property
    def num_jobs(self) -> int:
        """Return how many jobs are known."""
        return len(self._known)

    def advance(self, queues: Sequence[str], seconds: float) -> None:
        """Read for some seconds. If there is more to read, start a thread that reads on for READ_ON_S.

        queues: the queues that have failed jobs. Raises RedisError.
        """
        end = self._clock() + seconds
        has_more = True
        while has_more and self._clock() < end:
            has_more = self._step(queues)
        self._read_messages()
        if has_more and not self._reader.is_alive():
            self._reader = threading.Thread(
                target=self._read_on, args=(list(queues),), name="tokenmill-failures", daemon=True
            )
            self._reader.start()

    def _read_messages(self) -> None:
        """Give a message to the groups whose newest job is gone: read again the job that is the newest now."""
        to_read: dict[str, list[str]] = {}  # job ids by queue
        with self._lock:
            groups = [group for group in self._groups.values() if not group.message_job]
            for group in groups[:CHUNK]:
                _, (queue, job_id) = group.newest_first()[0]
                to_read.setdefault(queue, []).append(job_id)
                # With a wrong score, the job counts as changed, so it is read again.
                _, key = self._known[queue, job_id]
                self._known[queue, job_id] = (float("-inf"), key)
        for queue, job_ids in to_read.items():
            self.read_jobs(queue, job_ids)

    def _read_on(self, queues: Sequence[str]) -> None:
        """Read for READ_ON_S. After each chunk, rest as long as it took, because pages need the processor too."""
        end = self._clock() + READ_ON_S
        has_more = True
        while has_more and self._clock() < end:
            began_at = self._clock()
            try:
                has_more = self._step(queues)
            except RedisError:
                break  # the next page reports it
            if self._is_closed.wait(self._clock() - began_at):
                break

    def close(self) -> None:
        """End the thread that `advance` started."""
        self._is_closed.set()
        if self._reader.is_alive():
            self._reader.join()

    def finish(self, queues: Sequence[str], report: Callable[[int], None]) -> None:
        """Read until all failed jobs of these queues are known. Raises RedisError.

        report: called after each chunk with the number of known jobs.
        """
        self._rest_ends_at = float("-inf")
        while self._step(queues):
            report(self.num_jobs)

    def _step(self, queues: Sequence[str]) -> bool:
        """Read one chunk. Return whether there is more to read: False at the end of a sweep, and during a rest."""
        with self._lock:
            began_at = self._clock()
            if self._sweep is None:
                if began_at < self._rest_ends_at:
                    return False
                self._sweep = self._sweep_chunks(list(queues))
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
            ended_at = self._clock()
            self._sweep_s += ended_at - began_at
            if self._sweep is None:
                self._rest_ends_at = ended_at + REST * self._sweep_s
        return self._sweep is not None

    def _sweep_chunks(self, queues: Sequence[str]) -> Iterator[None]:
        """Go once through the failed jobs, the newest of each queue first, and yield after each chunk."""
        most_per_queue = MAX_JOBS // max(1, len(queues))
        present: set[Job] = set()
        for queue in queues:
            failed_key = rq_jobs.QueueKeys(queue).failed
            for first in range(0, most_per_queue, CHUNK):
                scored: Any = self._connection.zrevrange(
                    failed_key, first, first + CHUNK - 1, withscores=True
                )
                if not scored:
                    break
                entries = [(stored.text(raw_id), score) for raw_id, score in scored]
                present.update((queue, job_id) for job_id, _ in entries)
                self._read_changed(queue, entries)
                yield

        # Each of these is looked up before it is forgotten. If another job failed or left during the sweep, the ranks
        # have moved, and the sweep may have missed a job that is still there.
        absent = [job for job in self._known if job not in present]
        for start in range(0, len(absent), CHUNK):
            self._remove_gone(absent[start : start + CHUNK])
            yield

    def _read_changed(self, queue: str, entries: Sequence[tuple[str, float]]) -> None:
        """Read the jobs that are not known or have failed anew. entries: (job id, score) of failed jobs of a queue."""
        changed = []
        for job_id, score in entries:
            known_score, _ = self._known.get((queue, job_id), (None, ""))
            if known_score != score:
                changed.append((job_id, score))
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id, _ in changed:
                pipe.hmget(rq_jobs.job_key(job_id), "ended_at", "status")
                pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
            # A key may hold a value of another type, which a producer has written.
            replies = iter(pipe.execute(raise_on_error=False))
        for job_id, score in changed:
            fields = next(replies)
            results = next(replies)
            ended_at, status = fields if isinstance(fields, list) else (None, None)
            error = ""
            if isinstance(results, list) and results:
                _, result = results[0]
                error = rq_jobs.error_text(result)
            is_stopped = rq_jobs.job_status(status) is JobStatus.STOPPED
            self._add(queue, job_id, score, cause_of(error, is_stopped=is_stopped), ended_at)

    def _add(self, queue: str, job_id: str, score: float, cause: Cause, ended_at: Any) -> None:
        """Add a job to its group, or move it there from another group."""
        self._remove(queue, job_id)
        group = self._groups.setdefault((queue, cause.key), Group(queue, cause))
        group.add(job_id, stored.moment(ended_at), cause.message)
        self._known[queue, job_id] = (score, cause.key)

    def _remove(self, queue: str, job_id: str) -> None:
        """Forget a job, and its group if the job was the last one there."""
        if (queue, job_id) not in self._known:
            return
        _, key = self._known.pop((queue, job_id))
        group = self._groups[queue, key]
        group.remove(job_id)
        if not group.jobs:
            del self._groups[queue, key]

    def _remove_gone(self, jobs: Sequence[Job]) -> None:
        """Check these jobs in Redis. Forget each one that is no longer among the failed jobs of its queue."""
        with self._connection.pipeline(transaction=False) as pipe:
            for queue, job_id in jobs:
                pipe.zscore(rq_jobs.QueueKeys(queue).failed, job_id)
            scores = pipe.execute(raise_on_error=False)
        for (queue, job_id), score in zip(jobs, scores, strict=True):
            if not isinstance(score, float):
                self._remove(queue, job_id)

    def read_jobs(self, queue: str, job_ids: Sequence[str]) -> None:
        """Read the jobs with these ids that are among the failed jobs of a queue. Raises RedisError."""
        with self._connection.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.zscore(rq_jobs.QueueKeys(queue).failed, job_id)
            scores = pipe.execute(raise_on_error=False)
        entries = []
        for job_id, score in zip(job_ids, scores, strict=True):
            if isinstance(score, float):
                entries.append((job_id, score))
        with self._lock:
            self._read_changed(queue, entries)

    def forget(self, queue: str, job_ids: Sequence[str]) -> None:
        """Forget jobs that no longer count as failed."""
        with self._lock:
            for job_id in job_ids:
                self._remove(queue, job_id)

    def groups(self, queue: str = "", text: str = "") -> list[GroupSeen]:
        """Return the groups, those with most jobs first.

        queue: count only jobs of this queue; "" for all queues. text: return only groups whose error contains this
        text, in upper or lower case.
        """
        with self._lock:
            groups_by_cause: dict[str, list[Group]] = {}
            for group in self._groups.values():
                if queue in ("", group.queue) and _contains(group, text):
                    groups_by_cause.setdefault(group.cause.key, []).append(group)
            merged = [_merged(groups) for groups in groups_by_cause.values()]
        merged.sort(key=lambda group: (-group.num_jobs, -(group.last_at or 0.0)))
        return merged

    def newest(
        self, first: int, most: int, queue: str, keys: Collection[str] | None
    ) -> list[tuple[float, Job]]:
        """Return (time, job) for at most `most` jobs, the latest time first, from number `first` on.

        The time is when the job ended, in Unix seconds; 0 if that is not known.
        queue: only jobs of this queue; "" for all queues. keys: only jobs of the causes with these keys; None for all.
        """
        lists = []
        with self._lock:
            for (group_queue, key), group in self._groups.items():
                if queue in ("", group_queue) and (keys is None or key in keys):
                    lists.append(group.newest_first())
        merged = heapq.merge(*lists, key=lambda timed_job: -timed_job[0])
        return list(islice(merged, first, first + most))

    def jobs_of(self, queue: str = "", key: str = "") -> list[Job]:
        """Return the known jobs as (queue, job id), the oldest first.

        queue: only jobs of this queue; "" for all queues. key: only jobs of the cause with this key; "" for all.
        """
        scored_jobs = []
        with self._lock:
            for job, (score, job_key) in self._known.items():
                if queue in ("", job[0]) and key in ("", job_key):
                    scored_jobs.append((score, job))
        scored_jobs.sort()
        return [job for _, job in scored_jobs]

    def remedy(self, queue: str, job_id: str) -> Remedy:
        """Return whether trying a job again can help. A job that is not known has Remedy.UNKNOWN."""
        with self._lock:
            if (queue, job_id) not in self._known:
                return Remedy.UNKNOWN
            _, key = self._known[queue, job_id]
            return self._groups[queue, key].cause.remedy


def _contains(group: Group, text: str) -> bool:
    """Whether the error of a group contains a text, in upper or lower case, with or without its ids and numbers."""
    kind = group.cause.kind
    errors = f"{kind}: {group.cause.folded}\n{kind}: {group.message}"
    return text.lower() in errors.lower()


def _merged(groups: Sequence[Group]) -> GroupSeen:
    """Merge groups that have the same cause, each from another queue, into one group for a page."""

    def newest_job(group: Group) -> tuple[float, Job]:
        return group.newest_first()[0]

    newest_group = max(groups, key=lambda group: newest_job(group)[0])
    newest_at, sample = newest_job(newest_group)
    first_ends = [_first_end(group) for group in groups]
    return GroupSeen(
        cause=groups[0].cause,
        num_jobs=sum(len(group.jobs) for group in groups),
        first_at=min((at for at in first_ends if at is not None), default=None),
        last_at=newest_at or None,
        sample=sample,
        message=newest_group.message,
    )


def _first_end(group: Group) -> float | None:
    """Return when the first job of a group ended, in Unix seconds; None if no such time is known."""
    for ended_at, _ in reversed(group.newest_first()):
        if ended_at:
            return ended_at
    return None
