"""The I/O thread's loop: it claims jobs, renews leases, checks deadlines, stops jobs and writes their ends."""

import enum
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from jobs.common.display import shown_error
from jobs.common.redis_info import is_full
from jobs.common.workers import RESTORED, RESTORED_TEXT
from worker.engine_thread.orders import EngineDied, Halt, SampledTokens, Stepped, Texts
from worker.errors import (
    EngineFailed,
    FaultySurroundings,
    IoThreadFailed,
    NameTaken,
    TooManyStuckThreads,
    WorkerError,
)
from worker.io_thread.claimer import Claimer
from worker.io_thread.faults import MAX_IN_A_ROW, PAUSE_S
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import POLL_S, Timer
from worker.io_thread.maintenance import Maintenance
from worker.io_thread.parts import Parts
from worker.io_thread.reporter import Reporter
from worker.logs import LastingTrouble
from worker.store.client import OUTAGES
from worker.store.records.claimed_job import Mode
from worker.store.stock_jobs import StockJobs
from worker.store.worker_record import WorkerRecord

PROGRESS_PERIOD_S = 0.5
"""Seconds between two writings of the jobs' progress."""

DEADLINE_PERIOD_S = 0.25
"""Seconds between two checks of the jobs' time limits."""

FIRST_BACKOFF_S = 0.1
"""Seconds before the first new attempt in an outage of Redis. Each further pause is twice as long."""

LAST_BACKOFF_S = 5.0
"""Seconds of the longest pause between two attempts."""

LEAVING_S = 1.0
"""Seconds that a leaving worker waits for ends and parts that are being written. Then it gives back their jobs too."""

CLOSING_S = 0.5
"""Before it exits, a worker waits this many seconds for threads that close files or were interrupted."""


class Phase(enum.Enum):
    """What the worker does with new jobs and with the jobs that it holds."""

    SERVING = "serving"
    DRAINING = "draining"  # warm shutdown: finish the jobs that run, claim nothing new
    LEAVING = "leaving"  # give back the jobs that run
    GONE = "gone"


