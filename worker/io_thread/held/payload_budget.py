"""Claimed jobs whose payloads are not unpacked yet: in order, a few at a time, and within a lane's budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from worker.io_thread.held.held_jobs import HeldJob

_TURN_BYTES = 1 << 20
"""Of payloads that are unpacked and parsed for a lane in one turn of the I/O thread, and one more."""


class PayloadBudget:
    """Decides when a claimed job's payload is unpacked. The I/O thread's.

    max_held_bytes: of hashes and unpacked payloads that the open jobs of a lane hold, most of them until
    all of it is in the batch; the next one waits as it came, packed, until there is room. Each lane has a
    budget of its own, so none waits for another, and opens a job whenever it has none.
    """

    def __init__(self, num_lanes: int, max_held_bytes: int) -> None:
        self._most = max_held_bytes
        self._waiting: list[deque[HeldJob]] = [deque() for _ in range(num_lanes)]
        self._held = [0] * num_lanes
        self._bytes: dict[int, int] = {}

    def add(self, job: HeldJob) -> None:
        """A job was claimed."""
        self._waiting[job.lane].append(job)

    def forget(self, job: HeldJob) -> None:
        """A job has ended, or is not this worker's any more."""
        self._held[job.lane] -= self._bytes.pop(job.number, 0)
        if job in self._waiting[job.lane]:
            self._waiting[job.lane].remove(job)

    def keep(self, job: HeldJob, num_bytes: int) -> None:
        """An open job has let go of all but so many bytes."""
        if job.number in self._bytes:
            self._count(job, num_bytes - self._bytes[job.number])

    def has_room(self, lane: int) -> bool:
        """Whether a lane may claim more jobs."""
        return not self._waiting[lane] and self._held[lane] < self._most

    @property
    def can_open(self) -> bool:
        """Whether `take` would yield a job."""
        return any(waiting and self._held[lane] < self._most for lane, waiting in enumerate(self._waiting))

    def take(self) -> Iterator[HeldJob]:
        """Yield the jobs to open now, the most urgent lane's first; each is opened before the next."""
        for lane, waiting in enumerate(self._waiting):
            opened = 0
            while waiting and opened < _TURN_BYTES and self._held[lane] < self._most:
                job = waiting.popleft()
                self._count(job, job.claimed.record.hash_bytes)
                yield job
                opened += job.payload_bytes
                if job.number in self._bytes:  # else it was let go of at once
                    self._count(job, job.payload_bytes)

    def _count(self, job: HeldJob, num_bytes: int) -> None:
        self._bytes[job.number] = self._bytes.get(job.number, 0) + num_bytes
        self._held[job.lane] += num_bytes
