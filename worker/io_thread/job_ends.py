"""Ends jobs: calls callbacks, has the end written, then queues dependents and sends webhooks."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from redis.exceptions import RedisError

from jobs.common.display import message_of, shown_error
from jobs.errors import Fault, JobsError, ResultTooLarge, fault_line
from jobs.runs.plans.names import run_and_shard
from worker.errors import FileTimeout, JobRefused, JobSetAside
from worker.io_thread.held.end_writer import EndWriter
from worker.io_thread.held.held_jobs import HeldJob, JobState
from worker.io_thread.held.job_guard import JobGuard
from worker.io_thread.parts import Parts
from worker.io_thread.pool_calls import PoolCall, PoolCalls
from worker.store.client import is_server_fault
from worker.store.records.outcome import (
    CaughtError,
    EndStatus,
    FinishReply,
    Outcome,
    is_small,
    pack,
    traceback_text,
)
from worker.store.records.stored_job import JobTimeoutException

MAX_REASON_CHARS = 400
"""The most characters of an error's message in the log."""

_FREE_OF_PROMPTS = (FileTimeout, JobRefused, JobSetAside, JobTimeoutException)
"""Errors whose messages never quote a prompt. Their messages are logged."""

_FAULT_KNOWN = (JobRefused, JobSetAside, ResultTooLarge)
"""Errors that say whose fault they are, even if a user's function raises them."""


def fault_of(job: HeldJob, error: BaseException) -> Fault | None:
    """Return whose fault a failure is; None for an error of a user's function, to which RQ's own rules apply."""
    if isinstance(error, _FAULT_KNOWN):
        return error.fault
    if not job.is_ours:
        return None
    return error.fault if isinstance(error, JobsError) else "server"


def log_text(job: HeldJob, error: BaseException) -> str:
    """Return one line that says why a job failed: only the error's name if its message may quote a prompt."""
    name = type(error).__name__
    if isinstance(error, ResultTooLarge) or (job.is_ours and isinstance(error, JobsError)):
        message = error.log_text  # this text quotes no prompt
    elif isinstance(error, _FREE_OF_PROMPTS) or (job.is_ours and isinstance(error, OSError)):
        message = message_of(error)
    else:
        return name
    in_one_line = " ".join(message.split())
    return f"{name}: {in_one_line[:MAX_REASON_CHARS]}"


class OnEnded(Protocol):
    """Called when nothing is left to do for a job.

    outcome: None if another worker has counted the job's end.
    is_written: whether Redis has taken the end; False if the job was cancelled or taken over.
    """

    def __call__(self, job: HeldJob, outcome: Outcome | None, is_written: bool) -> None:
        """Let the job go, and count its end."""


