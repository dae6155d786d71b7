"""The held jobs of a worker."""

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any

from redis import Redis

from engine import Completion, RequestProgress
from jobs.tasks import OpenTask, Request
from worker.metrics.tally import EndedJob
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import JobRecord
from worker.store.records.outcome import Outcome
from worker.store.records.stored_job import StoredJob, job_of
from worker.threads.interrupts import Call
from worker.traces.job_trace import JobTrace, Traces

SLOW_S = 2.0
"""A call that goes on so long holds up no other: it has a thread more, and its lane takes the next file."""


class JobState(enum.Enum):
    """The state of a held job; ARCHITECTURE.md shows what follows what."""

    CLAIMED = "claimed"  # nobody has looked into its payload
    OPENING = "opening"  # its task reads what it needs, a file perhaps
    STREAMING = "streaming"  # its requests go to the engine as there is room
    SENT = "sent"  # all there are by now; completions are awaited
    FUNCTION = "function"  # it waits to be shown as begun, then runs in a thread
    COLLECTING = "collecting"  # its value is made of the completions
    ENDING = "ending"  # its end is worked out or written; nothing may interrupt that
    WITHDRAWN = "withdrawn"  # engine and threads have no more to do with it


@dataclass(eq=False)
class HeldJob:
    """A claimed job and its state. Written by the I/O thread only.

    number: names it in request ids, `<number>.<index>`.
    lane: place of its queue on the command line; 0 is the most urgent.
    is_ours: Tokenmill's own code runs it, and no function of the user's.
    is_file: opening its task, and asking for its result, takes time.
    is_function: a thread runs it, and it has no task.
    open_task: yields its requests and takes their completions; None before it is open and after its end.
    requests: still to be sent to the engine.
    error: raised by its stream of requests, or by the delivery of a completion.
    call: its call in a thread now.
    started_at: monotonic seconds when its first sequence was scheduled or its function began; None before.
    began_at: the same moment as a date.
    limit_s: the job's timeout at that moment; 0 or less for none.
    payload_bytes, function_name: known once its payload was unpacked and read.
    user_job: the copy for the user's code, which may leave anything in it.
    reason: name of its error, "" if it did not fail.
    was_slow: a call of its ran for long.
    is_overdue: its function was interrupted because of a limit of time.
    num_requests: how many requests its task has, as of the last look; None if the task does not say.
    inspected: requests whose answers the task looks at in a thread, and those.
    unscheduled: requests that were sent and of which no step has scheduled a sequence.
    trace: None if it is not traced.
    begun: the progress of its requests in the engine.
    told_progress: the progress that the task last reported. shown_progress: the one that Redis has.
    is_blamed: it has met an error that nobody foresaw. After another one it is let go.
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
    started_at: float | None = None
    began_at: datetime | None = None
    limit_s: float = 0.0
    payload_bytes: int = 0
    function_name: str | None = None
    user_job: StoredJob | None = None
    reason: str = ""
    was_slow: bool = False
    is_overdue: bool = False
    num_requests: int | None = None
    next_index: int = 0
    in_engine: int = 0
    unscheduled: set[int] = field(default_factory=set)
    open_requests: dict[int, list[Completion]] = field(default_factory=dict)
    inspected: dict[int, list[Completion]] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    begun: dict[int, RequestProgress] = field(default_factory=dict)
    told_progress: dict[str, Any] | None = None
    shown_progress: dict[str, Any] | None = None
    trace: JobTrace | None = None
    is_blamed: bool = False
    _awaited: object = None

    # Transitions

    def open(self, is_file: bool) -> None:
        """Note that its task is being opened."""
        self.state, self.is_file = JobState.OPENING, is_file

    def stream(self) -> None:
        """Note that its task is open, or has more requests after all."""
        assert self.open_task is not None
        self.state, self.requests = JobState.STREAMING, self.open_task.requests()

    def run_function(self) -> None:
        """Note that it is a function, and has a thread."""
        self.state, self.is_function = JobState.FUNCTION, True

    def withdraw(self, reason: type[BaseException]) -> None:
        """Await nothing more of the engine or a thread, which is interrupted with `reason`."""
        self.state = JobState.WITHDRAWN
        self.open_requests.clear()
        self.inspected.clear()
        if self.call is not None:
            self.call.interrupt(reason)
        self._awaited = None

    def count_requests(self) -> None:
        """Note how many requests its task has in all. The number changes as they are pulled and delivered."""
        self.num_requests = self.open_task.num_requests if self.open_task is not None else None

    # What is held of it

    def hold(self, record: JobRecord) -> None:
        """Hold this part of its hash from now on."""
        if record is not self.claimed.record:
            self.claimed = replace(self.claimed, record=record)

    def for_user_code(self, client: Redis) -> StoredJob:
        """Return its copy for the user's code, the same one each time."""
        if self.user_job is None:
            self.user_job = job_of(self.claimed, client, self.function_name)
            if self.began_at is not None:
                self.user_job.show_started(self.claimed.worker_name, self.began_at)
        return self.user_job

    # A thread's call

    def await_call(self) -> object:
        """Note that a thread got a call; return the call's key for `awaits`."""
        self._awaited = object()
        return self._awaited

    def awaits(self, call: object) -> bool:
        """Whether the call with this key of `await_call` is still the last."""
        return self._awaited is call

    def interrupt_function(self, reason: type[BaseException]) -> None:
        """Interrupt an overdue function; the thread reports its end."""
        assert self.call is not None
        self.is_overdue = True
        self.call.interrupt(reason)

    # What follows from it

    @property
    def is_ending(self) -> bool:
        """Whether its value or its end is in work, which nothing may stop."""
        return self.state in (JobState.COLLECTING, JobState.ENDING)

    @property
    def is_slow(self) -> bool:
        """Whether a call of its has run for long."""
        self.was_slow = self.was_slow or (self.call is not None and self.call.running_s > SLOW_S)
        return self.was_slow

    @property
    def has_begun(self) -> bool:
        """Whether its time runs."""
        return self.started_at is not None

    @property
    def is_complete(self) -> bool:
        """Whether every request was sent and delivered."""
        return self.state is JobState.SENT and not self.open_requests and not self.inspected

    @property
    def needs_payload(self) -> bool:
        """Whether any of its payload is still on its way to the batch."""
        return self.state is not JobState.SENT or bool(self.unscheduled)

    @property
    def unread(self) -> float:
        """The number of requests left in the stream; infinite if the task does not say."""
        return float("inf") if self.num_requests is None else self.num_requests - self.next_index

    @property
    def num_rows_done(self) -> int:
        """The number of answered rows of its file; 0 without one, or once closed."""
        progress = self.open_task.progress() if self.is_file and self.open_task is not None else None
        return 0 if progress is None else int(progress.get("rows_done", 0))

    def tokens_open(self) -> dict[str, int]:
        """The tokens of its open requests: of prompts, computed and not yet, and of answers."""
        on_their_way = [each for index, each in self.begun.items() if index in self.open_requests]
        return {
            "prompt_tokens_open": sum(each.prompt_tokens for each in on_their_way),
            "prompt_tokens_ahead": sum(each.prompt_tokens_left for each in on_their_way),
            "tokens_open": sum(each.generation_tokens for each in on_their_way),
        }

    def changed_progress(self) -> dict[str, Any] | None:
        """Return a running task's progress if it has changed since the last call, else None."""
        told = self.open_task.progress() if self.open_task is not None else None
        if told is None or told is self.told_progress:
            return None
        self.told_progress = told
        progress = {**told, **self.tokens_open()}
        if progress == self.shown_progress:
            return None
        self.shown_progress = progress
        return progress

    def so_far(self, samples: Mapping[str, Mapping[int, Sequence[int]]]) -> dict[int, Mapping[int, Sequence[int]]]:
        """Return the tokens of its requests that are not delivered. samples: what the engine has of all."""
        found: dict[int, Mapping[int, Sequence[int]]] = {}
        for index, completed in (*self.open_requests.items(), *self.inspected.items()):
            own = {each.index: each.token_ids for each in completed if each.finish_reason != "error"}
            found[index] = {**samples.get(self.request_id(index), {}), **own}
        return found

    @property
    def request_ids(self) -> list[str]:
        """The engine's names of all open requests."""
        return [self.request_id(index) for index in self.open_requests]

    def request_id(self, index: int) -> str:
        """Return the engine's name of one of this job's requests."""
        return f"{self.number}.{index}"


