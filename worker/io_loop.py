"""The I/O thread: claim, leases, deadlines, stop and cancel, and finish. It alone talks to Redis for jobs."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError, ResponseError

from worker.engine_loop import EngineDied, Halt, Order, Stepped
from worker.errors import FaultySurroundings, TooManyStuckThreads, WorkerError
from worker.faults import MAX_IN_A_ROW, PAUSE_S, WorkerFault
from worker.job_runner import JobRunner
from worker.packing import Packer
from worker.payload_budget import PayloadBudget
from worker.store.claimed_job import ClaimedJob, Mode, Wanted
from worker.store.client import OUTAGES
from worker.store.job_store import JobStore
from worker.store.presence import Presence
from worker.store.registries import Registries
from worker.store.scripts import is_wrong_type
from worker.store.stock_jobs import StockJobs
from worker.timer import Timer
from worker.upkeep import Upkeep

POLL_S = 0.05
ALONE_S = 10.0
"""How long a job on its last life runs by itself: what it does kills soon, and others wait for it."""
LOOK_S = 0.2
"""How often a lane that can open no further file looks for prompts between those that wait in its queue."""
STATS_PERIOD_S = 2.0
PROGRESS_PERIOD_S = 0.5
DEADLINE_PERIOD_S = 0.25
LOG_PERIOD_S = 10.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
LEAVING_S = 5.0
"""How long a cold shutdown waits for ends that are being written, and any for files that are being closed."""


class Phase(enum.Enum):
    """What the worker does with new jobs."""

    SERVING = "serving"
    DRAINING = "draining"  # warm shutdown: finish what runs, take nothing new
    LEAVING = "leaving"  # give back what runs
    GONE = "gone"


class Shutdown(enum.Enum):
    """How a person asked the worker to stop."""

    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True)
class StopJob:
    """A person asked for one job to be stopped; with an execution's id, only while that one runs it."""

    job_id: str
    execution_id: str | None = None


@dataclass(frozen=True)
class Limits:
    """When the worker leaves by itself, and the periods of its duties, in seconds."""

    burst: bool
    max_jobs: int | None
    max_idle_s: float | None
    lease_s: int
    max_worker_deaths: int
    max_stuck_threads: int
    drain_s: float | None

    @property
    def last_life(self) -> float:
        """Deaths after which a job runs by itself; never, where the first death is the last."""
        return self.max_worker_deaths - 1 if self.max_worker_deaths > 1 else float("inf")

    @property
    def renew_period_s(self) -> float:
        """Often enough that a lease survives two failed tries, and that a cancelled job is noticed soon."""
        return min(self.lease_s / 4, 2.0)

    @property
    def sweep_period_s(self) -> float:
        """How often abandoned jobs are looked for: adds to the lease in the time to recovery."""
        return min(self.lease_s / 4, 10.0)


