"""Claims jobs: when, for which lanes, and how many, so that each worker gets a fair share."""

from collections.abc import Sequence
from importlib.metadata import version
from uuid import uuid4

from jobs.common.keys import FORMAT
from jobs.common.workers import RESTORED, RESTORED_TEXT
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import POLL_S, Timer
from worker.io_thread.parts import Parts
from worker.store.records.claimed_job import Hold, Wanted
from worker.store.registries import Registries

FORGET_S = 10.0
"""After so long without a look in vain, all workers of the queue count as takers again."""


class FairShare:
    """The share of one lane that this worker leaves to others. Used by the I/O thread only.

    Each worker of a queue should find as many jobs (see claim.lua). But others may be full, gone, or serve another
    model: then the same job is still first in the queue at the next look. This worker rounds its share up; at each
    later look it counts on half as many takers. Some seconds after the last such look it counts on all again.
    """

    def __init__(self) -> None:
        self._num_vain = 0
        self._first, self._seen_at = "", float("-inf")
        self._vain_at = float("-inf")

    def among(self, num_workers: int, moment: float) -> tuple[int, bool]:
        """Return how many takers to count on, of so many workers, and whether to round up, at `moment` (seconds)."""
        if moment - self._vain_at > FORGET_S:
            self._num_vain = 0
        return max(1, num_workers >> max(0, self._num_vain - 1)), self._num_vain > 0

    def left(self, first: str, moment: float, poll_s: float, taken: Sequence[str] = ()) -> None:
        """Learn which job a claim left to others as the first, "" for none. poll_s: how often they look.

        taken: the claim's jobs. If the one left before is among them, no other worker has come.
        """
        if not self._first or self._first not in (first, *taken):
            self._seen_at = moment
        elif first and moment - self._seen_at >= poll_s:
            self._num_vain += 1
            self._seen_at = self._vain_at = moment
        self._first = first


ISOLATION_S = 10.0
"""How long a suspect runs by itself: what it does kills soon, and others wait for it."""
LOOK_S = 0.2
"""How often a lane that can open no further file looks for prompts between those that wait in its queue."""


