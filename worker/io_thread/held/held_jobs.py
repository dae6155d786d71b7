"""HeldJob and HeldJobs: the jobs that this worker holds, with their states."""

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any

from redis import Redis

from engine import Completion, PartialText, RequestProgress
from jobs.tasks import OpenTask, Request
from worker.metrics.tally import EndedJob
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import JobRecord
from worker.store.records.outcome import Outcome
from worker.store.records.stored_job import StoredJob, job_of
from worker.threads.interrupts import Call
from worker.traces.job_trace import JobTrace, Traces

SLOW_S = 2.0
"""Seconds after which a call counts as slow. Then another thread is started, and the lane may claim another file."""


class JobState(enum.Enum):
    """The state of a held job. ARCHITECTURE.md shows the transitions."""

    CLAIMED = "claimed"  # its payload has not been read
    OPENING = "opening"  # its task is being opened and may read files
    STREAMING = "streaming"  # its requests go to the engine as room comes free
    SENT = "sent"  # all its requests were sent to the engine, which has not completed all of them
    FUNCTION = "function"  # its function runs in a thread once Redis shows the job as begun
    COLLECTING = "collecting"  # its value is made from the completions
    ENDING = "ending"  # its end is computed or written, which nothing may interrupt
    WITHDRAWN = "withdrawn"  # its work was taken back from the engine and the threads


