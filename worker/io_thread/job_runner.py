"""JobRunner: leads claimed jobs from state to state. It admits, opens, streams, ends and gives back each job."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jobs.common.keys import FILE, FUNCTION
from jobs.errors import AdapterAwaited
from jobs.runs.end_notices import POSTING
from jobs.table import ALLOWED_FUNCTIONS as OWN_NAMES
from jobs.table import own_function, task_of
from jobs.tasks import OpenTask, Task
from worker.errors import JobRefused
from worker.io_thread.faults import WorkerFaults, is_fault
from worker.io_thread.held.beginnings import Beginnings
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs, JobState, ended_job
from worker.io_thread.held.job_guard import JobGuard
from worker.io_thread.held.journals import Journals
from worker.io_thread.held.streams import Inspections, Streams
from worker.io_thread.held.text_streams import TextStreams
from worker.io_thread.job_ends import JobEnds
from worker.io_thread.parts import Parts
from worker.io_thread.pool_calls import PoolCall, PoolCalls, PoolThreads, TaskFiles, Then
from worker.io_thread.releases import Releases
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.job_record import FunctionCall
from worker.store.records.outcome import CaughtError, Outcome
from worker.store.records.stored_job import timeout_error
from worker.store.user_code import perform
from worker.threads.functions import JobStopped

MAX_POSTS = 64
"""The most notices of ended runs that may wait on this worker. Further notices are left to other workers."""


class JobRunner:
    """Owns every job that this worker holds. Used by the I/O thread only."""

    def __init__(self, parts: Parts) -> None:
        log = parts.log
        clock = parts.clock
        post = parts.events.put
        traces = parts.environment.traces
        shared_context = parts.environment.shared_context

        self._packer = parts.packer
        self._budget = parts.budget
        self._admission = parts.admission
        self._environment = parts.environment
        self._callbacks = parts.callbacks
        self._clients = parts.clients
        self._log = log
        self._clock = clock
        self._functions = parts.functions
        self._enders = parts.enders
        self._webhook_pool = parts.callbacks.webhooks.pool
        self._traces = traces
        self.tally = parts.tally

        self.jobs = HeldJobs(traces)
        # Claimed jobs to give back, because this worker has no thread or no adapter for them.
        self._surplus = list[ClaimedJob]()
        self.faults = WorkerFaults()
        self.guard = JobGuard(log, parts.tally, self)

        self._calls = PoolCalls(post, self._close, self.guard, log, clock)
        self._files = TaskFiles(
            parts.packer, self._calls, shared_context.file_timeout_s, log, clock
        )
        inspections = Inspections(post, shared_context.checks)
        self.journals = Journals(
            self.jobs, self.guard, parts.limits.journal_s, parts.orders, post, log, clock
        )
        self.texts = TextStreams(self.jobs, self.guard, parts.store)
        self.threads = PoolThreads(parts, self._files, inspections)
        self._beginnings = Beginnings(self.guard, clock)
        self.streams = Streams(
            self.jobs,
            self.guard,
            parts.packer,
            self._beginnings,
            parts.orders,
            inspections,
            parts.tally,
        )
        self._ends = JobEnds(parts, self._calls, self.guard, self._forget_ended)
        self.releases = Releases(parts, self.guard, self._ends, self._end_at_once)

    @property
    def num_held(self) -> int:
        """The number of jobs that this worker has claimed and that have not ended."""
        return len(self.jobs)

    def num_rows_done(self) -> int:
        """Return how many rows the held jobs have answered so far."""
        num_rows = 0
        for job in self.jobs:
            with self.guard.around(job):
                num_rows += job.num_rows_done
        return num_rows

    @property
    def held(self) -> list[ClaimedJob]:
        """The held jobs, oldest first."""
        return [job.claimed for job in self.jobs]

    # Open

    def add(self, claimed: ClaimedJob, lane: int) -> None:
        """Hold a job that was just claimed. `open_claimed` opens it later, after the jobs that were claimed earlier."""
        job = self.jobs.add(claimed, lane)
        with self.guard.around(job):
            self._budget.add(job)
            self.jobs.begin_trace(job)

    def open_claimed(self) -> None:
        """Open the claimed jobs for which there is room."""
        for job in self._budget.take():
            with self.guard.around(job):
                self._budget.note_opening(job)
                self._admit(job)
                self._budget.note_opened(job)

    def _admit(self, job: HeldJob) -> None:
        """Read the job's call, then run its function or open its task. A job that may not run here is failed."""
        try:
            call = self._read_call(job)
            job.function_name = call.name
            job.is_ours = call.name in OWN_NAMES
            task = task_of(call.name, call.args, call.kwargs)
        except JobRefused as error:
            # A refused job fails for good, and none of its callbacks and webhooks is called.
            job.replace_record(job.claimed.record.without_hooks())
            self._ends.fail(job, error)
        except Exception as error:  # noqa: BLE001  # a payload may be anything; a bad one fails only its own job
            self._ends.fail(job, error)
        else:
            if task is None:
                self._run_function(job, call)
            else:
                self._open(job, task)

    def _read_call(self, job: HeldJob) -> FunctionCall:
        """Read a job's payload, and return the job's call. Raises JobRefused if the job may not run here."""
        job.claimed.check_hash()
        payload = job.claimed.record.payload()
        job.payload_bytes = len(payload)
        return self._admission.admit(job.claimed, payload)

    def _run_function(self, job: HeldJob, call: FunctionCall) -> None:
        """Run a job's function in a thread, once Redis shows that the job has begun."""
        sends_notice = job.function_name == POSTING  # the notice of a run's end
        if sends_notice:
            pool = self._webhook_pool
            has_room = pool.num_waiting < MAX_POSTS
        else:
            pool = self._functions
            has_room = self._packer.free_functions > 0
        if not has_room:
            self._leave_unopened(job, FUNCTION)
            return

        job.note_function()
        if not sends_notice:
            self._packer.add_function(job)

        def hand_over() -> None:
            """Give the function to a thread."""
            if job.is_ours:
                function = self._bound_function(job, call)
                pool_call = PoolCall(
                    function=function,
                    then=self._our_code_returned,
                    on_return=self._stop_counting_function,
                    is_ours=True,
                )
            else:
                user_job = job.for_user_code(self._clients.user)
                pool_call = PoolCall(
                    function=partial(perform, user_job),
                    then=self._user_function_returned,
                    on_return=self._stop_counting_function,
                )
            self._calls.submit(pool, job, pool_call)

        self._beginnings.run_once_shown(job, hand_over)

    def _bound_function(self, job: HeldJob, call: FunctionCall) -> Callable[[], Any]:
        """Return one of our own functions with its context and arguments."""
        function = own_function(call.name)
        assert function is not None, call.name
        context = self._environment.context(job.claimed, self._clients.pool)
        return partial(function, context, *call.args, **call.kwargs)

    def _stop_counting_function(self, job: HeldJob, _: Any = None) -> None:
        """Stop counting a job's function. A notice was never counted, because notices have threads of their own."""
        sends_notice = job.function_name == POSTING
        if not sends_notice:
            self._packer.remove_function(job)

    def _open(self, job: HeldJob, task: Task) -> None:
        """Open a task, in a thread if it reads files."""
        if task.blocking and self._packer.free_files <= 0:
            self._leave_unopened(job, FILE)
            return
        job.note_opening(is_file=task.blocking)
        context = self._environment.context(job.claimed, self._clients.pool)
        if context.journal is not None and job.claimed.record.is_followed:
            # The pieces of the job's text bear this digest, so that a later execution knows whose tokens they are.
            job.owner_digest = context.journal.owner_digest
        if job.is_file:
            self._files.open(job, task, context, self._opened)
        else:
            self._call_now(lambda: task.open(context), job, self._opened)

    def _leave_unopened(self, job: HeldJob, kind: str) -> None:
        """Let go of a job for which this worker has no thread. `take_surplus` returns the job.

        kind: FUNCTION or FILE. The next claims pass over jobs of this kind until a thread is free.
        """
        self._let_go(job)
        self._surplus.append(replace(job.claimed, kind=kind))

    def take_surplus(self) -> list[ClaimedJob]:
        """Return the jobs that this worker has claimed but cannot run now. The caller gives them back."""
        surplus = self._surplus
        self._surplus = []
        return surplus

    def _opened(self, job: HeldJob, opened: OpenTask, error: BaseException | None) -> None:
        """Stream the requests of a task that was opened. If opening it raised, end the job or give it back."""
        if error is not None:
            self._handle_error(job, error)
            return
        job.open_task = opened
        self.streams.open(job)
        if job.is_file:
            self._drop_payload(job)  # the requests come from the file

    def show_begun(self, store: JobStore) -> None:
        """Show in Redis which jobs have begun, then hand functions to threads.

        After a RedisError, call this method again.
        """
        lost_jobs = self._beginnings.show(store)
        self.drop(lost_jobs)

    def _user_function_returned(
        self, job: HeldJob, value: Any, error: BaseException | None
    ) -> None:
        """End a job with the value or error of its user's function."""
        if error is not None:
            self._ends.fail(job, error)
        elif isinstance(value, CaughtError):
            self._ends.fail(job, value.error, value.text)
        else:
            self._ends.succeed(job, value)

    def _our_code_returned(self, job: HeldJob, value: Any, error: BaseException | None) -> None:
        """End a job with the value or error of our own code: a function, or a task's result."""
        if error is not None:
            self._handle_error(job, error)
        else:
            self.faults.note_success(job.function_name)
            self._ends.succeed(job, value)

    def _handle_error(self, job: HeldJob, error: BaseException) -> None:
        """Fail a job in which our code raised. If this worker is at fault, or lacks the adapter, give the job back."""
        if isinstance(error, AdapterAwaited):
            self._give_back_without_adapter(job, error)
            return
        if not is_fault(error):
            self._ends.fail(job, error)
            return
        self._withdraw_all([job])
        fault = self.faults.note(job.claimed, job.function_name, error)
        self._log.error(
            "job %s is given back, the fault is this worker's: %s", job.claimed.job_id, fault
        )

    def _give_back_without_adapter(self, job: HeldJob, error: AdapterAwaited) -> None:
        """Give back a job whose adapter has other files on this worker than the job needs.

        First read the folder of adapters again, so that from now on this worker claims only jobs whose adapters it has.
        If the job does not pin the files of its adapter, its next execution uses the new files.
        """
        self._log.warning("job %s is given back: %s", job.claimed.job_id, error.log_text)
        self._withdraw(job, JobStopped)

        def then(job: HeldJob, _: Any, failure: BaseException | None) -> None:
            """Let go of the job, even if the folder of adapters could not be read."""
            self._surplus += self._withdraw_all([job])

        refresh = self._environment.shared_context.adapters.refresh
        self._calls.submit(self._enders, job, PoolCall(refresh, then, is_ours=True))

    def give_back_unprepared(self, faults: Sequence[tuple[str, BaseException]]) -> None:
        """Give back the jobs whose requests this worker could not prepare. faults: request ids and errors."""
        for request_id, error in faults:
            job, _ = self.jobs.of_request(request_id)
            if job is not None and not job.is_ending:
                self.guard.call(job, self._handle_error, job, error)

    def _call_now(self, function: Callable[[], Any], job: HeldJob, then: Then) -> None:
        """Call a function in this thread, and call `then` with the function's value or error."""
        try:
            value = function()
        except Exception as error:  # noqa: BLE001  # whatever a job raises is that job's failure
            then(job, None, error)
        else:
            then(job, value, None)

    # Stream and deliver

    def feed(self) -> None:
        """Send requests to the engine as far as it has room, and go on with the jobs that have changed."""
        self.guard.for_each(self.streams.feed(), self._advance)

    def _advance(self, job: HeldJob) -> None:
        """Go on with a job whose requests have changed: fail it, drop its payload, or collect its value."""
        if job.error is not None:
            self._withdraw(job, JobStopped)
            self._handle_error(job, job.error)
            return
        if not job.needs_payload:
            self._drop_payload(job)
        if job.is_complete:
            self._collect(job)

    def _drop_payload(self, job: HeldJob) -> None:
        """Free the memory of a job's payload, as the job may run for long. A payload that callbacks may see is kept."""
        record = job.claimed.record
        if job.is_ours and not self._callbacks.may_get_job(record):
            if record.is_heavy:  # dropping a small payload would save nothing
                job.replace_record(record.without_payload())
            # From now on the unpacked payload does not count.
            self._budget.set_bytes(job, job.claimed.record.hash_bytes)

    def _collect(self, job: HeldJob) -> None:
        """Make the job's value, now that every completion is here."""
        assert job.open_task is not None
        # A job without requests begins only now. Any other job has begun already.
        self._beginnings.note_begun(job, self._clock())
        job.state = JobState.COLLECTING
        if job.is_file:
            self._files.finish(job, self._our_code_returned)
        else:
            self._call_now(job.open_task.result, job, self._our_code_returned)

    # End

    def flush(self, store: JobStore) -> None:
        """Make the delayed calls again, and write the waiting ends. After a RedisError, call this method again."""
        self._calls.try_again()
        self._ends.writer.flush(store)

    def _forget_ended(self, job: HeldJob, outcome: Outcome | None, is_written: bool) -> None:
        """Forget a job and count its end.

        outcome: None if another worker has counted the end.
        is_written: whether Redis has taken the end; False if this worker has lost the job.
        """
        if job not in self.jobs:
            return
        self._let_go(job)
        self._beginnings.forget(job)

        if not is_written:
            self.tally.count_lost_claim()
            self._log.warning(
                "job %s was cancelled or taken over: its end here was dropped", job.claimed.job_id
            )
        elif outcome is not None:
            ended = ended_job(job, outcome)
            self.tally.count_job(ended, job.num_rows_done)
            if self._traces is not None and job.trace is not None:
                self._traces.note_end(job.trace, ended, written_at=time.time())
            self._log.debug(
                "%s: job %s %s", job.claimed.queue_name, job.claimed.job_id, outcome.status
            )
        self._close(job)

    def _close(self, job: HeldJob) -> None:
        """Close the job's task, if it is open."""
        open_task = job.open_task
        job.open_task = None
        if open_task is None:
            return
        if job.is_file:
            self._files.close(job.claimed.job_id, open_task)
        else:
            open_task.close()

    # While jobs are held

    def renew(self, store: JobStore) -> None:
        """Extend the leases of all jobs, and drop jobs that are no longer ours."""

        def renew_leases(jobs: Sequence[HeldJob]) -> Sequence[ClaimedJob]:
            """Extend leases. Returns the jobs that this worker no longer holds."""
            return store.renew([job.claimed for job in jobs])

        lost_jobs = self.guard.batch(list(self.jobs), job_of=lambda job: job, call=renew_leases)
        self.drop(lost_jobs)

    def show_progress(self, store: JobStore) -> None:
        """Write the progress of jobs to Redis, if it has changed since the last call."""
        changed: list[tuple[HeldJob, dict[str, Any]]] = []
        for job in self.jobs:
            with self.guard.around(job):
                progress = job.changed_progress()
                if progress is not None:
                    changed.append((job, progress))

        def show(entries: Sequence[tuple[HeldJob, dict[str, Any]]]) -> Sequence[bool]:
            """Write progress. Returns for each job whether this worker still holds it."""
            return store.show_progress([(job.claimed, progress) for job, progress in entries])

        def job_of(entry: tuple[HeldJob, dict[str, Any]]) -> HeldJob:
            """Return the job that an entry is about."""
            job, _ = entry
            return job

        self.guard.batch(changed, job_of=job_of, call=show)

    # Interrupt

    def _let_go(self, job: HeldJob) -> None:
        """Stop holding a job."""
        self.jobs.remove(job)
        self._budget.forget(job)

    def _withdraw(self, job: HeldJob, error: type[BaseException]) -> None:
        """Take a job's work back from the engine and the pools."""
        self.streams.withdraw(job)
        was_waiting_for_thread = self._beginnings.forget(job)
        if was_waiting_for_thread:
            self._stop_counting_function(job)
        job.withdraw(error)

    def stop(self, job_id: str, execution_id: str | None = None) -> bool:
        """Stop one running job because a person asked for it. Returns False if it does not run here.

        execution_id: if given, the job is stopped only while this execution runs it.
        """
        job = self.jobs.find(job_id, execution_id)
        if job is None or job.is_ending:
            return False
        with self.guard.around(job):
            self._withdraw(job, JobStopped)
            self._ends.stop(job)
        return True

    def check_deadlines(self) -> None:
        """Interrupt file calls that have been silent for too long, and fail overdue jobs.

        A thread that ignores its interrupt is given up.
        """
        self._files.check()
        self.threads.give_up_stuck()
        self.guard.for_each(self.jobs, partial(self._check_deadline, moment=self._clock()))

    def _check_deadline(self, job: HeldJob, moment: float) -> None:
        """Interrupt or fail a job that has run for longer than its limit. moment: monotonic seconds now.

        A function of our own is also interrupted if it has been silent for too long.
        """
        if job.is_ending:
            return
        if job.is_ours and job.is_function:
            self._files.interrupt_silent(job)
        if not job.is_over_limit(moment):
            return

        error_class = timeout_error(job.limit_s)
        if job.is_function and job.call is not None:  # its thread reports the end
            if not job.was_interrupted:
                job.interrupt_function(error_class)
        else:
            self._withdraw(job, error_class)
            self._ends.fail(job, error_class())

    def drop(self, lost_jobs: Sequence[ClaimedJob]) -> None:
        """Forget jobs that this worker has lost in Redis, unless their end is being written."""
        execution_ids = {claimed.execution_id for claimed in lost_jobs}
        self.guard.for_each(self.jobs.of_executions(execution_ids), self._drop)

    def _drop(self, job: HeldJob) -> None:
        """Forget a job that this worker has lost, unless its end is being written."""
        if job.is_ending:
            return  # finish.lua notices the loss when it writes the end
        self._log.warning(
            "job %s was cancelled, deleted or taken over: stopped here", job.claimed.job_id
        )
        self.tally.count_lost_claim()
        self._withdraw_all([job])

    def fail_stock_job(self, claimed: ClaimedJob, error: Exception) -> None:
        """Fail a job that one of RQ's own workers left behind, or retry it if it has retries left."""

        def fail(job: HeldJob) -> None:
            """Fail the job. If one of its callbacks may not run here, none of its callbacks is called."""
            job.replace_record(self._admission.with_allowed_callbacks(claimed.record))
            self._ends.fail(job, error)

        self._end_at_once(claimed, fail)

    def _end_at_once(self, claimed: ClaimedJob, end: Callable[[HeldJob], None]) -> None:
        """Hold a job only to end it."""
        job = self.jobs.add(claimed)
        job.state = JobState.ENDING  # so nothing may stop it
        with self.guard.around(job):
            self.jobs.begin_trace(job)
            end(job)

    # For the guard: errors that nobody foresaw

    def holds(self, job: HeldJob) -> bool:
        """Whether this worker still holds the job."""
        return job in self.jobs

    def fail_unforeseen(self, job: HeldJob, error: Exception) -> None:
        """End the job as failed after an error that nobody foresaw."""
        self._ends.writer.forget(job)
        self._budget.forget(job)
        self._withdraw(job, JobStopped)
        self._packer.free_places(job)
        self._handle_error(job, error)

    def abandon(self, job: HeldJob) -> None:
        """Let go of the job without writing anything. Raises nothing; the job's lease runs out."""
        steps: list[Callable[[HeldJob], object]] = [
            self.streams.withdraw,
            self._beginnings.forget,
            lambda job: job.withdraw(JobStopped),
            self._ends.writer.forget,
            self._budget.forget,
            self._packer.free_places,
            self._close,
        ]
        if job in self.jobs:
            self.jobs.remove(job)
        for step in steps:
            with suppress(Exception):  # the error that led here is in the log
                step(job)

    # Give back

    def withdraw_unstarted(self) -> list[ClaimedJob]:
        """Let go of the jobs that have not begun. The caller gives them back."""
        return self._withdraw_all(self.jobs.unstarted())

    def withdraw_suspects(self, suspect_deaths: float) -> list[ClaimedJob]:
        """Let go of the suspects (see Claimer) that have not begun. The caller gives these jobs back."""
        suspects = [job for job in self.jobs.unstarted() if job.claimed.deaths >= suspect_deaths]
        return self._withdraw_all(suspects)

    def withdraw_everything(self, parts_too: bool) -> list[ClaimedJob]:
        """Let go of all jobs except those whose end is being computed or written. The caller gives the jobs back.

        parts_too: whether to let go also of jobs whose part is being written. If not, a job stays here for as long as
        an object store refuses its part.
        """

        def may_go(job: HeldJob) -> bool:
            """Whether to let go of the job now."""
            if not job.is_ending:
                return True
            if self._ends.writer.is_waiting(job):
                return True  # its end is computed, but is not being written at this moment
            is_writing_part = job.state is JobState.COLLECTING
            return parts_too and is_writing_part

        return self._withdraw_all([job for job in self.jobs if may_go(job)])

    def _withdraw_all(self, jobs: Sequence[HeldJob]) -> list[ClaimedJob]:
        """Let go of jobs, and take back all work for them. Returns them for the caller to give back."""
        withdrawn = []
        for job in jobs:
            with self.guard.around(job):
                self._withdraw(job, JobStopped)
                self._ends.writer.forget(job)
                self._let_go(job)
                if job.call is None:  # otherwise the task is closed when the call returns
                    self._close(job)
                withdrawn.append(job.claimed)
        return withdrawn
