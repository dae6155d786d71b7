"""The life of claimed jobs: admit, open, stream and deliver each one, stop it where that is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from redis import Redis

from engine import Completion
from jobs.common.keys import FILE, FUNCTION
from jobs.context import MAX_RESULT_BYTES, JobContext, Lease
from jobs.context.answer_memo import AnswerMemo
from jobs.context.served_model import ServedModel
from jobs.context.shard_bytes import ShardBytes
from jobs.context.shared_files import SharedFiles
from jobs.runs.holders import executions_key
from jobs.table import ALLOWED_FUNCTIONS as OWN_NAMES
from jobs.table import own_function, task_of
from jobs.tasks import OpenTask, Task
from worker.admission import Admission, FunctionCall
from worker.beginnings import Beginnings
from worker.engine_loop import Abort, Add, Order
from worker.errors import BadPayload, JobRefused, JobSetAside
from worker.faults import WorkerFault, WorkerFaults, is_fault
from worker.functions import FunctionPool, JobStopped
from worker.interrupts import check_interrupted
from worker.job_ends import JobEnds
from worker.packing import Packer, RunningJob
from worker.payload_budget import PayloadBudget
from worker.pool_calls import PoolCalls
from worker.store.claimed_job import ClaimedJob
from worker.store.job_store import JobStore
from worker.store.outcome import Outcome
from worker.store.results import Raised
from worker.store.timeouts import timeout_error
from worker.store.user_code import Callbacks, perform, strip_hooks
from worker.task_files import TaskFiles

_FUNCTIONS_LEAVE_S = 1.0
"""How long a worker that leaves waits for functions and callbacks to end that it has interrupted."""


@dataclass(frozen=True)
class Surroundings:
    """What jobs on this worker get and are limited by."""

    data_roots: tuple[str, ...]
    model: ServedModel
    check_sampling: Callable[[Any], Any]
    function_grace_s: float = 5.0
    file_timeout_s: float = 300.0
    files: SharedFiles = field(default_factory=SharedFiles)
    answers: AnswerMemo = field(default_factory=AnswerMemo)
    max_result_bytes: int = MAX_RESULT_BYTES
    shard_bytes: ShardBytes = field(default_factory=ShardBytes)


@dataclass
class Tally:
    """Jobs this worker has brought to an end, and completion tokens it has handed out."""

    finished: int = 0
    failed: int = 0
    completion_tokens: int = 0

    @property
    def ended(self) -> int:
        """All jobs that need no more work here."""
        return self.finished + self.failed


class JobRunner:
    """Owns every job that this worker holds. All methods belong to the I/O thread.

    functions: pool for user code and planning. enders: pool for callbacks and
    dependents, which must not wait for user code. All report back through `post`, which queues a call
    for the I/O thread. pool_client: what our own code uses in their threads. user_client: what user code
    gets.
    """

    def __init__(
        self,
        *,
        packer: Packer,
        budget: PayloadBudget,
        admission: Admission,
        surroundings: Surroundings,
        orders: SimpleQueue[Order],
        functions: FunctionPool,
        enders: FunctionPool,
        pool_client: Redis,
        user_client: Redis,
        callbacks: Callbacks,
        ends_store: JobStore,
        post: Callable[[Callable[[], None]], None],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._packer, self._budget = packer, budget
        self._admission, self._surroundings = admission, surroundings
        self._orders, self._functions, self._enders = orders, functions, enders
        self._pool_client, self._user_client = pool_client, user_client
        self._log, self._clock = log, clock
        self._calls = PoolCalls(post, self._close, log, clock)
        self._files = TaskFiles(packer, self._calls, surroundings.file_timeout_s, log, clock)
        self._beginnings = Beginnings(clock)
        self._ends = JobEnds(
            callbacks=callbacks,
            store=ends_store,
            pool=enders,
            calls=self._calls,
            ended=self._ended,
            max_result_bytes=surroundings.max_result_bytes,
            log=log,
            clock=clock,
        )
        self._callbacks = callbacks
        self._numbers = count()
        self._jobs: dict[int, RunningJob] = {}
        self._changed: dict[int, RunningJob] = {}
        self._surplus: list[ClaimedJob] = []
        self.faults = WorkerFaults()
        self.tally = Tally()

    @property
    def num_held(self) -> int:
        """Jobs claimed and not yet ended."""
        return len(self._jobs)

    @property
    def num_stuck(self) -> int:
        """Threads that were given up and go on in code that nothing can interrupt."""
        return self._functions.num_stuck + self._enders.num_stuck + self._files.num_stuck

    @property
    def held(self) -> list[ClaimedJob]:
        """What must be renewed, oldest first."""
        return [job.claimed for job in self._jobs.values()]

    # Begin

    def begin(self, claimed: ClaimedJob, lane: int) -> None:
        """Take up a job that was just claimed; `open_claimed` opens it in its turn."""
        job = RunningJob(next(self._numbers), claimed, lane)
        self._jobs[job.number] = job
        self._budget.add(job)

    def open_claimed(self) -> None:
        """Open the jobs whose turn it is."""
        for job in self._budget.take():
            self._admit(job)

    def _admit(self, job: RunningJob) -> None:
        claimed = job.claimed
        try:
            if isinstance(claimed.damage, JobRefused):
                raise claimed.damage
            if claimed.damage is not None:
                reason = f"{type(claimed.damage).__name__}: {claimed.damage}".removesuffix(": ")
                raise BadPayload(f"its hash in Redis is damaged ({reason}): enqueue it again")
            call = self._admission.admit(claimed.job)
            job.is_ours = call.name in OWN_NAMES
            task = task_of(call.name, call.args, call.kwargs)
        except JobRefused as error:
            strip_hooks(claimed.job)
            self._ends.fail(job, error)
        except Exception as error:  # noqa: BLE001  # a payload may be anything; it fails its own job
            self._ends.fail(job, error)
        else:
            job.is_function, job.is_file = task is None, task is not None and task.blocking
            if job.is_file and self._packer.free_files <= 0:
                self._leave_to_others(job, FILE)
            elif task is not None:
                self._open(job, task)
            elif self._packer.free_functions <= 0:
                self._leave_to_others(job, FUNCTION)
            else:
                self._run_function(job, call)

    def _leave_to_others(self, job: RunningJob, kind: str) -> None:
        self._let_go(job)
        self._surplus.append(replace(job.claimed, kind=kind))

    def take_surplus(self) -> list[ClaimedJob]:
        """Functions and files that were claimed beyond what the threads can take; the caller gives them back.

        What a job is shows only when it is claimed; it is marked then, and the next claims leave it there.
        """
        surplus, self._surplus = self._surplus, []
        return surplus

    def _context(self, job: RunningJob) -> JobContext:
        return JobContext(
            connection=self._pool_client,
            queue_name=job.claimed.queue_name,
            job_id=job.claimed.job_id,
            execution_id=job.claimed.execution.id,
            data_roots=self._surroundings.data_roots,
            model=self._surroundings.model,
            check_sampling=self._surroundings.check_sampling,
            files=self._surroundings.files,
            answers=self._surroundings.answers,
            shard_bytes=self._surroundings.shard_bytes,
            check_interrupted=check_interrupted,
            max_result_bytes=self._surroundings.max_result_bytes,
            lease=Lease(executions_key(job.claimed.job_id), job.claimed.execution.id),
        )

    def _open(self, job: RunningJob, task: Task) -> None:
        context = self._context(job)
        if job.is_file:
            self._files.open(job, task, context, self._opened)
        else:
            self._call_now(lambda: task.open(context), job, self._opened)

    def _opened(self, job: RunningJob, opened: OpenTask, error: BaseException | None) -> None:
        if error is not None:
            self._raised(job, error)
        else:
            job.open_task, job.requests = opened, opened.requests()
            if job.is_file:
                self._drop_payload(job)
            self._packer.stream(job)

    def _run_function(self, job: RunningJob, call: FunctionCall) -> None:
        own, context, rq_job = own_function(call.name), self._context(job), job.claimed.job
        rq_job.connection = self._user_client
        self._packer.function_started(job)
        function: Callable[[], Any] = partial(perform, rq_job)
        if own is not None:
            function = partial(own, context, *call.args, **call.kwargs)
        then = self._valued if own is None else self._own_valued
        args = (self._functions, function, job, then, self._function_ended, own is not None)
        self._beginnings.run(job, lambda: self._calls.submit(*args))

    def _function_ended(self, job: RunningJob, _: Any) -> None:
        self._packer.function_ended(job)

    def show_begun(self, store: JobStore) -> None:
        """Show in Redis which jobs have begun, and hand functions over. After a RedisError call it again."""
        self.drop(self._beginnings.show(store))

    def _valued(self, job: RunningJob, value: Any, error: BaseException | None) -> None:
        """The value of a user's function is known, or what it raised."""
        if error is not None:
            self._ends.fail(job, error)
        elif isinstance(value, Raised):
            self._ends.fail(job, value.error, value.text)
        else:
            self._ends.succeed(job, value)

    def _own_valued(self, job: RunningJob, value: Any, error: BaseException | None) -> None:
        """The value of a job of our own is known, or what our code raised."""
        if error is not None:
            self._raised(job, error)
        else:
            self.faults.passed(job.claimed)
            self._ends.succeed(job, value)

    def _raised(self, job: RunningJob, error: BaseException) -> None:
        """Our own code raised: the job fails, or goes back where the fault is that of this worker."""
        if not is_fault(error):
            self._ends.fail(job, error)
            return
        self._withdraw_all([job])
        fault = self.faults.met(job.claimed, error)
        self._log.error("job %s is given back, the fault is this worker's: %s", job.claimed.job_id, fault)

    def _call_now(
        self,
        function: Callable[[], Any],
        job: RunningJob,
        then: Callable[[RunningJob, Any, BaseException | None], None],
    ) -> None:
        try:
            value = function()
        except Exception as error:  # noqa: BLE001  # whatever a job raises is that job's failure
            then(job, None, error)
        else:
            then(job, value, None)

    # Stream and deliver

    def feed(self) -> None:
        """Send the engine what it has room for."""
        for job, index, request in self._packer.pull():
            add = Add(job.request_id(index), request.prompt, request.messages, request.sampling, job.lane)
            self._orders.put(add)
        self._changed.update((job.number, job) for job in self._packer.take_dry())
        changed, self._changed = self._changed, {}
        for number, job in changed.items():  # not all that are held: there may be thousands
            if job.closing or number not in self._jobs:
                continue
            if job.broken is not None:
                self._withdraw(job, JobStopped)
                self._raised(job, job.broken)
                continue
            if not job.needs_payload:
                self._drop_payload(job)
            if job.is_complete:
                self._collect(job)

    def started(self, request_ids: Iterable[str], moment: float) -> None:
        """The engine has scheduled the first sequences of these requests, at `moment` (monotonic seconds)."""
        for request_id in request_ids:
            job = self._jobs.get(int(request_id.partition(".")[0]))
            if job is not None and not job.closing:
                self._beginnings.began(job, moment)
                self._scheduled(job, int(request_id.partition(".")[2]))

    def _scheduled(self, job: RunningJob, index: int) -> None:
        job.unscheduled.discard(index)
        if not job.needs_payload:
            self._changed[job.number] = job

    def _drop_payload(self, job: RunningJob) -> None:
        """Hold no more of a job than its end takes: it may run for long beside others of its lane."""
        rq_job = job.claimed.job
        if job.is_ours and not self._callbacks.may_see(rq_job):
            rq_job.drop_payload(keeps_meta=job.is_file)  # which shows its progress there
            self._budget.keep(job, rq_job.hash_bytes)

    def deliver(self, completions: Iterable[Completion], moment: float) -> None:
        """Route what the engine finished in the step of `moment` to the jobs that asked for it."""
        for completion in completions:
            number, index = map(int, completion.request_id.split("."))
            job = self._jobs.get(number)
            if job is None or index not in job.open_requests:
                continue  # stopped or lost while the engine was at it
            self._beginnings.began(job, moment)  # one that was refused was never scheduled
            self.tally.completion_tokens += len(completion.token_ids)
            job.unscheduled.discard(index)
            samples = job.open_requests[index]
            samples.append(completion)
            if completion.finish_reason == "error" or len(samples) == job.samples[index]:
                self._packer.delivered(job, job.samples.pop(index))
                del job.open_requests[index]
                self._changed[job.number] = job
                assert job.open_task is not None
                try:
                    job.open_task.deliver(index, sorted(samples, key=lambda sample: sample.index))
                except Exception as error:  # noqa: BLE001  # fails this job, not the worker
                    job.broken = error

    def _collect(self, job: RunningJob) -> None:
        """Every completion is in: ask the task for the job's value."""
        assert job.open_task is not None
        self._beginnings.began(job, self._clock())  # where no request of it needed the engine
        job.closing = True
        if job.is_file:
            self._files.finish(job, self._own_valued)
        else:
            self._call_now(job.open_task.result, job, self._own_valued)

    # End

    def flush(self, store: JobStore) -> None:
        """Write the ends that wait, in one round trip. After a RedisError call it again."""
        self._calls.try_again()
        self._ends.flush(store)

    def _ended(self, job: RunningJob, outcome: Outcome | None, written: bool = True) -> None:
        """Forget a job. outcome: how it ended; None where another worker has counted that."""
        if job.number not in self._jobs:
            return
        self._let_go(job)
        self._beginnings.forget(job)
        if not written:
            self._log.warning(
                "job %s was cancelled or taken over: its end here was dropped", job.claimed.job_id
            )
        elif outcome is not None and outcome.status != "finished":
            self.tally.failed += 1
        elif outcome is not None:
            self.tally.finished += 1
            self._log.debug("%s: job %s finished", job.claimed.queue_name, job.claimed.job_id)
        self._close(job)

    def _close(self, job: RunningJob) -> None:
        opened, job.open_task = job.open_task, None
        if opened is None:
            return
        if job.is_file:
            self._files.close(job.claimed.job_id, opened)
        else:
            opened.close()

    def close(self, timeout_s: float) -> None:
        """End the threads; wait until the files of the jobs that ended are closed, at most `timeout_s`."""
        for pool in (self._files, self._functions, self._enders):
            pool.end()
        self._files.join(timeout_s)
        self._functions.join(_FUNCTIONS_LEAVE_S)
        self._enders.join(_FUNCTIONS_LEAVE_S)

    # Interrupt

    def _let_go(self, job: RunningJob) -> None:
        del self._jobs[job.number]
        self._budget.forget(job)

    def _withdraw(self, job: RunningJob, error: type[BaseException]) -> None:
        """Take a job's work back from the engine and the pools."""
        if job.request_ids:
            self._orders.put(Abort(job.request_ids))
        self._packer.forget(job)
        if self._beginnings.forget(job):
            self._packer.function_ended(job)
        job.open_requests.clear()
        job.exhausted = False
        if job.call is not None:
            job.call.interrupt(error)
        job.ticket = None

    def stop(self, job_id: str, execution_id: str | None = None) -> bool:
        """Stop one running job on a person's word. False: it is not running here, or already ending.

        execution_id: the one execution that is meant; None for whichever this worker has.
        """
        job = self._find(job_id, execution_id)
        if job is None or job.closing:
            return False
        self._withdraw(job, JobStopped)
        self._ends.stop(job)
        return True

    def _find(self, job_id: str, execution_id: str | None) -> RunningJob | None:
        """Return a job of this id. Of one that was enqueued again while it ran here there may be two."""
        found = (job for job in self._jobs.values() if job.claimed.job_id == job_id)
        return next((job for job in found if execution_id in (None, job.claimed.execution.id)), None)

    def check_deadlines(self) -> None:
        """Fail the jobs that have run longer than their timeout; give up threads that do not heed theirs."""
        moment = self._clock()
        self._files.check()
        self._give_up_threads()
        for job in list(self._jobs.values()):
            limit = job.limit_s
            if job.is_ours and job.is_function and not job.closing:
                self._files.interrupt_silent(job)
            if job.started_at is None or job.closing or limit <= 0 or moment - job.started_at <= limit:
                continue
            if job.call is not None and job.is_function:  # the pool reports its end
                if not job.interrupted:
                    job.interrupted = True
                    job.call.interrupt(timeout_error(limit))
                continue
            self._withdraw(job, timeout_error(limit))
            self._ends.fail(job, timeout_error(limit)())

    def _give_up_threads(self) -> None:
        grace_s = self._surroundings.function_grace_s
        pools = (self._functions, self._enders, self._files)
        for place in [place for pool in pools for place in pool.give_up_stuck(grace_s)]:
            self._log.error(
                "%s goes on %g s after its interrupt: given up, another thread takes its place (%d stuck)",
                place,
                grace_s,
                self.num_stuck,
            )

    def drop(self, lost: Sequence[ClaimedJob]) -> None:
        """Forget jobs that Redis no longer gives to this worker, unless their end is being written."""
        gone = {claimed.execution.id for claimed in lost}
        for job in [job for job in self._jobs.values() if job.claimed.execution.id in gone]:
            if job.closing:
                continue  # finish.lua or RQ's path finds out for itself
            self._log.warning("job %s was cancelled, deleted or taken over: stopped here", job.claimed.job_id)
            self._withdraw(job, JobStopped)
            self._let_go(job)
            if job.call is None:
                self._close(job)

    def take_over(self, claimed: ClaimedJob, deaths: int, fault: WorkerFault | None = None) -> None:
        """Bring a job to its end that is held here because its worker is gone or had a fault.

        It has taken too many workers with it, or only its dependents are to be queued.
        """
        job = RunningJob(next(self._numbers), claimed, 0, closing=True)
        self._jobs[job.number] = job
        if claimed.has_ended:
            self._ends.queue_dependents(job, None)
            return
        claimed.job.retries_left = None
        last = f", or met a fault, of which the last is {fault}" if fault is not None else ""
        self._ends.fail(
            job,
            JobSetAside(
                f"{deaths} workers died while they ran this job{last} "
                f"(TOKENMILL_MAX_WORKER_DEATHS={deaths}): it is set aside; look at the workers' logs before "
                "you enqueue it again"
            ),
        )

    def fail_stock_job(self, claimed: ClaimedJob, error: Exception) -> None:
        """Fail a job that one of RQ's own workers left behind, or retry it where it has retries left."""
        job = RunningJob(next(self._numbers), claimed, 0, closing=True)
        self._jobs[job.number] = job
        self._admission.keep_allowed_hooks(claimed.job)
        self._ends.fail(job, error)

    def _unstarted(self) -> list[RunningJob]:
        return [job for job in self._jobs.values() if job.started_at is None and not job.closing]

    @property
    def num_unstarted(self) -> int:
        """Jobs of which nothing has run yet."""
        return len(self._unstarted())

    def withdraw_unstarted(self) -> list[ClaimedJob]:
        """Let go of the jobs of which nothing has run yet; the caller gives them back."""
        return self._withdraw_all(self._unstarted())

    def withdraw_suspects(self, last_life: float) -> list[ClaimedJob]:
        """Let go of jobs that should run by themselves and have not begun; the caller gives them back."""
        return self._withdraw_all([job for job in self._unstarted() if job.claimed.deaths >= last_life])

    def withdraw_everything(self) -> list[ClaimedJob]:
        """Let go of every job whose end is not already on its way; the caller gives them back."""
        return self._withdraw_all(
            [job for job in self._jobs.values() if not job.closing or self._ends.is_waiting(job)]
        )

    def _withdraw_all(self, jobs: Sequence[RunningJob]) -> list[ClaimedJob]:
        for job in jobs:
            self._withdraw(job, JobStopped)
            self._ends.forget(job)
            self._let_go(job)
            if job.call is None:
                self._close(job)
        return [job.claimed for job in jobs]

    # Progress

    def changed_progress(self) -> list[tuple[ClaimedJob, dict[str, Any]]]:
        """`job.meta` of the running tasks that have moved since the last call."""
        changed = []
        for job in self._jobs.values():
            progress = job.open_task.progress() if job.open_task is not None else None
            if progress is not None and progress != job.shown_progress:
                job.shown_progress = progress
                meta = job.claimed.job.meta
                changed.append((job.claimed, {**meta, **progress} if isinstance(meta, dict) else progress))
        return changed
