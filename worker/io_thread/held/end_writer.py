"""Writes the ends of jobs in batches. If a batch cannot be written, its ends are written one by one."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from redis.exceptions import RedisError

from jobs.errors import fault_line
from worker.errors import EndNotTaken
from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.store.client import OUTAGES
from worker.store.job_store import JobStore
from worker.store.records.outcome import FinishReply, Outcome, traceback_text

_BATCH_BYTES = 8 << 20
"""Bytes of values after which a batch is full."""

_MAX_REFUSALS = 3
"""How often the server may refuse one end, although it takes other ends. Then the job fails instead."""

_PAUSE_S = 0.25
"""Seconds between two attempts to write one end alone."""

_SMALL_BYTES = 1 << 16
"""If the connection breaks while a smaller end is written, the network is to blame, and not the end."""


class _End(NamedTuple):
    """An end that is still to be written, and its size."""

    job: HeldJob
    outcome: Outcome
    num_bytes: int


def _write(store: JobStore, ends: Sequence[_End]) -> list[tuple[_End, FinishReply]]:
    """Write ends. Returns each end with Redis' reply to it."""
    replies = store.finish([end.outcome for end in ends])
    return list(zip(ends, replies, strict=True))


@dataclass
class _LoneEnd:
    """The state of an end that is written alone, not in a batch.

    num_refusals: how often the server has refused this end, although it takes other ends.
    not_before: monotonic seconds of the next attempt.
    is_replaced: whether the job's own end was given up, and a failure is written in its place.
    """

    num_refusals: int = 0
    not_before: float = float("-inf")
    is_replaced: bool = False


OnReply = Callable[[HeldJob, Outcome, FinishReply], None]
"""Called with the server's reply to a job's end."""


class EndWriter:
    """Holds ends until the server has taken them. Used by the I/O thread only.

    The server may refuse one end while it takes others, perhaps because that end is too large. Such an end is written
    alone, so that it does not hold up other ends. After a few refusals, a failure is written in its place.
    """

    def __init__(
        self,
        on_reply: OnReply,
        guard: JobGuard,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_reply = on_reply
        self._guard = guard
        self._log = log
        self._clock = clock
        # By the job's number: all ends that are not written yet.
        self._waiting: dict[int, _End] = {}
        # By the job's number: the state of each end that is written alone.
        self._lone_ends: dict[int, _LoneEnd] = {}

    def add(self, job: HeldJob, outcome: Outcome) -> None:
        """Queue an end, which the next `flush` writes."""
        self._waiting[job.number] = _End(job, outcome, outcome.num_bytes)

    def forget(self, job: HeldJob) -> None:
        """Drop an end that is not written yet."""
        self._waiting.pop(job.number, None)
        self._lone_ends.pop(job.number, None)

    def is_waiting(self, job: HeldJob) -> bool:
        """Whether a job's end still waits to be written."""
        return job.number in self._waiting

    def flush(self, store: JobStore) -> None:
        """Write the waiting ends. After a RedisError, call this method again."""
        for batch in list(self._batches()):
            try:
                replies = self._guard.batch(
                    batch, job_of=lambda end: end.job, call=partial(_write, store)
                )
            except RedisError:
                # One of these ends may be to blame, so each is written alone from now on.
                for end in batch:
                    self._lone_ends[end.job.number] = _LoneEnd()
                raise
            for end, reply in replies:
                with self._guard.around(end.job):
                    self._report_reply(end.job, end.outcome, reply)

        for number, lone_end in list(self._lone_ends.items()):
            if self._clock() >= lone_end.not_before and number in self._waiting:
                end = self._waiting[number]
                with self._guard.around(end.job):
                    self._write_alone(store, end.job, end.outcome, lone_end)

    def _batches(self) -> Iterator[list[_End]]:
        """Yield the waiting ends in batches. Ends that are written alone are left out."""
        batch: list[_End] = []
        num_bytes = 0
        for number, end in self._waiting.items():
            if number in self._lone_ends:
                continue
            batch.append(end)
            num_bytes += end.num_bytes
            if num_bytes >= _BATCH_BYTES:
                yield batch
                batch = []
                num_bytes = 0
        if batch:
            yield batch

    def _write_alone(
        self, store: JobStore, job: HeldJob, outcome: Outcome, lone_end: _LoneEnd
    ) -> None:
        """Write one end alone. If the server refuses only this end, count the refusal, and give up after a few."""
        try:
            [reply] = store.finish([outcome])
        except RedisError as error:
            # If the server takes no writes at all, this call raises too.
            lost_jobs = store.renew([outcome.claimed])
            if lost_jobs:
                self._report_reply(job, outcome, "lost")
                return
            lone_end.not_before = self._clock() + _PAUSE_S
            if isinstance(error, OUTAGES) and outcome.num_bytes < _SMALL_BYTES:
                return  # an end this small cannot cause an outage
            lone_end.num_refusals += 1
            self._log.error(
                "job %s: Redis does not take its result of %d bytes (%s: %s)",
                job.claimed.job_id,
                outcome.num_bytes,
                type(error).__name__,
                error,
            )
            if lone_end.num_refusals >= _MAX_REFUSALS:
                self._give_up(job, outcome, error, lone_end)
        else:
            self._report_reply(job, outcome, reply)

    def _give_up(
        self, job: HeldJob, outcome: Outcome, error: RedisError, lone_end: _LoneEnd
    ) -> None:
        """Put a failure in place of an end that the server refuses. If it refuses the failure too, drop the end."""
        if lone_end.is_replaced:
            self._report_reply(job, outcome, "refused")
            return
        lone_end.num_refusals = 0
        lone_end.is_replaced = True
        reason = EndNotTaken(outcome.num_bytes, f"{type(error).__name__}: {error}")
        reason.add_note(fault_line(reason.fault))
        failed = replace(
            outcome, status="failed", value=traceback_text(reason), packed=None, may_retry=False
        )
        self._waiting[job.number] = _End(job, failed, failed.num_bytes)

    def _report_reply(self, job: HeldJob, outcome: Outcome, reply: FinishReply) -> None:
        """Forget an end, because it is settled, and call `on_reply` with the server's reply."""
        self.forget(job)
        self._on_reply(job, outcome, reply)
