"""Claims jobs. Decides when to claim, for which lanes, and how many jobs, so that each worker gets a fair share."""

from collections.abc import Sequence
from importlib.metadata import version
from uuid import uuid4

from jobs.common.keys import FORMAT
from jobs.common.workers import RESTORED, RESTORED_TEXT
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import POLL_S, Timer
from worker.io_thread.parts import Parts
from worker.store.records.claimed_job import Claim, ClaimRequest, Hold
from worker.store.registries import Registries

FORGET_S = 10.0
"""Seconds after the last untouched job until a worker counts all workers of the queue again. See FairShare."""


class FairShare:
    """Decides how many jobs of one queue this worker leaves to other workers. Used by the I/O thread only.

    Claims divide a queue evenly among its workers (see claim.lua). But the other workers may be full or gone, or serve
    another model. Then the first job that was left to them is still in the queue at the next poll. Such a job is called
    untouched. After the first untouched job, this worker rounds its share up. Each further untouched job halves the
    number of workers by which this worker divides the queue. After FORGET_S seconds without an untouched job, this
    worker divides by all workers again.
    """

    def __init__(self) -> None:
        self._num_untouched = 0
        self._first_left = ""
        self._left_at = float("-inf")  # since when `_first_left` is watched
        self._last_untouched_at = float("-inf")

    def divisor(self, num_workers: int, moment: float) -> tuple[int, bool]:
        """Return the number of workers to divide the queue by, and whether this worker rounds its share up.

        num_workers: the workers that serve the queue. moment: monotonic seconds.
        """
        if moment - self._last_untouched_at > FORGET_S:
            self._num_untouched = 0
        # An untouched job was left to other workers, and none of them has claimed it. After the first such job, this
        # worker rounds its share up. Each further one halves the number of workers.
        num_halvings = max(0, self._num_untouched - 1)
        num_takers = max(1, num_workers >> num_halvings)
        rounds_up = self._num_untouched > 0
        return num_takers, rounds_up

    def note_left(
        self, first_left: str, moment: float, poll_s: float, claimed_ids: Sequence[str] = ()
    ) -> None:
        """Note which job a claim left to other workers.

        first_left: the id of the first job that was left, "" for none. poll_s: seconds between two polls of a worker.
        claimed_ids: the ids of the claimed jobs. One of them may be the job that was left by the previous claim.
        """
        # The watched job is the one that the previous claim left first. It was still in the queue if this claim left
        # it again, or took it.
        watched_id = self._first_left
        was_in_queue = watched_id == first_left or watched_id in claimed_ids
        if watched_id == "" or not was_in_queue:
            self._left_at = moment  # from now on another job is watched
        elif first_left and moment - self._left_at >= poll_s:
            # Each other worker has polled since then, and none has taken the job.
            self._num_untouched += 1
            self._last_untouched_at = moment
            self._left_at = moment
        self._first_left = first_left


_NO_LIMIT = 1_000_000
"""Stands for the limit of a worker without --max-jobs. It is more than any claim takes."""

ISOLATION_S = 10.0
"""Seconds for which a suspect runs alone. Other jobs wait meanwhile. A job that kills its worker does so soon."""

PROMPT_POLL_S = 0.2
"""Seconds between two polls of a lane that can open no further file. Such a poll finds jobs without
files that wait behind jobs with files."""