class HeldJobs:
    """The claimed jobs that have not ended, oldest first. Used by the I/O thread only."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._numbers = count()
        self._jobs: dict[int, HeldJob] = {}
        self._by_lane: Counter[int] = Counter()

    def add(self, claimed: ClaimedJob, lane: int = 0) -> HeldJob:
        job = HeldJob(next(self._numbers), claimed, lane)
        self._jobs[job.number] = job
        self._by_lane[lane] += 1
        return job

    def begin_trace(self, job: HeldJob) -> None:
        job.trace = self._traces.begin(job.claimed.execution_id, job.claimed.record.meta)

    def remove(self, job: HeldJob) -> None:
        del self._jobs[job.number]
        self._by_lane[job.lane] -= 1

    def num_of(self, lane: int) -> int:
        """Return how many jobs of this lane are held."""
        return self._by_lane[lane]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        """Iterate over a copy, so that jobs may be removed meanwhile."""
        return iter(list(self._jobs.values()))

    def __contains__(self, job: HeldJob) -> bool:
        return job.number in self._jobs

    def of_request(self, request_id: str) -> tuple[HeldJob | None, int]:
        """Return the job of a request, None if it is no longer held, and the request's index."""
        number, _, index = request_id.partition(".")
        return self._jobs.get(int(number)), int(index)

    def find(self, job_id: str, execution_id: str | None) -> HeldJob | None:
        """Find a job of this id, of which there may be two; by execution_id unless that is None."""
        found = (job for job in self._jobs.values() if job.claimed.job_id == job_id)
        return next((job for job in found if execution_id in (None, job.claimed.execution_id)), None)

    def of_executions(self, execution_ids: Collection[str]) -> list[HeldJob]:
        """Return the jobs of these executions."""
        return [job for job in self._jobs.values() if job.claimed.execution_id in execution_ids]

    def unstarted(self) -> list[HeldJob]:
        """The jobs that have run no code yet."""
        return [job for job in self._jobs.values() if not job.has_begun and not job.is_ending]

    def progressed(self, requests: Mapping[str, RequestProgress]) -> None:
        """Note these requests' progress, by their ids; all others in the engine have not begun."""
        for job in self._jobs.values():
            job.begun = {}
        for request_id, progress in requests.items():
            whose, index = self.of_request(request_id)
            if whose is not None:
                whose.begun[index] = progress