@dataclass(eq=False)
class HeldJob:
    """A claimed job and its state. Written by the I/O thread only.

    number: names the job in request ids, which are `<number>.<index>`.
    lane: the position of the job's queue on the command line; 0 is the most urgent.
    is_ours: Tokenmill's own code runs the job, not a user's function.
    is_file: the job's task reads and writes files, so opening the task and making its result take time.
    is_function: the job is a function, which runs in a thread and has no task.
    open_task: yields requests and takes their completions; None before it is open and after the job's end.
    requests: the stream of requests that are still to be sent to the engine.
    error: raised by the stream of requests, or by the delivery of a completion.
    call: the call that a thread makes for the job now.
    began_at: when the first sequence was scheduled or the function began; None before.
    began_clock_s: the same moment in monotonic seconds.
    limit_s: the job's timeout, counted from that moment; 0 or less means no timeout.
    payload_bytes, function_name: known once the payload has been unpacked and read.
    user_job: the copy of the job for the user's code, which may leave anything in it.
    reason: the name of the job's error; "" if the job did not fail.
    was_slow: one of the job's calls has been slow, see SLOW_S.
    was_interrupted: whether the job's function was interrupted because it ran, or was silent, for too long.
    num_requests: the number of the task's requests, as last counted; None if the task does not say.
    next_index: the index of the next request.
    num_in_engine: how many of the job's sequences are in the engine.
    unscheduled: the indices of the requests that were sent, but that no step has scheduled yet.
    open_requests: the completions so far of each request in the engine, by the request's index.
    being_inspected: the answers that the task inspects in a thread, by the request's index.
    num_samples: the number of sequences of each request in the engine, by the request's index.
    running: the progress of each request that runs in the engine, by the request's index.
    reported_progress: the progress that the task last reported.
    shown_progress: the progress that Redis has.
    trace: None if the job is not traced.
    streamed: the text that was already sent to the job's stream in Redis, by sample.
    owner_digest: identifies the owner of the tokens in the stream, see JobJournal.
    is_blamed: the job has met an unforeseen error. After a second such error it is let go.
    """

    number: int
    claimed: ClaimedJob
    lane: int
    state: JobState = JobState.CLAIMED
    is_ours: bool = False
    is_file: bool = False
    is_function: bool = False
    open_task: OpenTask | None = None
    requests: Iterator[Request] | None = None
    error: Exception | None = None
    call: Call | None = None
    began_clock_s: float | None = None
    began_at: datetime | None = None
    limit_s: float = 0.0
    payload_bytes: int = 0
    function_name: str | None = None
    user_job: StoredJob | None = None
    reason: str = ""
    was_slow: bool = False
    was_interrupted: bool = False
    num_requests: int | None = None
    next_index: int = 0
    num_in_engine: int = 0
    unscheduled: set[int] = field(default_factory=set)
    open_requests: dict[int, list[Completion]] = field(default_factory=dict)
    being_inspected: dict[int, list[Completion]] = field(default_factory=dict)
    num_samples: dict[int, int] = field(default_factory=dict)
    running: dict[int, RequestProgress] = field(default_factory=dict)
    reported_progress: dict[str, Any] | None = None
    shown_progress: dict[str, Any] | None = None
    trace: JobTrace | None = None
    streamed: dict[int, PartialText] = field(default_factory=dict)
    owner_digest: str = ""
    is_blamed: bool = False
    _awaited: object = None

    # Transitions

    def note_opening(self, is_file: bool) -> None:
        """Note that the job's task is being opened."""
        self.state = JobState.OPENING
        self.is_file = is_file

    def begin_stream(self) -> None:
        """Begin a stream of requests. Called when the task is open, and again if it has more requests later."""
        assert self.open_task is not None
        self.state = JobState.STREAMING
        self.requests = self.open_task.requests()

    def note_function(self) -> None:
        """Note that the job is a function, which gets a thread."""
        self.state = JobState.FUNCTION
        self.is_function = True

    def withdraw(self, error: type[BaseException]) -> None:
        """Await nothing more from the engine or threads. Interrupt the job's call in a thread, if any, with `error`."""
        self.state = JobState.WITHDRAWN
        self.open_requests.clear()
        self.being_inspected.clear()
        if self.call is not None:
            self.call.interrupt(error)
        self._awaited = None

    def count_requests(self) -> None:
        """Count the task's requests again. Their number may change as requests are pulled and delivered."""
        self.num_requests = None
        if self.open_task is not None:
            self.num_requests = self.open_task.num_requests

    # The job's record and copies

    def replace_record(self, record: JobRecord) -> None:
        """Keep this record of the job's hash from now on, in place of the earlier record."""
        if record is not self.claimed.record:
            self.claimed = replace(self.claimed, record=record)

    def for_user_code(self, client: Redis) -> StoredJob:
        """Return the copy of the job for the user's code. Every call returns the same copy."""
        if self.user_job is None:
            self.user_job = job_of(self.claimed, client, self.function_name)
            if self.began_at is not None:
                self.user_job.show_started(self.claimed.worker_name, self.began_at)
        return self.user_job

    # The call in a thread

    def await_call(self) -> object:
        """Note that a thread will make a call for this job. Returns the call's key for `awaits`."""
        self._awaited = object()
        return self._awaited

    def awaits(self, call_key: object) -> bool:
        """Whether the job still waits for the call that got this key from `await_call`."""
        return self._awaited is call_key

    def interrupt_function(self, error: type[BaseException]) -> None:
        """Interrupt the job's function with `error`, because it is overdue. Its thread reports the end."""
        assert self.call is not None
        self.was_interrupted = True
        self.call.interrupt(error)

    # Derived state

    @property
    def is_ending(self) -> bool:
        """Whether the job's value is being collected or its end written, which nothing may stop."""
        return self.state in (JobState.COLLECTING, JobState.ENDING)

    @property
    def is_slow(self) -> bool:
        """Whether one of the job's calls is slow, or has been."""
        if self.call is not None and self.call.running_s > SLOW_S:
            self.was_slow = True
        return self.was_slow

    @property
    def has_begun(self) -> bool:
        """Whether a sequence was scheduled or the function began. The job's time limit runs from then on."""
        return self.began_clock_s is not None

    def is_over_limit(self, moment: float) -> bool:
        """Whether the job has run for longer than its time limit. moment: the time now, in monotonic seconds."""
        if self.began_clock_s is None or self.limit_s <= 0:
            return False
        return moment - self.began_clock_s > self.limit_s

    @property
    def is_complete(self) -> bool:
        """Whether every request was sent to the engine, and every answer was delivered to the task."""
        has_open_answers = bool(self.open_requests or self.being_inspected)
        return self.state is JobState.SENT and not has_open_answers

    @property
    def needs_payload(self) -> bool:
        """Whether the job still needs its payload, because some of its requests have not been scheduled yet."""
        return self.state is not JobState.SENT or bool(self.unscheduled)

    @property
    def num_unread(self) -> float:
        """The number of requests left in the stream; infinite if the task does not know."""
        if self.num_requests is None:
            return float("inf")
        return self.num_requests - self.next_index

    @property
    def num_rows_done(self) -> int:
        """The number of answered rows of the job's file; 0 without a file, or once the file is closed."""
        if not self.is_file or self.open_task is None:
            return 0
        progress = self.open_task.progress()
        if progress is None:
            return 0
        return int(progress.get("rows_done", 0))

    def count_open_tokens(self) -> dict[str, int]:
        """Count the open requests' tokens: all prompt tokens, the ones not yet computed, and the tokens of answers."""
        num_prompt_tokens = 0
        num_prompt_tokens_left = 0
        num_answer_tokens = 0
        for index, progress in self.running.items():
            if index in self.open_requests:
                num_prompt_tokens += progress.prompt_tokens
                num_prompt_tokens_left += progress.prompt_tokens_left
                num_answer_tokens += progress.generation_tokens
        return {
            "prompt_tokens_open": num_prompt_tokens,
            "prompt_tokens_ahead": num_prompt_tokens_left,
            "tokens_open": num_answer_tokens,
        }

    def changed_progress(self) -> dict[str, Any] | None:
        """Return the progress of the job's task if it has changed since the last call, else None."""
        if self.open_task is None:
            return None
        task_progress = self.open_task.progress()
        # A task may return the same object for some seconds, so that its progress is not written too often.
        if task_progress is None or task_progress is self.reported_progress:
            return None
        self.reported_progress = task_progress

        progress = {**task_progress, **self.count_open_tokens()}
        if progress == self.shown_progress:
            return None
        self.shown_progress = progress
        return progress

    def undelivered_tokens(
        self, running: Mapping[str, Mapping[int, Sequence[int]]]
    ) -> dict[int, Mapping[int, Sequence[int]]]:
        """Return the token ids of the job's undelivered requests, by request index and sample index.

        running: the token ids of all sequences in the engine, by request id and sample index.
        """
        tokens_by_request: dict[int, Mapping[int, Sequence[int]]] = {}
        undelivered = {**self.open_requests, **self.being_inspected}
        for index, completions in undelivered.items():
            # The samples that still run are in the engine. The others have completions.
            tokens_by_sample = dict(running.get(self.request_id(index), {}))
            for completion in completions:
                # A completion with an error may have no tokens.
                if completion.finish_reason != "error":
                    tokens_by_sample[completion.index] = completion.token_ids
            tokens_by_request[index] = tokens_by_sample
        return tokens_by_request

    @property
    def request_ids(self) -> list[str]:
        """The ids of all open requests in the engine."""
        return [self.request_id(index) for index in self.open_requests]

    def request_id(self, index: int) -> str:
        """Return the id that the job's request with this index has in the engine."""
        return f"{self.number}.{index}"


