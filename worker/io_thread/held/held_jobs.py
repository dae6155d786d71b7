"""The jobs that a worker holds."""

import enum
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from redis import Redis

from engine import Completion, RequestProgress
from jobs.tasks import OpenTask, Request
from worker.metrics.ended_job import EndedJob
from worker.metrics.tally import Tally
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import JobRecord
from worker.store.records.outcome import Outcome
from worker.store.records.stored_job import StoredJob, job_of
from worker.threads.functions import Call
from worker.traces.job_trace import JobTrace, Traces


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
    """Written by the I/O thread alone.

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

    def run_function(self) -> None:
        """It is a function, and has a thread."""
        self.state, self.is_function = JobState.FUNCTION, True

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
        ended = _ended(job, outcome)
        self.tally.job_ended(ended)
        if job.trace is not None:
            self.traces.ended(job.trace, ended, written_at=time.time())
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
    """Unix seconds of a date as RQ writes it; None for anything else, and for what is before 1970."""
    try:
        moment = datetime.fromisoformat(stored.decode())
    except ValueError:
        return None
    return None if moment.tzinfo is None or moment.timestamp() < 0 else moment.timestamp()


class Beginnings:
    """Notes which jobs have begun and shows it in Redis, in one call for all of a turn. The I/O thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._news: dict[int, HeldJob] = {}
        self._functions: dict[int, tuple[HeldJob, Callable[[], None]]] = {}

    def began(self, job: HeldJob, moment: float) -> None:
        """A job has begun at `moment` (monotonic seconds), unless it had before."""
        if job.started_at is not None:
            return
        _start_clock(job, moment, self._clock())
        self._news[job.number] = job

    def run(self, job: HeldJob, function: Callable[[], None]) -> None:
        """Call `function`, which hands the job's function to a thread, once Redis shows that it begins."""
        self._functions[job.number] = (job, function)

    def forget(self, job: HeldJob) -> bool:
        """Drop what is not shown yet of a job. Returns whether its function was not handed over."""
        self._news.pop(job.number, None)
        return self._functions.pop(job.number, None) is not None

    def show(self, store: JobStore) -> list[ClaimedJob]:
        """Write what began since the last call, then hand functions over. After a RedisError call it again.

        Returns the jobs that are no longer this worker's; their functions are not handed over.
        """
        functions = list(self._functions.values())
        begun = [(job.claimed, job.began_at or datetime.now(UTC)) for job in self._news.values()]
        begun += [(job.claimed, datetime.now(UTC)) for job, _ in functions]
        if not begun:
            return []
        lost = store.begin(begun)
        self._news.clear()
        gone = {claimed.execution_id for claimed in lost}
        moment = self._clock()
        for job, hand_over in functions:
            if job.claimed.execution_id not in gone:
                del self._functions[job.number]
                _start_clock(job, moment, moment)
                hand_over()
        return lost


def _start_clock(job: HeldJob, moment: float, present: float) -> None:
    job.started_at = moment
    job.began_at = datetime.now(UTC) - timedelta(seconds=present - moment)
    job.limit_s = job.claimed.record.limit_s