def ended_job(job: HeldJob, outcome: Outcome) -> EndedJob:
    """Return a job that has ended so, for metrics and traces."""
    shard = outcome.value if job.is_file and isinstance(outcome.value, dict) else {}
    rows, errors, unasked = (shard.get(name) for name in ("rows", "errors", "rows_unasked"))
    return EndedJob(
        queue=job.claimed.queue_name,
        job_id=job.claimed.job_id,
        function=job.function_name or "refused",
        is_function=job.is_function,
        outcome=outcome.status,
        reason=job.reason if outcome.status == "failed" else "",
        enqueued_at=_moment(job.claimed.record.fields.get(b"enqueued_at", b"")),
        began_at=None if job.began_at is None else job.began_at.timestamp(),
        ended_at=outcome.ended_at.timestamp(),
        rows=rows if isinstance(rows, int) else 0,
        row_errors=errors if isinstance(errors, int) else 0,
        rows_unasked=unasked if isinstance(unasked, int) else None,
    )


def _moment(stored: bytes) -> float | None:
    """Return the Unix seconds of RQ's date; None for anything else, or before 1970."""
    try:
        moment = datetime.fromisoformat(stored.decode())
    except ValueError:
        return None
    return None if moment.tzinfo is None or moment.timestamp() < 0 else moment.timestamp()