class HeldJobs:
    """The claimed jobs that have not ended, oldest first. Used by the I/O thread only."""

    def __init__(self, traces: Traces | None) -> None:
        self._traces = traces
        self._numbers = count()
        self._jobs: dict[int, HeldJob] = {}
        self._num_by_lane: Counter[int] = Counter()

    def add(self, claimed: ClaimedJob, lane: int = 0) -> HeldJob:
        """Hold a job from now on."""
        job = HeldJob(next(self._numbers), claimed, lane)
        self._jobs[job.number] = job
        self._num_by_lane[lane] += 1
        return job

    def begin_trace(self, job: HeldJob) -> None:
        """Begin a trace of the job, if this worker traces jobs."""
        if self._traces is not None:
            job.trace = self._traces.begin(job.claimed.execution_id, job.claimed.record.meta)

    def remove(self, job: HeldJob) -> None:
        """Stop holding a job. Raises KeyError if it is not held."""
        del self._jobs[job.number]
        self._num_by_lane[job.lane] -= 1

    def num_of(self, lane: int) -> int:
        """Return how many jobs of this lane are held."""
        return self._num_by_lane[lane]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        """Iterate over a copy, so that jobs may be removed meanwhile."""
        return iter(list(self._jobs.values()))

    def __contains__(self, job: HeldJob) -> bool:
        return job.number in self._jobs

    def of_request(self, request_id: str) -> tuple[HeldJob | None, int]:
        """Return the job of a request and the request's index. The job is None if it is no longer held."""
        number, _, index = request_id.partition(".")
        return self._jobs.get(int(number)), int(index)

    def find(self, job_id: str, execution_id: str | None) -> HeldJob | None:
        """Return the oldest job with this id and, if given, this execution. Two executions of a job may be held."""
        for job in self._jobs.values():
            is_execution = execution_id is None or execution_id == job.claimed.execution_id
            if job.claimed.job_id == job_id and is_execution:
                return job
        return None

    def of_executions(self, execution_ids: Collection[str]) -> list[HeldJob]:
        """Return the jobs of these executions."""
        return [job for job in self._jobs.values() if job.claimed.execution_id in execution_ids]

    def unstarted(self) -> list[HeldJob]:
        """Return the jobs that have not begun and are not ending."""
        return [job for job in self._jobs.values() if not job.has_begun and not job.is_ending]

    def note_progress(self, requests: Mapping[str, RequestProgress]) -> None:
        """Note the progress of all requests that run in the engine. requests: the progress by request id."""
        for job in self._jobs.values():
            job.running = {}
        for request_id, progress in requests.items():
            request_job, index = self.of_request(request_id)
            if request_job is not None:
                request_job.running[index] = progress


