"""The jobs that a worker holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any

from engine import RequestProgress
from worker.io_thread.held.held_job import HeldJob
from worker.metrics.tally import EndedJob, Tally
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.outcome import Outcome
from worker.traces.job_trace import JobTrace, TracedEnd, Traces


@dataclass
class JobCounts:
    """Jobs this worker has brought to an end, and the rows of files that those had."""

    tally: Tally = field(default_factory=Tally)
    traces: Traces = field(default_factory=Traces)
    finished: int = 0
    failed: int = 0
    rows: int = 0

    def add(self, job: HeldJob, outcome: Outcome) -> None:
        """Count one that has ended so."""
        self.tally.job_ended(lambda: _ended(job, outcome))
        if (trace := job.trace) is not None:
            self.traces.ended(lambda: _traced_end(job, trace, _ended(job, outcome)))
        is_finished = outcome.status == "finished"
        self.finished += is_finished
        self.failed += not is_finished
        self.rows += job.num_rows_done if is_finished else 0

    @property
    def ended(self) -> int:
        """All jobs that need no more work here."""
        return self.finished + self.failed


class HeldJobs:
    """Those that were claimed and have not ended, oldest first. The I/O thread's."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._numbers = count()
        self._jobs: dict[int, HeldJob] = {}
        self._by_lane: Counter[int] = Counter()

    def add(self, claimed: ClaimedJob, lane: int = 0) -> HeldJob:
        """Hold one more."""
        trace = self._traces.begin(claimed.execution_id, claimed.record.meta)
        job = HeldJob(next(self._numbers), claimed, lane, trace=trace)
        self._jobs[job.number] = job
        self._by_lane[lane] += 1
        return job

    def remove(self, job: HeldJob) -> None:
        """Hold it no longer."""
        del self._jobs[job.number]
        self._by_lane[job.lane] -= 1

    def num_of(self, lane: int) -> int:
        """How many of them are of this lane."""
        return self._by_lane[lane]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        """Over a copy: whoever looks at them may let go of some."""
        return iter(list(self._jobs.values()))

    def __contains__(self, job: HeldJob) -> bool:
        return job.number in self._jobs

    def of_request(self, request_id: str) -> tuple[HeldJob | None, int]:
        """Whose request it is, None where that is held no longer; and the request's index."""
        number, _, index = request_id.partition(".")
        return self._jobs.get(int(number)), int(index)

    def find(self, job_id: str, execution_id: str | None) -> HeldJob | None:
        """A job of this id. Of one that was enqueued again while it ran here there may be two.

        execution_id: the one execution that is meant; None for whichever is held.
        """
        found = (job for job in self._jobs.values() if job.claimed.job_id == job_id)
        return next((job for job in found if execution_id in (None, job.claimed.execution_id)), None)

    def of_executions(self, execution_ids: Collection[str]) -> list[HeldJob]:
        """The jobs that these executions hold."""
        return [job for job in self._jobs.values() if job.claimed.execution_id in execution_ids]

    def unstarted(self) -> list[HeldJob]:
        """Those of which nothing has run yet."""
        return [job for job in self._jobs.values() if not job.has_begun and not job.is_ending]

    def num_rows_done(self) -> int:
        """Rows of files that the jobs which are held have answered by now."""
        return sum(job.num_rows_done for job in self._jobs.values())

    def progressed(self, requests: Mapping[str, RequestProgress]) -> None:
        """Note how far these requests are, by their ids; all others in the engine have not begun."""
        for job in self._jobs.values():
            job.begun = {}
        for request_id, progress in requests.items():
            whose, index = self.of_request(request_id)
            if whose is not None:
                whose.begun[index] = progress

    def changed_progress(self) -> list[tuple[ClaimedJob, dict[str, Any]]]:
        """`job.meta` of the running tasks that have moved since the last call."""
        changed = []
        for job in self._jobs.values():
            told = job.open_task.progress() if job.open_task is not None else None
            if told is None or told is job.told_progress:
                continue
            job.told_progress, progress = told, {**told, **job.tokens_open()}
            if progress != job.shown_progress:
                job.shown_progress = progress
                meta = job.claimed.record.meta
                changed.append((job.claimed, {**meta, **progress} if isinstance(meta, dict) else progress))
        return changed


def _ended(job: HeldJob, outcome: Outcome) -> EndedJob:
    shard = outcome.value if job.is_file and isinstance(outcome.value, dict) else {}
    rows, errors, unasked = (shard.get(name) for name in ("rows", "errors", "rows_unasked"))
    return EndedJob(
        queue=job.claimed.queue_name,
        outcome=outcome.status,
        reason=job.reason if outcome.status == "failed" else "",
        enqueued_at=_moment(job.claimed.record.fields.get(b"enqueued_at", b"")),
        began_at=None if job.began_at is None else job.began_at.timestamp(),
        ended_at=outcome.ended_at.timestamp(),
        rows=rows if isinstance(rows, int) else 0,
        row_errors=errors if isinstance(errors, int) else 0,
        rows_unasked=unasked if isinstance(unasked, int) else None,
    )


def _traced_end(job: HeldJob, trace: JobTrace, ended: EndedJob) -> TracedEnd:
    return TracedEnd(
        trace,
        job_id=job.claimed.job_id,
        function=job.function_name or "refused",
        is_function=job.is_function,
        written_at=time.time(),
        **{name: value for name, value in vars(ended).items() if name != "rows_unasked"},
    )


def _moment(stored: bytes) -> float | None:
    """Unix seconds of a date as RQ writes it; None for anything else, and for what is before 1970."""
    try:
        moment = datetime.fromisoformat(stored.decode())
    except ValueError:
        return None
    return None if moment.tzinfo is None or moment.timestamp() < 0 else moment.timestamp()