class Claimer:
    """Claims for every lane that has room, and hands jobs to the runner. Used by the I/O thread only.

    A suspect, with which `Limits.suspect_deaths` workers have died, runs by itself for a while.
    """

    def __init__(self, parts: Parts, runner: JobRunner) -> None:
        self._queue_names, self._store = parts.queue_names, parts.store
        self._registries = Registries(parts.clients.io)
        self._poll_rates, self._shares = parts.poll_rates, [FairShare() for _ in parts.queue_names]
        self._packer, self._budget = parts.packer, parts.budget
        self._runner = runner
        self._limits, self._log, self._clock = parts.limits, parts.log, parts.clock
        self._tokens: dict[int, str] = {}
        # Jobs held, by lane, when a claim left some to others: with half as many, it looks again.
        self._had = [0] * len(parts.queue_names)
        self._foreign = [0] * len(parts.queue_names)
        self._warned = frozenset[int]()  # lanes with jobs of a newer version
        self._num_kept = self._turn = 0
        self._suspect_execution, self._isolated_until = "", float("-inf")
        self._polls = [Timer(POLL_S) for _ in parts.queue_names]
        self._looks = [Timer(LOOK_S) for _ in parts.queue_names]
        self.hold: Hold = ""
        """Why no worker may claim, as of the last claim."""
        self.idle_since = parts.clock()
        """When the last jobs came, or the last one that was held ended."""

    def claim(self, moment: float) -> None:
        """Claim for every lane that has room; again at the next turn while jobs come."""
        if not self._jobs_left():
            return
        lanes = [lane for lane in range(len(self._queue_names)) if self._room(lane) > 0]
        # A lane without room leaves its timer alone: it claims in the very turn in which it has some.
        due = [lane for lane in lanes if self._is_due(lane, moment)]
        lanes = [lane for lane in lanes if lane in due or self._packer.claimable_files(lane)]
        if not due or self._has_suspect(moment):
            return
        # One round trip, unless --max-jobs counts: then the next lane gets the rest of one.
        lane_groups = [lanes] if self._limits.max_jobs is None else [[lane] for lane in lanes]
        if sum([self._claim_for(group) for group in lane_groups]):
            self.idle_since = moment
            self._runner.feed()

    def take_up_unanswered(self) -> None:
        """Ask for the jobs of claims whose replies were lost: unrenewed, they would count as abandoned."""
        if self._tokens:
            self._take_up(list(self._tokens), [0] * len(self._tokens))

    def discount(self, num_jobs: int) -> None:
        """Do not count so many claimed jobs against --max-jobs."""
        self._num_kept -= num_jobs

    def pause(self, until: float) -> None:
        """Claim nothing before `until`."""
        for poll in self._polls:
            poll.postpone(until)

    @property
    def has_all_it_may(self) -> bool:
        """Whether --max-jobs allows no more."""
        return self._limits.max_jobs is not None and self._num_kept >= self._limits.max_jobs

    def has_taken_all(self) -> bool:
        """Whether the queues hold only jobs for workers with another model."""
        return self._registries.count_queued(self._queue_names) <= sum(self._foreign)

    def _is_due(self, lane: int, moment: float) -> bool:
        """Whether it is time to claim; if no file may come, prompts between files are looked for."""
        timer = self._polls[lane] if self._packer.claimable_files(lane) else self._looks[lane]
        if 2 * self._runner.jobs.num_of(lane) < self._had[lane]:
            self._had[lane] = 0
            timer.postpone(float("-inf"))
        return timer.due(moment)

    def _claim_for(self, lanes: Sequence[int]) -> int:
        rooms = [min(self._room(lane), self._jobs_left()) for lane in lanes]
        return self._take_up(lanes, rooms)

    def _room(self, lane: int) -> int:
        return self._packer.claim_room(lane) if self._budget.has_room(lane) else 0

    def _jobs_left(self) -> int:
        most = self._limits.max_jobs
        return 1_000_000 if most is None else max(0, most - self._num_kept)

    def _has_suspect(self, moment: float) -> bool:
        """Whether a suspect runs by itself; ISOLATION_S at most."""
        if self._runner.num_held != 1 or self._runner.held[0].deaths < self._limits.suspect_deaths:
            return False
        execution_id = self._runner.held[0].execution_id
        if self._suspect_execution != execution_id:
            self._suspect_execution, self._isolated_until = execution_id, moment + ISOLATION_S
        return moment < self._isolated_until

    def _take_up(self, lanes: Sequence[int], rooms: Sequence[int]) -> int:
        """Claim for lanes, at most `rooms` each; return how many jobs were kept."""
        wanted = []
        is_idle, moment = self._runner.num_held == 0, self._clock()
        self._turn += 1
        for place, (lane, room) in enumerate(zip(lanes, rooms, strict=True)):
            # The tokens are kept until the call has come through: sent again, it claims nothing twice.
            token = self._tokens.setdefault(lane, uuid4().hex[:24])
            takes_suspects = is_idle and place == self._turn % len(lanes)
            takers, rounds_up = self._shares[lane].among(self._poll_rates.num_workers(lane), moment)
            wanted.append(
                Wanted(
                    self._queue_names[lane],
                    room,
                    token,
                    takes_suspects,
                    max_functions=self._packer.free_functions,
                    max_files=self._packer.claimable_files(lane),
                    num_takers=takers,
                    num_held=self._runner.jobs.num_of(lane),
                    rounds_up=rounds_up,
                )
            )
        claims = self._store.claim(wanted, self._limits.suspect_deaths)
        for lane, claim, room in zip(lanes, claims, rooms, strict=True):
            del self._tokens[lane]
            if room:
                self._note_hold(claim.hold)
            self._foreign[lane] = claim.num_foreign
            self._note_newer(lane, claim.num_newer)
            self._num_kept += len(claim.jobs)
            poll_s = self._polls[lane].period_s = self._poll_rates.poll_s(lane, claim.num_foreign)
            taken = [job.job_id for job in claim.jobs]
            self._shares[lane].left(claim.first_left, moment, poll_s, taken)
            if claim.jobs and not claim.first_left:
                self._polls[lane].postpone(float("-inf"))
                self._looks[lane].postpone(self._clock() + POLL_S)
            for job in claim.jobs:
                with self._runner.guard.around(job):
                    self._runner.begin(job, lane)
            self._had[lane] = self._runner.jobs.num_of(lane) if claim.first_left else 0
        self._runner.open_claimed()
        surplus = self._runner.take_surplus()
        if self._runner.num_held > 1:  # a job of another lane came with one that should run by itself
            surplus += self._runner.withdraw_suspects(self._limits.suspect_deaths)
        self._num_kept -= len(surplus)
        self._runner.give_back(surplus, "given_back")
        self._runner.show_begun(self._store)
        return sum(len(claim.jobs) for claim in claims) - len(surplus)

    def _note_newer(self, lane: int, num_newer: int) -> None:
        """Warn when jobs are left to newer versions: once, and again after there were none."""
        if num_newer and lane not in self._warned:
            self._log.warning(
                "queue %r: %d jobs were planned by a newer version of Tokenmill than this one (%s, format %d), and are "
                "left to its workers: replace this worker by one of that version",
                *(self._queue_names[lane], num_newer, version("tokenmill"), FORMAT),
            )
        self._warned = self._warned | {lane} if num_newer else self._warned - {lane}

    def _note_hold(self, hold: Hold) -> None:
        if hold == self.hold:
            return
        self.hold = hold
        if hold == RESTORED:
            self._log.error("claiming nothing: %s", RESTORED_TEXT)
        else:
            self._log.info("suspended, run `rq resume` to resume" if hold else "resumed, claiming jobs again")