class JobEnds:
    """Ends jobs. The I/O thread calls every method. Pool threads call callbacks and queue dependents."""

    def __init__(self, parts: Parts, calls: PoolCalls, guard: JobGuard, on_ended: OnEnded) -> None:
        self._callbacks = parts.callbacks
        self._store = parts.ends_store
        self._pool = parts.enders
        self._calls = calls
        self._on_ended = on_ended
        self._log = parts.log
        self._clock = parts.clock
        self._notify_failed = partial(parts.environment.notify_failed, parts.clients.pool)
        self._max_result_bytes = parts.environment.shared_context.max_result_bytes
        self.writer = EndWriter(self._take_reply, guard, parts.log, parts.clock)

    def succeed(self, job: HeldJob, value: Any) -> None:
        """End a job with its value."""
        self._end(job, "finished", value)

    def fail(self, job: HeldJob, error: BaseException, text: str | None = None) -> None:
        """End a job with its error. The job is not retried if another try would fail in the same way.

        text: the traceback, if a thread of user code has made it; by default it is made here.
        """
        fault = fault_of(job, error)
        job.reason = type(error).__name__
        self._log.warning(
            "%s: job %s failed: %s",
            job.claimed.queue_name,
            job.claimed.job_id,
            log_text(job, error),
        )

        if fault is not None:
            note = fault_line(fault)
            if note not in getattr(error, "__notes__", ()):  # a JobsError has this note already
                error.add_note(note)
                if text is not None:
                    text += f"{note}\n"
        if text is None:
            text = traceback_text(error)
        may_retry = fault is None or fault == "server"
        self._end(job, "failed", text, error, may_retry=may_retry)

    def stop(self, job: HeldJob) -> None:
        """End a job that a person has stopped."""
        self._end(
            job,
            "stopped",
            f"Job stopped by user, its sequences were aborted.\n{fault_line('cancelled')}",
        )

    def _end(
        self,
        job: HeldJob,
        status: EndStatus,
        value: Any,
        error: BaseException | None = None,
        may_retry: bool = False,
    ) -> None:
        """End a job: send notices if a run fails with the job, call the job's callback, then have the end written."""
        job.state = JobState.ENDING
        working_s = 0.0
        if job.began_clock_s is not None:
            working_s = self._clock() - job.began_clock_s

        outcome = Outcome(
            job.claimed,
            status,
            value,
            ended_at=datetime.now(UTC),
            working_s=working_s,
            began_at=job.began_at,
            may_retry=may_retry,
        )

        has_failed = status != "finished" and outcome.is_final
        if has_failed and run_and_shard(job.claimed.job_id) is not None:
            self._send_notices(job, outcome, error)
        else:
            self._finish(job, outcome, error)

    def _send_notices(self, job: HeldJob, outcome: Outcome, error: BaseException | None) -> None:
        """Send the notices of the run's failure before the end is written.

        If this worker dies in between, the next worker sends the notices again.
        """

        def then(job: HeldJob, _: Any, failure: BaseException | None) -> None:
            """Go on with the end, even if no notice could be sent."""
            if failure is not None:
                reason = shown_error(failure)
                self._log.error(
                    "job %s: no notice was sent that its run has failed: %s",
                    job.claimed.job_id,
                    reason,
                )
            self._finish(job, outcome, error)

        why_failed = "it was stopped" if error is None else log_text(job, error)
        notify = partial(self._notify_failed, job.claimed, why_failed)
        self._calls.submit(self._pool, job, PoolCall(notify, then, is_ours=True))

    def _finish(self, job: HeldJob, outcome: Outcome, error: BaseException | None) -> None:
        """Call the job's callback if there is one, pack the value, and have the end written."""
        if self._callbacks.has_callback(outcome, job.user_job):
            self._call_back(job, outcome, error)
            return
        # A failed or stopped job has an error text in place of a value. `_packed` leaves the text as it is.
        has_error_text = outcome.status != "finished"
        if has_error_text or (job.is_ours and is_small(outcome.value)):
            try:
                self._write(job, self._packed(outcome, known_small=True))
            except ResultTooLarge as too_large:
                self.fail(job, too_large)
        else:  # in a thread, because the value may be large or hold objects whose methods are user code
            self._calls.submit(
                self._pool, job, PoolCall(partial(self._packed, outcome), self._then_write)
            )

    def _packed(self, outcome: Outcome, known_small: bool = False) -> Outcome:
        """Return the outcome with its value packed. known_small: see `pack`. Raises ResultTooLarge."""
        has_value = outcome.status == "finished" and outcome.returned_retry is None
        if not has_value:
            return outcome
        return replace(outcome, packed=pack(outcome.value, self._max_result_bytes, known_small))

    def _then_write(self, job: HeldJob, outcome: Any, failure: BaseException | None) -> None:
        """Have an outcome with a packed value written. If the value could not be packed, fail the job."""
        if failure is not None:
            self.fail(job, failure)
        else:
            self._write(job, outcome)

    def _call_back(self, job: HeldJob, outcome: Outcome, error: BaseException | None) -> None:
        """Call the user's callback in a thread, then have the end written."""
        exc_info: tuple[Any, Any, Any] = (None, None, None)
        if error is not None:
            exc_info = (type(error), error, error.__traceback__)
        rq_job = job.for_user_code(self._callbacks.user_client)

        def call_back() -> Outcome | CaughtError | None:
            """Call the callback. Returns None if this worker no longer holds the job."""
            # `show_begun` extends the job's lease, and returns the job if this worker no longer holds it.
            began_at = outcome.began_at or outcome.ended_at
            lost_jobs = self._store.show_begun([(outcome.claimed, began_at)])
            if lost_jobs:
                return None
            try:
                self._callbacks.call_back(outcome, rq_job, exc_info)
            except BaseException as failure:  # noqa: BLE001  # user code raises what it likes
                return CaughtError(failure, traceback_text(failure))
            return self._packed(outcome)

        def then(job: HeldJob, reply: Any, failure: BaseException | None) -> None:
            """Have the end written, with what the callback has changed."""
            if failure is not None:
                self._callback_raised(job, outcome, failure)
            elif isinstance(reply, CaughtError):
                self._callback_raised(job, outcome, reply.error, reply.text)
            elif reply is None:
                self._on_ended(job, outcome, is_written=False)
            else:
                self._write(job, reply)

        # Only our own call of `show_begun` raises errors of Redis here. After such an error the call is made again.
        self._calls.submit(self._pool, job, PoolCall(call_back, then, again_on=RedisError))

    def _callback_raised(
        self, job: HeldJob, outcome: Outcome, failure: BaseException, text: str | None = None
    ) -> None:
        """Fail a job whose success callback raised, as RQ does.

        If the callback of a failed or stopped job raised, only replace the traceback of the job's end.
        text: the callback's traceback; by default it is made of `failure`.
        """
        if outcome.status == "finished":
            self.fail(job, failure, text)
            return
        if text is None:
            text = traceback_text(failure)
        self._write(job, replace(outcome, value=text))

    def _write(self, job: HeldJob, outcome: Outcome) -> None:
        """Have the end written, with the changes that the user's code made to its copy of the job."""
        try:
            outcome = outcome.with_policy_of(job.user_job)
        except Exception as error:  # noqa: BLE001  # a user's object may raise anything
            outcome = outcome.unwritable(error)
            self._log.warning(
                "%s: job %s failed: the values that its code left in the job cannot be written (%s)",
                job.claimed.queue_name,
                job.claimed.job_id,
                type(error).__name__,
            )
        self.writer.add(job, outcome)

    def _take_reply(self, job: HeldJob, outcome: Outcome, reply: FinishReply) -> None:
        """Go on with a job, as the server's reply to the job's end requires."""
        if reply == "refused":
            self._log.error("job %s: the server refuses to write its end", outcome.claimed.job_id)
        if reply in ("lost", "refused"):
            self._on_ended(job, outcome, is_written=False)
        elif reply == "dependents":
            self.queue_dependents(job, outcome)
        else:
            self._send_webhooks(job, outcome)

    def queue_dependents(self, job: HeldJob, outcome: Outcome | None, cursor: int = 0) -> None:
        """Queue the dependents of a job whose end is written, a page at a time; then close the job.

        cursor: where the page begins; 0 for the first page.
        """
        claimed = job.claimed

        def queue_page() -> int:
            """Queue one page of dependents, and return the next page's cursor.

            After the last page, close the job and return 0.
            """
            next_cursor = 0
            try:
                next_cursor = self._store.queue_dependents(claimed, cursor)
            except Exception as error:
                if is_server_fault(error):
                    raise
                # Another try would fail in the same way, so the job is closed without its dependents.
                self._log.error(
                    "job %s: its dependents cannot be queued: %s",
                    claimed.job_id,
                    shown_error(error),
                )
            if not next_cursor:
                self._store.close(claimed)
            return next_cursor

        def then(job: HeldJob, next_cursor: int, failure: BaseException | None) -> None:
            """Queue the next page. After the last page, send webhooks and let the job go."""
            if failure is not None:
                raise failure  # the guard ends the job, because nobody foresaw this error
            if next_cursor:
                self.queue_dependents(job, outcome, next_cursor)
            else:
                self._send_webhooks(job, outcome)

        self._calls.submit(self._pool, job, PoolCall(queue_page, then, again_on=RedisError))

    def _send_webhooks(self, job: HeldJob, outcome: Outcome | None) -> None:
        """Queue the webhooks of a job whose end is written, then let the job go. outcome: see `OnEnded`."""
        webhooks = job.claimed.record.webhooks
        if job.user_job is not None:  # the user's code may have changed the webhooks
            webhooks = tuple(job.user_job.webhooks)
        if outcome is None or not webhooks:
            self._on_ended(job, outcome, is_written=True)
            return
        rq_job = job.for_user_code(self._callbacks.user_client)
        send = partial(self._callbacks.send_webhooks, outcome, rq_job)

        def then(job: HeldJob, _: Any, failure: BaseException | None) -> None:
            """Let the job go, even if its webhooks could not be queued."""
            self._on_ended(job, outcome, is_written=True)

        self._calls.submit(self._pool, job, PoolCall(send, then))
