"""One claimed job while this worker has it: its state, and what may change it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from redis import Redis

from engine import Completion, RequestProgress
from jobs.tasks import OpenTask, Request
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import JobRecord
from worker.store.records.stored_job import StoredJob, job_of
from worker.threads.functions import Call
from worker.traces.job_trace import JobTrace


class JobState(enum.Enum):
    """How far a held job is.

    CLAIMED -> OPENING -> STREAMING -> SENT -> COLLECTING -> ENDING is the way of prompts and files, and
    CLAIMED -> FUNCTION -> ENDING that of a function. What is SENT is STREAMING again where answers lead
    to further requests. A job that goes back to its queue or is lost to another worker is WITHDRAWN; so is
    one that is stopped or over its time, and then becomes ENDING.
    """

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
    """Written by the I/O thread alone, and its state by these methods alone.

    number: names it in request ids, `<number>.<index>`.
    lane: place of its queue on the command line; 0 is the most urgent.
    is_ours: whether Tokenmill's own code runs it, and no function of the user's.
    is_file: whether opening its task, and asking for its result, takes time.
    is_function: whether a thread runs it, and it has no task.
    open_task: what yields its requests and takes their completions; None before it is open and after its end.
    requests: what is left of them to send to the engine.
    error: what its stream of requests, or the delivery of a completion, raised.
    call: what a thread does for it now.
    started_at: monotonic seconds when its first sequence was scheduled or its function began; None before.
    began_at: the same moment as a date.
    limit_s: the job's timeout at that moment; 0 or less for none.
    payload_bytes: of its payload, once that was unpacked.
    function_name: what it calls, once that was read.
    user_job: the copy that the user's code got, or gets, and may leave anything in.
    reason: name of what it failed with, "" where it did not.
    is_overdue: whether its function was interrupted because of a limit of time.
    inspected: requests whose answers the task looks at in a thread, before it gets them.
    unscheduled: requests that were sent and of which no step has scheduled a sequence.
    trace: what is noted for its trace; None where it is not traced.
    begun: how far its requests are that the engine is at, as it last told.
    told_progress: what its task said last of its progress; shown_progress: what job.meta shows of it.
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
    is_overdue: bool = False
    next_index: int = 0
    in_engine: int = 0
    unscheduled: set[int] = field(default_factory=set)
    open_requests: dict[int, list[Completion]] = field(default_factory=dict)
    inspected: set[int] = field(default_factory=set)
    samples: dict[int, int] = field(default_factory=dict)
    begun: dict[int, RequestProgress] = field(default_factory=dict)
    told_progress: dict[str, Any] | None = None
    shown_progress: dict[str, Any] | None = None
    trace: JobTrace | None = None
    _awaited: object = None

    # Transitions

    def open(self, is_file: bool) -> None:
        """Its task is being opened."""
        self.state, self.is_file = JobState.OPENING, is_file

    def stream(self) -> None:
        """Its task is open, or has more requests after all."""
        assert self.open_task is not None
        self.state, self.requests = JobState.STREAMING, self.open_task.requests()

    def all_sent(self) -> None:
        """Its stream of requests has come to its end, for now at least."""
        self.state = JobState.SENT

    def broke(self, error: Exception) -> None:
        """Its stream of requests, or a delivery, raised: the next turn of the I/O thread ends it."""
        self.error = error

    def run_function(self) -> None:
        """It is a function, and has a thread."""
        self.state, self.is_function = JobState.FUNCTION, True

    def collect(self) -> None:
        """Every completion is in."""
        self.state = JobState.COLLECTING

    def end(self) -> None:
        """What is left is its end."""
        self.state = JobState.ENDING

    def withdraw(self, reason: type[BaseException]) -> None:
        """Nothing more is awaited of the engine or of a thread, which is interrupted with `reason`."""
        self.state = JobState.WITHDRAWN
        self.open_requests.clear()
        self.inspected.clear()
        if self.call is not None:
            self.call.interrupt(reason)
        self._awaited = None

    # What is held of it

    def hold(self, record: JobRecord) -> None:
        """Hold this of its hash from now on."""
        if record is not self.claimed.record:
            self.claimed = replace(self.claimed, record=record)

    def for_user_code(self, client: Redis) -> StoredJob:
        """Its copy for the user's code, the same one each time; built when it is first asked for."""
        if self.user_job is None:
            self.user_job = job_of(self.claimed, client, self.function_name)
            if self.began_at is not None:
                self.user_job.show_started(self.claimed.worker_name, self.began_at)
        return self.user_job

    # A thread's call

    def await_call(self) -> object:
        """A call is given to a thread. Returns what `awaits` takes when the call comes back."""
        self._awaited = object()
        return self._awaited

    def awaits(self, call: object) -> bool:
        """Whether nothing has come in between since `await_call` returned this."""
        return self._awaited is call

    def interrupt_function(self, reason: type[BaseException]) -> None:
        """Its time is over; the thread reports its end."""
        assert self.call is not None
        self.is_overdue = True
        self.call.interrupt(reason)

    # What follows from it

    @property
    def is_ending(self) -> bool:
        """Whether its value or its end is being worked out: nothing may stop that."""
        return self.state in (JobState.COLLECTING, JobState.ENDING)

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
        """Whether anything of its payload is still on its way to the batch."""
        return self.state is not JobState.SENT or bool(self.unscheduled)

    @property
    def unread(self) -> float:
        """Requests left in the stream; infinite where the task does not say."""
        num_requests = self.open_task.num_requests if self.open_task is not None else None
        return float("inf") if num_requests is None else num_requests - self.next_index

    @property
    def num_rows_done(self) -> int:
        """Rows of its file that are answered; 0 of a job without one, or that is closed."""
        progress = self.open_task.progress() if self.is_file and self.open_task is not None else None
        return 0 if progress is None else int(progress.get("rows_done", 0))

    def tokens_open(self) -> dict[str, int]:
        """Tokens of its requests that are on their way: of prompts, computed and not yet, and of answers."""
        on_their_way = [each for index, each in self.begun.items() if index in self.open_requests]
        return {
            "prompt_tokens_open": sum(each.prompt_tokens for each in on_their_way),
            "prompt_tokens_ahead": sum(each.prompt_tokens_left for each in on_their_way),
            "tokens_open": sum(each.generation_tokens for each in on_their_way),
        }

    @property
    def request_ids(self) -> list[str]:
        """The engine's names of all requests that are on their way."""
        return [self.request_id(index) for index in self.open_requests]

    def request_id(self, index: int) -> str:
        """The engine's name of one of this job's requests."""
        return f"{self.number}.{index}"