def ended_job(job: HeldJob, outcome: Outcome) -> EndedJob:
    """Describe a job that has ended with this outcome, for metrics and traces."""
    summary: dict[str, Any] = {}
    if job.is_file and isinstance(outcome.value, dict):
        summary = outcome.value
    reason = ""
    if outcome.status == "failed":
        reason = job.reason
    began_at = None
    if job.began_at is not None:
        began_at = job.began_at.timestamp()
    return EndedJob(
        queue=job.claimed.queue_name,
        job_id=job.claimed.job_id,
        function_name=job.function_name or "refused",
        is_function=job.is_function,
        outcome=outcome.status,
        reason=reason,
        enqueued_at=_unix_seconds(job.claimed.record.fields.get(b"enqueued_at", b"")),
        began_at=began_at,
        ended_at=outcome.ended_at.timestamp(),
        rows=_count_in(summary, "rows") or 0,
        row_errors=_count_in(summary, "errors") or 0,
        rows_unasked=_count_in(summary, "rows_unasked"),
    )


def _count_in(summary: Mapping[str, Any], name: str) -> int | None:
    """Return a count of a shard's summary; None if the summary has no such number."""
    count = summary.get(name)
    return count if isinstance(count, int) else None


def _unix_seconds(date_text: bytes) -> float | None:
    """Return the Unix seconds of a date in RQ's form; None for any other text and for a date before 1970."""
    try:
        moment = datetime.fromisoformat(date_text.decode())
    except ValueError:
        return None
    if moment.tzinfo is None or moment.timestamp() < 0:
        return None
    return moment.timestamp()