class IoLoop:
    """One thread that moves jobs between Redis and the engine's orders.

    Everything reaches it through `post`, safe from any thread and from signal handlers.
    """

    def __init__(
        self,
        *,
        queue_names: Sequence[str],
        store: JobStore,
        registries: Registries,
        runner: JobRunner,
        packer: Packer,
        budget: PayloadBudget,
        presence: Presence,
        orders: SimpleQueue[Order],
        limits: Limits,
        upkeep: Upkeep,
        stock: StockJobs,
        log: logging.Logger,
        events: SimpleQueue[Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue_names, self._store, self._registries = queue_names, store, registries
        self._runner, self._packer, self._budget = runner, packer, budget
        self._presence, self._orders, self._limits, self._log = presence, orders, limits, log
        self._events, self._clock, self._upkeep, self._stock = events, clock, upkeep, stock
        self._phase = Phase.SERVING
        self._thread = threading.Thread(target=self._guarded_run, name="tokenmill-io", daemon=True)
        self._stats: Mapping[str, int] = {}
        self._tokens: dict[int, str] = {}
        self._foreign = [0] * len(queue_names)
        self._claimed = self._turn = 0
        self._suspended = self._shown_busy = False
        self._idle_since = clock()
        self._suspect: ClaimedJob | None = None
        self._alone_until = float("-inf")
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = float("-inf")
        self._drain_by = self._leave_by = float("inf")
        self._to_release: list[ClaimedJob] = []
        self._release_mode: Mode = "given_back"
        self._faults: list[WorkerFault] = []
        self._polls = [Timer(POLL_S) for _ in queue_names]
        self._looks = [Timer(LOOK_S) for _ in queue_names]
        self._renew = Timer(limits.renew_period_s)
        self._show = Timer(STATS_PERIOD_S)
        self._progress = Timer(PROGRESS_PERIOD_S)
        self._deadlines = Timer(DEADLINE_PERIOD_S)
        self._sweep = Timer(limits.sweep_period_s)
        self._report = Timer(LOG_PERIOD_S)
        self._keys = Timer(STATS_PERIOD_S)
        self._duties = (
            self._look_at_keys,
            self._settle,
            self._take_or_give,
            self._keep_leases,
            self._show_progress,
            self._show_presence,
            self._take_up_abandoned,
            upkeep.do_what_is_due,
        )
        self.error: BaseException | None = None
        self.engine_error: BaseException | None = None
        self.failure: WorkerError | None = None
        """Why the worker leaves by itself, with what it holds given back."""

    def post(self, event: Any) -> None:
        """Tell the thread something: Stepped, EngineDied, StopJob, Shutdown, or a call to make."""
        self._events.put(event)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    @property
    def jobs_ended(self) -> int:
        """Jobs this worker brought to an end."""
        return self._runner.counts.ended

    # The loop

    def _guarded_run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  # surfaces in the main thread, which exits with it
            self.error = error
        finally:
            self._runner.threads.close(LEAVING_S)
            self._orders.put(Halt())

    def _run(self) -> None:
        while self._phase is not Phase.GONE:
            self._take_events()
            if self._can_open:
                self._runner.open_claimed()
            self._runner.feed()
            moment = self._clock()
            if self._deadlines.due(moment):
                self._check_deadlines()
            if self._phase is Phase.DRAINING and moment >= self._drain_by:
                self._hand_back("TOKENMILL_DRAIN_S is over")
            if moment >= self._retry_at:
                self._talk_to_redis(moment)
        self._say_goodbye()

    def _take_events(self) -> None:
        """Handle everything that has happened; wait one poll period where nothing has."""
        try:
            event = self._events.get(timeout=0 if self._can_open else POLL_S)
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except Empty:
            return

    @property
    def _can_open(self) -> bool:
        return self._phase is Phase.SERVING and self._budget.can_open

    def _check_deadlines(self) -> None:
        self._runner.check_deadlines()
        stuck, most = self._runner.threads.num_stuck, self._limits.max_stuck_threads
        if stuck > most:
            self._leave_because_of(TooManyStuckThreads(stuck, most))

    def _leave_because_of(self, failure: WorkerError) -> None:
        if self._phase is not Phase.LEAVING:
            self.failure = failure
            self._log.error("%s", failure)
            self._start_leaving()

    def _handle(self, event: Any) -> None:
        if isinstance(event, Stepped):
            self._stats = event.stats
            self._runner.streams.started(event.started, event.at)
            self._runner.streams.deliver(event.completions, event.at)
        elif isinstance(event, StopJob):
            if not self._runner.stop(event.job_id, event.execution_id):
                self._log.info("not working on job %s, stop command ignored", event.job_id)
        elif isinstance(event, EngineDied):
            self._log.error("the engine failed: %s", event.error)
            self.engine_error = event.error
            self._start_leaving()
        elif event is Shutdown.WARM:
            self._start_draining()
        elif event is Shutdown.COLD:
            self._hand_back("told to stop again")
        else:
            event()

    def _start_draining(self) -> None:
        if self._phase is not Phase.SERVING:
            return
        self._phase = Phase.DRAINING
        drain_s, unstarted = self._limits.drain_s, self._runner.num_unstarted
        rest = "at a second signal" if drain_s is None else f"after {drain_s:g} s or at a second signal"
        self._log.info(
            "stopping: %d jobs that have begun are finished, %d that have not are given back now, nothing "
            "more is claimed; what still runs is given back %s",
            self._runner.num_held - unstarted,
            unstarted,
            rest,
        )
        self._drain_by = self._clock() + (float("inf") if drain_s is None else drain_s)
        self._show.postpone(float("-inf"))

    def _hand_back(self, why: str) -> None:
        if self._phase is not Phase.LEAVING:
            self._log.info("%s: giving back the %d jobs that still run", why, self._runner.num_held)
            self._start_leaving()

    def _start_leaving(self) -> None:
        if self._phase is not Phase.LEAVING:
            self._phase = Phase.LEAVING
            self._leave_by = self._clock() + LEAVING_S

    def _talk_to_redis(self, moment: float) -> None:
        """All duties that need the server. An outage delays them; the engine goes on meanwhile."""
        try:
            failures = [self._failure_of(duty, moment) for duty in self._duties]
            if not any(failures):
                failures.append(self._failure_of(self._leave_if_done, moment))
            for failure in filter(None, failures):
                if not is_wrong_type(failure) or not self._check_keys():
                    raise failure
            self._backoff_s = FIRST_BACKOFF_S
        except RedisError as error:
            self._ride_out(moment, error)

    def _failure_of(self, duty: Callable[[float], None], moment: float) -> RedisError | None:
        """Carry out a duty; return the error of one that Redis refused: it is of no concern to the others."""
        try:
            duty(moment)
        except OUTAGES:
            raise
        except ResponseError as error:
            return error
        return None

    def _look_at_keys(self, moment: float) -> None:
        """Set aside what is of no use in the keys that all jobs share, and say so."""
        if self._keys.due(moment):
            self._check_keys()
            self._store.quarantine.tell(self._log)

    def _check_keys(self) -> int:
        return self._store.quarantine.check(self._queue_names)

    def _take_or_give(self, moment: float) -> None:
        if self._phase is Phase.LEAVING:
            self._give_back_everything()
        elif self._phase is Phase.DRAINING:
            self._release(self._runner.withdraw_unstarted(), "given_back")
        else:
            self._claim(moment)

    def _settle(self, _: float) -> None:
        """Complete what earlier turns began: ends to write, claims without a reply, jobs to release."""
        self._runner.flush(self._store)
        if self._phase is not Phase.LEAVING:
            self._runner.show_begun(self._store)
        if self._tokens:  # whatever has changed since: jobs that nobody renews would count as abandoned
            self._take_up(list(self._tokens), [0] * len(self._tokens))
        late = self._runner.take_surplus()
        self._claimed -= len(late)
        self._release(late, self._release_mode)
        self._give_back_faulty()

    def _give_back_faulty(self) -> None:
        """Put jobs back that met a fault of this worker's; leave where that happens time and again."""
        self._faults += self._runner.faults.take()
        deaths = self._limits.max_worker_deaths
        while self._faults:
            fault = self._faults[0]
            mode: Mode = "fault" if fault.counts else "given_back"
            for claimed in self._store.release([fault.claimed], mode, deaths):
                self._runner.take_over(claimed, deaths, fault)
            del self._faults[0]
            self._claimed -= 1
            for poll in self._polls:
                poll.postpone(self._clock() + PAUSE_S)
            if self._runner.faults.in_a_row >= MAX_IN_A_ROW:
                self._leave_because_of(FaultySurroundings(self._runner.faults.in_a_row, str(fault)))

    def _ride_out(self, moment: float, error: RedisError) -> None:
        self._log.error(
            "Redis did not answer (%s: %s); trying again in %.1f s",
            type(error).__name__,
            error,
            self._backoff_s,
        )
        self._retry_at = moment + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LAST_BACKOFF_S)
        # Leases ran out meanwhile also of workers that live: they get the time to renew them.
        self._sweep.postpone(moment + self._limits.lease_s)
        if moment >= self._leave_by:
            self._leave("left without giving back what ran: other workers take it up when its leases end")

    # Claim

    def _claim(self, moment: float) -> None:
        """Claim for every lane that has room; again at the next turn while jobs come."""
        if not self._jobs_left():
            return
        lanes = [lane for lane in range(len(self._queue_names)) if self._room(lane) > 0]
        # A lane without room leaves its timer alone: it claims in the very turn in which it has some.
        due = [lane for lane in lanes if self._is_due(lane, moment)]
        lanes = [lane for lane in lanes if lane in due or self._packer.claimable_files(lane)]
        if not due or self._is_suspended() or self._has_suspect(moment):
            return
        # In one round trip, but where --max-jobs counts: what one lane leaves over is the next one's.
        turns = [lanes] if self._limits.max_jobs is None else [[lane] for lane in lanes]
        if sum([self._claim_for(turn) for turn in turns]):
            self._idle_since = moment
            self._runner.feed()

    def _is_due(self, lane: int, moment: float) -> bool:
        """Whether it is time to claim; where no file may come, to look for prompts between them."""
        timer = self._polls[lane] if self._packer.claimable_files(lane) else self._looks[lane]
        return timer.due(moment)

    def _claim_for(self, lanes: Sequence[int]) -> int:
        rooms = [min(self._room(lane), self._jobs_left()) for lane in lanes]
        return self._take_up(lanes, rooms)

    def _room(self, lane: int) -> int:
        return self._packer.claim_room(lane) if self._budget.has_room(lane) else 0

    def _has_suspect(self, moment: float) -> bool:
        """Whether a job runs by itself, to show whether it is what kills its workers; ALONE_S at most."""
        if self._runner.num_held != 1 or self._runner.held[0].deaths < self._limits.last_life:
            return False
        if self._suspect is not self._runner.held[0]:
            self._suspect, self._alone_until = self._runner.held[0], moment + ALONE_S
        return moment < self._alone_until

    def _take_up(self, lanes: Sequence[int], rooms: Sequence[int]) -> int:
        """Claim for lanes, at most `rooms` each; return how many jobs were kept."""
        wanted = []
        is_idle = self._runner.num_held == 0
        self._turn += 1
        for place, (lane, room) in enumerate(zip(lanes, rooms, strict=True)):
            # Kept until the call has come through: sent again, it claims nothing twice.
            token = self._tokens.setdefault(lane, uuid4().hex[:24])
            alone = is_idle and place == self._turn % len(lanes)
            places = self._packer.free_functions, self._packer.claimable_files(lane)
            wanted.append(Wanted(self._queue_names[lane], room, token, alone, *places))
        claims = self._store.claim(wanted, self._limits.last_life)
        for lane, claim in zip(lanes, claims, strict=True):
            del self._tokens[lane]
            self._foreign[lane] = claim.num_foreign
            self._claimed += len(claim.jobs)
            if claim.jobs:
                self._polls[lane].postpone(float("-inf"))
                self._looks[lane].postpone(self._clock() + POLL_S)
            for job in claim.jobs:
                self._runner.begin(job, lane)
        self._runner.open_claimed()
        surplus = self._runner.take_surplus()
        if self._runner.num_held > 1:  # a job of another lane came with one that should run by itself
            surplus += self._runner.withdraw_suspects(self._limits.last_life)
        self._claimed -= len(surplus)
        self._release(surplus, "given_back")
        self._runner.show_begun(self._store)
        return sum(len(claim.jobs) for claim in claims) - len(surplus)

    def _jobs_left(self) -> int:
        most = self._limits.max_jobs
        return 1_000_000 if most is None else max(0, most - self._claimed)

    def _is_suspended(self) -> bool:
        suspended = self._registries.is_suspended()
        if suspended != self._suspended:
            self._log.info(
                "suspended, run `rq resume` to resume" if suspended else "resumed, claiming jobs again"
            )
            self._suspended = suspended
        return suspended

    # Duties

    def _keep_leases(self, moment: float) -> None:
        if self._renew.due(moment):
            self._runner.drop(self._store.renew(self._runner.held))

    def _show_progress(self, moment: float) -> None:
        if self._progress.due(moment):
            self._store.show_progress(self._runner.jobs.changed_progress())
        if self._runner.num_held and self._report.due(moment):
            self._log_throughput()

    def _show_presence(self, moment: float) -> None:
        busy = self._runner.num_held > 0
        if not self._show.due(moment) and busy == self._shown_busy:
            return
        self._shown_busy = busy
        held = self._runner.held
        state = "busy" if held else ("suspended" if self._suspended else "idle")
        state = state if self._phase is Phase.SERVING else "draining"
        self._presence.show(state, held[0].job_id if held else None, self._counters())

    def _counters(self) -> dict[str, Any]:
        counts = self._runner.counts
        return {
            **self._stats,
            "jobs_held": self._runner.num_held,
            "jobs_finished": counts.finished,
            "jobs_failed": counts.failed,
            "completion_tokens": self._runner.streams.completion_tokens,
            "stuck_threads": self._runner.threads.num_stuck,
        }

    def _log_throughput(self) -> None:
        counts = self._runner.counts
        self._log.info(
            "%d jobs held, %d finished, %d failed; %d sequences running, %d waiting; %d tokens answered",
            self._runner.num_held,
            counts.finished,
            counts.failed,
            self._stats.get("num_running", 0),
            self._stats.get("num_waiting", 0),
            self._runner.streams.completion_tokens,
        )

    def _take_up_abandoned(self, moment: float) -> None:
        if self._phase is not Phase.SERVING or not self._sweep.due(moment):
            return
        deaths = self._limits.max_worker_deaths
        names = self._queue_names
        for claimed in self._store.reclaim_abandoned(names, self._limits.sweep_period_s, deaths):
            self._runner.take_over(claimed, deaths)
        for claimed, error in self._stock.take_over(names, self._limits.sweep_period_s):
            self._runner.fail_stock_job(claimed, error)

    # Leave

    def _leave_if_done(self, moment: float) -> None:
        if self._phase is Phase.LEAVING:
            if not self._runner.num_held or moment >= self._leave_by:
                self._leave("left without finishing what ran")
        elif self._runner.num_held:
            self._idle_since = moment
        elif self._phase is Phase.DRAINING:
            self._leave("stopping on request")
        elif self._limits.max_jobs is not None and self._claimed >= self._limits.max_jobs:
            self._leave(f"finished {self._limits.max_jobs} jobs, quitting")
        elif self._limits.burst and self._suspended:
            self._leave("suspended in burst mode, quitting; there may be unfinished jobs on the queue")
        elif self._limits.burst and self._has_taken_all():
            self._leave("done, quitting")
        elif self._limits.max_idle_s is not None and moment - self._idle_since >= self._limits.max_idle_s:
            self._leave(f"idle for {self._limits.max_idle_s:g} seconds, quitting")

    def _has_taken_all(self) -> bool:
        """Whether the queues hold nothing but what only workers with another model may run."""
        return self._registries.count_queued(self._queue_names) <= sum(self._foreign)

    def _leave(self, why: str) -> None:
        self._log.info(why)
        self._phase = Phase.GONE

    def _give_back_everything(self) -> None:
        """Put the jobs back; ends that are being written may still come through."""
        if self.engine_error is not None:
            self._release_mode = "engine_died"
        self._release(self._runner.withdraw_everything(), self._release_mode)

    def _release(self, held: list[ClaimedJob], mode: Mode) -> None:
        """Put jobs back into their queues; kept for the next turn where Redis does not answer."""
        self._to_release.extend(held)
        if not self._to_release:
            return
        deaths = self._limits.max_worker_deaths
        for claimed in self._store.release(self._to_release, mode, deaths):
            self._runner.take_over(claimed, deaths)
        level = logging.DEBUG if self._phase is Phase.SERVING else logging.INFO
        self._log.log(level, "gave back %d jobs", len(self._to_release))
        self._to_release.clear()

    def _say_goodbye(self) -> None:
        """Leave the final statistics behind."""
        try:
            self._store.quarantine.tell(self._log)
            self._presence.show("stopped", None, self._counters())
        except RedisError as error:
            self._log.error("could not write the last statistics: %s", error)