class IoLoop:
    """The one thread that moves jobs between Redis and the engine. Any thread or signal handler may call `post`."""

    def __init__(self, parts: Parts, record: WorkerRecord, maintenance: Maintenance) -> None:
        self._queue_names = parts.queue_names
        self._store = parts.store
        self._poll_rates = parts.poll_rates
        self._budget = parts.budget
        self._orders = parts.orders
        self._limits = parts.limits
        self._log = parts.log
        self._events = parts.events
        self._clock = parts.clock

        self._runner = JobRunner(parts)
        self._claimer = Claimer(parts, self._runner)
        self._stock_jobs = StockJobs(parts.clients.io, parts.store, parts.redis_clock)
        self.reporter = Reporter(parts, record, self._runner)

        self._phase = Phase.SERVING
        self._thread = threading.Thread(target=self._guarded_run, name="tokenmill-io", daemon=True)

        self._outage = LastingTrouble(parts.log, "Redis answers again", clock=parts.clock)
        self._refusals = LastingTrouble(
            parts.log, "Redis takes all commands again", clock=parts.clock
        )
        self._backoff_s = FIRST_BACKOFF_S
        # Monotonic seconds from which Redis is called again after an error.
        self._retry_at = float("-inf")
        # Monotonic seconds at which draining ends and the jobs that still run are given back.
        self._drain_by = float("inf")
        # Monotonic seconds from which jobs are given back even if their ends or parts are being written.
        self._leave_by = float("inf")
        self._release_mode: Mode = "given_back"  # how the held jobs are given back

        self._renew_timer = Timer(parts.limits.renew_period_s)
        self._progress_timer = Timer(PROGRESS_PERIOD_S)
        self._deadline_timer = Timer(DEADLINE_PERIOD_S)
        self._sweep_timer = Timer(parts.limits.sweep_period_s)

        self._duties = (
            self._settle,
            self._runner.texts.write,
            self._show_record,  # comes before the claims, which need the number of workers that it counts
            self._claim_or_give_back,
            self._keep_leases,
            self._show_progress,
            self._take_up_abandoned,
            maintenance.do_what_is_due,
        )

        self.last_turn_at = parts.clock()
        """Monotonic seconds when the last turn began."""
        self.redis_ok_at: float | None = None
        """Monotonic seconds when all duties in Redis last succeeded; None if they never have."""
        self.failure: WorkerError | None = None
        """Why the worker leaves by itself. Its jobs are given back, unless this thread has raised."""

    def post(self, event: Any) -> None:
        """Post an event to the thread: a report of the engine's thread, or a call to make."""
        self._events.put(event)

    def stop_job(self, job_id: str, execution_id: str | None = None) -> None:
        """Stop a job because a person asked for it. Any thread may call this.

        execution_id: if given, the job is stopped only while this execution runs it.
        """

        def stop() -> None:
            """Stop the job. Called in the I/O thread."""
            if not self._runner.stop(job_id, execution_id):
                self._log.info("not working on job %s, stop command ignored", job_id)

        self.post(stop)

    def shut_down(self, cold: bool = False) -> None:
        """Have the worker leave once the jobs that run are finished. With `cold`, it gives these jobs back instead.

        Any thread or signal handler may call this.
        """
        if cold:
            self.post(partial(self._hand_back, "told to stop again"))
        else:
            self.post(self._start_draining)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    @property
    def jobs_ended(self) -> int:
        """The number of jobs that have ended on this worker."""
        return self._runner.tally.num_finished + self._runner.tally.num_failed

    @property
    def why_not_claiming(self) -> str | None:
        """Why the worker claims nothing, for example `rq suspend`; None if it claims. Any thread may ask."""
        if self._phase is not Phase.SERVING:
            return f"it takes no more jobs: {self._phase.value}"
        if self._claimer.hold == "suspended":
            return "suspended: `rq resume` lets it claim"
        if self._claimer.hold == RESTORED:
            return RESTORED_TEXT
        return None

    @property
    def warning(self) -> str:
        """What is wrong with Redis or with this machine's clock; "" if nothing is. Any thread may ask."""
        if self._outage.lasts or self._refusals.lasts:
            return "Redis does not answer, or does not take all that is written: the log says why"
        return self.reporter.clock_warning

    # The loop

    def _guarded_run(self) -> None:
        """Run the loop. Stop the threads and the engine after it, even after an error."""
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  # surfaces in the main thread, which exits with it
            self.failure = IoThreadFailed(f"the I/O thread raised {type(error).__name__}: {error}")
            self.failure.__cause__ = error
        finally:
            self._runner.threads.close(CLOSING_S)
            self._orders.put(Halt())

    def _run(self) -> None:
        """Repeat turns until it is time to leave."""
        while self.turn():
            pass
        self._show_stopped()

    def turn(self) -> bool:
        """Do everything that is due, once. The thread calls this until it returns False, which ends the thread."""
        self._take_events()
        if self._can_open:
            self._runner.open_claimed()
        self._runner.feed()

        moment = self._clock()
        self.last_turn_at = moment
        self._runner.journals.ask_if_due(moment)
        if self._deadline_timer.due(moment):
            self._check_deadlines()
        if self._phase is Phase.DRAINING and moment >= self._drain_by:
            self._hand_back("TOKENMILL_DRAIN_S is over")

        if moment >= self._retry_at or self._is_overdue(moment):
            self._talk_to_redis(moment)
        return self._phase is not Phase.GONE

    def _take_events(self) -> None:
        """Handle all waiting events. If there is none, and no job to open, wait up to POLL_S seconds for an event."""
        wait_s = 0 if self._can_open else POLL_S
        try:
            event = self._events.get(timeout=wait_s)
            while True:  # until there is no further event
                self._handle(event)
                event = self._events.get_nowait()
        except Empty:
            return

    @property
    def _can_open(self) -> bool:
        """Whether a claimed job can be opened now."""
        return self._phase is Phase.SERVING and self._budget.can_open

    def _check_deadlines(self) -> None:
        """Stop overdue jobs. Leave if too many threads cannot be interrupted."""
        self._runner.check_deadlines()
        num_stuck = self._runner.threads.num_stuck
        max_stuck = self._limits.max_stuck_threads
        if num_stuck > max_stuck:
            self._leave_because_of(TooManyStuckThreads(num_stuck, max_stuck))

    def _leave_because_of(self, failure: WorkerError) -> None:
        """Give back the jobs that run, then leave. failure: the error that the main thread raises."""
        if self._phase is not Phase.LEAVING:
            self.failure = failure
            self._log.error("%s", failure)
            self._start_leaving()

    def _handle(self, event: Any) -> None:
        """Handle an event: a report of the engine's thread, or a call to make."""
        if isinstance(event, Stepped):
            self.reporter.engine_stats = event.stats
            self._runner.streams.note_started(event.started, event.at)
            self._runner.streams.deliver(event.completions, event.at)
            self._runner.give_back_unprepared(event.faults)
            if event.progress is not None:
                self._runner.jobs.note_progress(event.progress)
        elif isinstance(event, SampledTokens):
            self._runner.journals.write(event)
        elif isinstance(event, Texts):
            self._runner.texts.note(event)
        elif isinstance(event, EngineDied):
            self._engine_died(event.error)
        else:
            event()

    def _engine_died(self, error: BaseException) -> None:
        """Leave because the engine raised. The worker's jobs are given back."""
        self._release_mode = "engine_died"
        self._log.error("the engine failed: %s", error)
        if self.failure is None:
            name = type(error).__name__
            self.failure = EngineFailed(
                f"the engine raised {name}: {error}; its jobs were given back"
            )
            self.failure.__cause__ = error
        self._start_leaving()

    def _start_draining(self) -> None:
        """Claim nothing more, give back the jobs that have not begun, and finish the jobs that have."""
        if self._phase is not Phase.SERVING:
            return
        self._phase = Phase.DRAINING

        num_unstarted = len(self._runner.jobs.unstarted())
        drain_s = self._limits.drain_s
        if drain_s is None:
            given_back_when = "at a second signal"
        else:
            given_back_when = f"after {drain_s:g} s or at a second signal"
            self._drain_by = self._clock() + drain_s
        self._log.info(
            "stopping: %d jobs that have begun are finished, %d that have not begun are given back now, "
            "nothing more is claimed; what still runs is given back %s",
            self._runner.num_held - num_unstarted,
            num_unstarted,
            given_back_when,
        )
        self._runner.releases.log_level = logging.INFO
        self.reporter.show_soon()

    def _hand_back(self, why: str) -> None:
        """Give back the jobs that run, then leave. why: for the log."""
        if self._phase is not Phase.LEAVING:
            self._log.info("%s: giving back the %d jobs that still run", why, self._runner.num_held)
            self._start_leaving()

    def _start_leaving(self) -> None:
        """Begin to give back the jobs that run."""
        if self._phase is not Phase.LEAVING:
            self._phase = Phase.LEAVING
            self._runner.releases.log_level = logging.INFO
            self._leave_by = self._clock() + LEAVING_S
            if self._release_mode != "engine_died":  # a dead engine reports no tokens for journals
                self._runner.journals.leave(self._clock())

    def _talk_to_redis(self, moment: float) -> None:
        """Carry out all duties that need Redis. An outage delays them, and the engine goes on meanwhile."""
        num_replies_before = self._runner.tally.num_replies
        try:
            refusals = []
            for duty in self._duties:
                refusal = self._carry_out(duty, moment)
                if refusal is not None:
                    refusals.append(refusal)
            if refusals:
                raise refusals[0]  # handled below like an outage, but only after every duty
            self._leave_if_done(moment)
            self._backoff_s = FIRST_BACKOFF_S

            # Many turns send nothing to Redis. Only a reply shows that an outage is over.
            has_replied = self._runner.tally.num_replies > num_replies_before
            if has_replied:
                self._outage.note_end()
            else:
                self._outage.note_absence()
            # A turn without a refusal does not prove that the refusals are over. The next turn may send a command that
            # Redis refuses.
            self._refusals.note_absence()
            self.redis_ok_at = moment
        except RedisError as error:
            self._back_off(moment, error)

    def _carry_out(self, duty: Callable[[float], None], moment: float) -> RedisError | None:
        """Carry out a duty. If Redis refuses one of its commands, return that error. Raises the error of an outage.

        A full Redis refuses some commands and takes others. So after a refusal the next duties are carried out too.
        """
        try:
            duty(moment)
        except OUTAGES as error:  # comes first, because some of these are ResponseErrors
            if is_full(error):
                return error
            raise
        except ResponseError as error:
            return error
        return None

    def _claim_or_give_back(self, moment: float) -> None:
        """Claim jobs while the worker serves. After that, give back the jobs that it will not finish."""
        if self._phase is Phase.SERVING:
            self._claimer.claim(moment)
        elif self._phase is Phase.DRAINING:
            unstarted = self._runner.withdraw_unstarted()
            self._runner.releases.give_back(unstarted, "given_back")
        elif not self._runner.journals.are_awaited(moment):
            # The worker leaves, and no longer waits for the last entries of the jobs' journals.
            withdrawn = self._runner.withdraw_everything(parts_too=self._is_overdue(moment))
            self._runner.releases.give_back(withdrawn, self._release_mode)

    def _settle(self, _: float) -> None:
        """Complete earlier work: write ends, show which jobs have begun, repeat unanswered claims, give jobs back."""
        self._runner.flush(self._store)
        if self._phase is not Phase.LEAVING:
            self._runner.show_begun(self._store)
        self._claimer.repeat_unanswered()
        # For these jobs the worker has no thread or no adapter. They do not count against --max-jobs.
        surplus = self._runner.take_surplus()
        self._claimer.stop_counting(len(surplus))
        self._runner.releases.give_back(surplus, "given_back")
        self._give_back_after_fault()

    def _give_back_after_fault(self) -> None:
        """Give back the jobs that met a fault of this worker. Leave after several faults in a row."""
        faults = self._runner.faults
        while faults.waiting:
            fault = faults.waiting[0]
            with self._runner.guard.around(fault.claimed):
                self._runner.releases.give_back_after_fault(fault)
            # Not earlier, so that after an outage of Redis the next turn gives the job back.
            del faults.waiting[0]
            self._claimer.stop_counting(1)
            self._claimer.pause(self._clock() + PAUSE_S)
            if faults.num_in_a_row >= MAX_IN_A_ROW:
                self._leave_because_of(FaultySurroundings(faults.num_in_a_row, str(fault)))

    def _back_off(self, moment: float, error: RedisError) -> None:
        """Log an error of Redis, and set when to call Redis again.

        If the worker has been leaving for too long, end the loop now.
        """
        is_refusal = isinstance(error, ResponseError | AuthenticationError)
        problem = "Redis refused" if is_refusal else "Redis did not answer"
        trouble = self._refusals if is_refusal else self._outage
        trouble.note(
            f"{problem} {type(error).__name__}",
            "%s (%s); trying again until that is over",
            problem,
            shown_error(error),
        )

        self._runner.tally.count_redis_error(error)
        self._retry_at = moment + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LAST_BACKOFF_S)

        # The leases of living workers may have run out during the outage. These workers need time to renew their
        # leases before the next sweep.
        self._sweep_timer.postpone(moment + self._limits.lease_s)
        if self._is_overdue(moment):
            self._leave(
                "left without giving back the running jobs: other workers take them up when their leases end"
            )

    # Duties

    def _keep_leases(self, moment: float) -> None:
        """Renew the leases of held jobs."""
        self._renew_timer.period_s = self._poll_rates.renew_s
        if self._renew_timer.due(moment):
            self._runner.renew(self._store)

    def _show_progress(self, moment: float) -> None:
        """Write the progress of jobs to Redis, and the throughput to the log."""
        if self._progress_timer.due(moment):
            self._runner.show_progress(self._store)
        self.reporter.log_throughput(moment)

    def _show_record(self, moment: float) -> None:
        """Write the worker's record to Redis. Begin to drain if another worker has this worker's name by now."""
        try:
            self.reporter.show(moment, self._phase is Phase.SERVING, self._claimer.hold)
        except NameTaken as error:
            if self._phase is Phase.SERVING:
                self._log.error("%s", error)
                self._start_draining()

    def _take_up_abandoned(self, moment: float) -> None:
        """Give back, or fail, the jobs of dead workers."""
        if self._phase is not Phase.SERVING or not self._sweep_timer.due(moment):
            return
        names = self._queue_names
        period_s = self._limits.sweep_period_s
        self._runner.releases.take_up_abandoned(names, period_s)
        # RQ's own workers may have died, too. Their jobs are failed or retried.
        for claimed, error in self._stock_jobs.take_over(names, period_s):
            with self._runner.guard.around(claimed):
                self._runner.fail_stock_job(claimed, error)

    # Leave

    def _is_overdue(self, moment: float) -> bool:
        """Whether leaving has taken too long, and no journal must be awaited any more.

        If so, the worker no longer waits for ends and parts to be written.
        """
        return moment >= self._leave_by and not self._runner.journals.are_awaited(moment)

    def _leave_if_done(self, moment: float) -> None:
        """Leave if there is a reason to, and no job is held. If leaving has taken too long, leave in any case."""
        if self._phase is Phase.LEAVING:
            if not self._runner.num_held or self._is_overdue(moment):
                self._leave("left without finishing the running jobs")
        elif self._runner.num_held:
            self._claimer.idle_since = moment
        elif self._phase is Phase.DRAINING:
            self._leave("stopping on request")
        elif self._claimer.has_reached_max_jobs:
            self._leave(f"finished {self._limits.max_jobs} jobs, quitting")
        elif self._limits.burst and self._claimer.hold:  # "suspended" or "restored"
            self._leave(
                f"{self._claimer.hold} in burst mode, quitting; there may be unfinished jobs on the queue"
            )
        elif self._limits.burst and self._claimer.has_emptied_queues():
            self._leave("done, quitting")
        elif self._is_idle_for_too_long(moment):
            self._leave(f"idle for {self._limits.max_idle_s:g} seconds, quitting")

    def _is_idle_for_too_long(self, moment: float) -> bool:
        """Whether --max-idle-time is over."""
        max_idle_s = self._limits.max_idle_s
        return max_idle_s is not None and moment - self._claimer.idle_since >= max_idle_s

    def _leave(self, why: str) -> None:
        """End the loop. why: for the log."""
        self._log.info(why)
        self._phase = Phase.GONE

    def _show_stopped(self) -> None:
        """Write the final statistics."""
        try:
            self.reporter.show_stopped()
        except NameTaken:
            return  # the statistics under this name are another worker's, and the log has said so
        except RedisError as error:
            self._log.error("could not write the last statistics: %s", error)