class Claimer:
    """Claims jobs for every lane that has room, and hands them to the runner. Used by the I/O thread only.

    A lane is the rank of one of the worker's queues; 0 is the most urgent.
    A job is a suspect if `Limits.suspect_deaths` workers have died while they held it. It runs alone for a while.
    """

    def __init__(self, parts: Parts, runner: JobRunner) -> None:
        self._queue_names = parts.queue_names
        self._store = parts.store
        self._registries = Registries(parts.clients.io)
        self._poll_rates = parts.poll_rates
        self._shares = [FairShare() for _ in parts.queue_names]
        self._packer = parts.packer
        self._budget = parts.budget
        self._runner = runner

        self._limits = parts.limits
        self._log = parts.log
        self._clock = parts.clock

        # By lane: the token of a claim whose reply has not come yet.
        self._tokens: dict[int, str] = {}
        # By lane: the number of the lane's jobs that the worker held after the last claim, if that claim left jobs to
        # other workers; else 0. The lane claims again as soon as half of these jobs have ended.
        self._num_held_at_claim = [0] * len(parts.queue_names)
        # By lane: the number of jobs that the last claim left to workers with another model or version.
        self._num_foreign = [0] * len(parts.queue_names)
        self._warned_lanes = set[int]()  # lanes for which a warning of newer jobs was logged
        self._num_claimed = 0  # jobs that count against --max-jobs
        self._num_calls = 0  # calls of claim.lua

        # The latest suspect: its execution, and the monotonic seconds until which it runs alone.
        self._suspect_execution = ""
        self._isolated_until = float("-inf")

        self._poll_timers = [Timer(POLL_S) for _ in parts.queue_names]
        self._prompt_poll_timers = [Timer(PROMPT_POLL_S) for _ in parts.queue_names]
        self._paused_until = float("-inf")  # monotonic seconds

        self.hold: Hold = ""
        """Why no worker may claim, as the last claim found; "" if workers may claim."""
        self.idle_since = parts.clock()
        """When jobs were last claimed or held; at first, when the worker began."""

    def claim(self, moment: float) -> None:
        """Claim for every lane that has room. While jobs come, the loop's next turn claims again."""
        is_paused = moment < self._paused_until
        if is_paused or not self._jobs_left():
            return

        lanes_with_room = [lane for lane in range(len(self._queue_names)) if self._room(lane) > 0]
        # `_is_due` starts a lane's timer again. It is asked only for lanes with room, so that a full lane whose period
        # is over claims as soon as it has room.
        due_lanes = [lane for lane in lanes_with_room if self._is_due(lane, moment)]
        if not due_lanes or self._has_suspect(moment):
            return
        # The other lanes with room claim in the same round trip. A lane that may claim no file is left out until it is
        # due, because it has a slower timer.
        lanes = []
        for lane in lanes_with_room:
            may_claim_files = self._packer.claimable_files(lane) > 0
            if lane in due_lanes or may_claim_files:
                lanes.append(lane)

        if self._limits.max_jobs is None:
            num_jobs = self._claim_for(lanes)  # in one round trip
        else:
            # One lane after the other, because each lane may claim only what the lanes before it have left.
            num_jobs = 0
            for lane in lanes:
                num_jobs += self._claim_for([lane])
        if num_jobs > 0:
            self.idle_since = moment
            self._runner.feed()

    def repeat_unanswered(self) -> None:
        """Repeat the claims whose replies were lost, to learn which jobs they claimed.

        Until then nobody renews the leases of these jobs.
        """
        lanes = list(self._tokens)
        if lanes:
            # With room for 0 jobs, a claim only returns the jobs that its token has claimed before.
            self._claim_and_open(lanes, rooms=[0] * len(lanes))

    def stop_counting(self, num_jobs: int) -> None:
        """Stop counting `num_jobs` claimed jobs against --max-jobs."""
        self._num_claimed -= num_jobs

    def pause(self, until: float) -> None:
        """Claim nothing before `until`, not even for a lane with room."""
        self._paused_until = until

    @property
    def has_reached_max_jobs(self) -> bool:
        """Whether --max-jobs allows no further job."""
        return self._limits.max_jobs is not None and self._num_claimed >= self._limits.max_jobs

    def has_emptied_queues(self) -> bool:
        """Whether the queues hold nothing, or only jobs for workers with another model or version."""
        num_queued = self._registries.count_queued(self._queue_names)
        num_for_other_workers = sum(self._num_foreign)
        return num_queued <= num_for_other_workers

    def _is_due(self, lane: int, moment: float) -> bool:
        """Whether a lane should claim now. If so, its timer starts again.

        A lane that may claim no file has a slower timer, because it can claim only other jobs. A lane is also due when
        half of the jobs that it held after its last claim have ended.
        """
        may_claim_files = self._packer.claimable_files(lane) > 0
        timer = self._poll_timers[lane] if may_claim_files else self._prompt_poll_timers[lane]
        have_half_ended = 2 * self._runner.jobs.num_of(lane) < self._num_held_at_claim[lane]
        if have_half_ended:
            self._num_held_at_claim[lane] = 0  # so that this happens once for each claim
            timer.end_now()
        return timer.due(moment)

    def _claim_for(self, lanes: Sequence[int]) -> int:
        """Claim jobs for lanes that have room. Returns how many of the jobs this worker keeps."""
        rooms = [min(self._room(lane), self._jobs_left()) for lane in lanes]
        return self._claim_and_open(lanes, rooms)

    def _room(self, lane: int) -> int:
        """Return for how many sequences the lane may claim jobs."""
        if not self._budget.has_room(lane):
            return 0
        return self._packer.claim_room(lane)

    def _jobs_left(self) -> int:
        """Return how many more jobs --max-jobs allows."""
        max_jobs = self._limits.max_jobs
        if max_jobs is None:
            return _NO_LIMIT
        return max(0, max_jobs - self._num_claimed)

    def _has_suspect(self, moment: float) -> bool:
        """Whether the only held job is a suspect (see Claimer) and has run alone for less than ISOLATION_S seconds."""
        if self._runner.num_held != 1:
            return False
        [job] = self._runner.held
        if job.deaths < self._limits.suspect_deaths:
            return False
        is_new_suspect = self._suspect_execution != job.execution_id
        if is_new_suspect:
            self._suspect_execution = job.execution_id
            self._isolated_until = moment + ISOLATION_S
        return moment < self._isolated_until

    def _claim_and_open(self, lanes: Sequence[int], rooms: Sequence[int]) -> int:
        """Claim for lanes, and open the jobs. Returns how many of the jobs this worker keeps.

        rooms: how many sequences each of these lanes has room for. A job may have several sequences.
        """
        moment = self._clock()
        claims = self._call_claim(lanes, rooms, moment)

        num_claimed = 0
        for lane, claim, room in zip(lanes, claims, rooms, strict=True):
            self._add_claimed(lane, claim, room, moment)
            num_claimed += len(claim.jobs)
        self._runner.open_claimed()

        surplus = self._runner.take_surplus()  # the jobs for which no thread is free
        if self._runner.num_held > 1:
            # A suspect (see Claimer) must run alone, but it may have come with jobs of another lane.
            surplus += self._runner.withdraw_suspects(self._limits.suspect_deaths)
        self._num_claimed -= len(surplus)
        self._runner.releases.give_back(surplus, "given_back")
        self._runner.show_begun(self._store)
        return num_claimed - len(surplus)

    def _call_claim(self, lanes: Sequence[int], rooms: Sequence[int], moment: float) -> list[Claim]:
        """Claim for lanes in one round trip. If a reply is lost, the claim is repeated with the token kept here."""
        requests = []
        is_idle = self._runner.num_held == 0
        self._num_calls += 1

        # A suspect (see Claimer) runs alone. So one lane may claim suspects in each call, and the lanes take turns.
        suspects_lane = lanes[self._num_calls % len(lanes)]

        for lane, room in zip(lanes, rooms, strict=True):
            # A call that is sent again with the same token claims nothing twice.
            token = self._tokens.setdefault(lane, uuid4().hex[:24])
            num_workers = self._poll_rates.num_workers(lane)
            num_takers, rounds_up = self._shares[lane].divisor(num_workers, moment)
            requests.append(
                ClaimRequest(
                    self._queue_names[lane],
                    room,
                    token,
                    takes_suspects=is_idle and lane == suspects_lane,
                    max_functions=self._packer.free_functions,
                    max_files=self._packer.claimable_files(lane),
                    num_takers=num_takers,
                    num_held=self._runner.jobs.num_of(lane),
                    rounds_up=rounds_up,
                )
            )
        return self._store.claim(requests, self._limits.suspect_deaths)

    def _add_claimed(self, lane: int, claim: Claim, room: int, moment: float) -> None:
        """Hold the jobs that a lane claimed at `moment`, and set when the lane claims next."""
        del self._tokens[lane]
        if room:  # a claim without room does not say whether workers may claim
            self._note_hold(claim.hold)
        self._num_foreign[lane] = claim.num_foreign
        self._note_newer(lane, claim.num_newer)
        self._num_claimed += len(claim.jobs)

        poll_s = self._poll_rates.poll_s(lane, claim.num_foreign)
        self._poll_timers[lane].period_s = poll_s
        claimed_ids = [job.job_id for job in claim.jobs]
        self._shares[lane].note_left(claim.first_left, moment, poll_s, claimed_ids)
        leaves_jobs_to_others = claim.first_left != ""
        if claim.jobs and not leaves_jobs_to_others:
            # The queue may hold more jobs for this worker. So the lane polls again at once. If it may claim no file, it
            # uses the other timer, and polls again in POLL_S seconds.
            self._poll_timers[lane].end_now()
            self._prompt_poll_timers[lane].postpone(self._clock() + POLL_S)

        for job in claim.jobs:
            with self._runner.guard.around(job):
                self._runner.add(job, lane)
        self._num_held_at_claim[lane] = 0
        if leaves_jobs_to_others:
            self._num_held_at_claim[lane] = self._runner.jobs.num_of(lane)

    def _note_newer(self, lane: int, num_newer: int) -> None:
        """Warn if jobs are left to a newer version. The next warning comes only after a claim without such jobs."""
        if num_newer and lane not in self._warned_lanes:
            self._log.warning(
                "queue %r: %d jobs were planned by a newer version of Tokenmill than this one (%s, format %d), and are "
                "left to workers of that version: replace this worker with one of them",
                self._queue_names[lane],
                num_newer,
                version("tokenmill"),
                FORMAT,
            )
        if num_newer:
            self._warned_lanes.add(lane)
        else:
            self._warned_lanes.discard(lane)

    def _note_hold(self, hold: Hold) -> None:
        """Note why no worker may claim, and log it if that has changed."""
        if hold == self.hold:
            return
        self.hold = hold
        if hold == RESTORED:
            self._log.error("claiming nothing: %s", RESTORED_TEXT)
        elif hold:
            self._log.info("suspended: run `rq resume` to go on")
        else:
            self._log.info("resumed, claiming jobs again")
