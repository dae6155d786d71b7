"""Runs and prompts of one queue share its workers, and deadlines that can hold do: by properties and a simulation."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.store import fair_order as fair
from worker.store.fair_order import PROMPTS, RunInQueue, WaitingJob, urgent_runs


def shards(run: str, number: int, rows: float = 1000, first: int = 0) -> list[WaitingJob]:
    return [WaitingJob(f"{run}{first + shard}", run, rows) for shard in range(number)]


def fair_order(
    in_order: Sequence[WaitingJob], new: Sequence[WaitingJob], urgent: Sequence[str] = ()
) -> list[str]:
    return [job.id for job in fair.fair_order(in_order, new, urgent)]


def test_two_runs_take_turns_and_each_keeps_its_own_order() -> None:
    order = fair_order([], shards("a", 4) + shards("b", 2))
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_run_of_large_shards_gets_no_more_rows_than_one_of_small_shards() -> None:
    order = fair_order([], shards("a", 3, 1000) + shards("b", 30, 100))
    assert order[:11] == [*(f"b{shard}" for shard in range(9)), "a0", "b9"]


def test_a_plan_is_made_before_anything_else() -> None:
    in_order = shards("a", 3)
    assert fair_order(in_order, [WaitingJob("b-plan", "b", 0)]) == ["b-plan", "a0", "a1", "a2"]


def test_a_run_that_comes_later_shares_what_is_left_and_the_others_keep_their_places() -> None:
    jobs = {job.id: job for job in shards("a", 6) + shards("b", 4) + shards("c", 2)}
    order = fair_order([], shards("a", 6) + shards("b", 4))
    in_order = [jobs[job_id] for job_id in order[1:]]  # a0 was claimed
    order = fair_order(in_order, shards("c", 2))
    assert order == ["b0", "a1", "c0", "b1", "a2", "c1", "b2", "a3", "b3", "a4", "a5"]


def test_an_urgent_run_leaves_a_tenth_to_the_others() -> None:
    order = fair_order([], shards("a", 40) + shards("b", 30), ["b"])
    assert Counter(job[0] for job in order[:20]) == {"b": 18, "a": 2}


@pytest.mark.parametrize(("urgent", "other"), [(1, 1), (1, 10), (1, 100), (100, 1)])
def test_an_urgent_run_gets_nine_tenths_whatever_the_priorities(urgent: int, other: int) -> None:
    jobs = [WaitingJob(f"u{n}", "u", 10, urgent) for n in range(1000)]
    jobs += [WaitingJob(f"o{n}", "o", 10, other) for n in range(1000)]
    order = fair_order([], jobs, ["u"])
    assert sum(job_id.startswith("u") for job_id in order[:1000]) in range(890, 911)


def test_a_run_is_less_often_urgent_with_a_higher_priority() -> None:
    runs = [RunInQueue("a", 100, 9000), RunInQueue("b", 100, 1000, deadline=160.0, priority=1)]
    assert urgent_runs(runs, 10.0, 0.0) == ["b"], "at half of 10 rows a second it takes 200 s"
    runs[1] = RunInQueue("b", 100, 1000, deadline=160.0, priority=9)
    assert urgent_runs(runs, 10.0, 0.0) == [], "at nine tenths of 10 rows a second it takes 111 s"


def test_a_run_is_urgent_only_if_its_deadline_is_missed_otherwise_and_can_be_held() -> None:
    def run(name: str, rows: float, deadline: float | None) -> RunInQueue:
        return RunInQueue(name, 100, rows, deadline)

    # 10 rows a second, 4 runs: a fair share is 2.5 rows a second.
    runs = [
        run("without", 9000, None),
        run("safe", 1000, 1000.0),
        run("urgent", 1000, 300.0),
        run("hopeless", 9000, 300.0),
    ]
    assert urgent_runs(runs, 10.0, 0.0) == ["urgent"]
    assert urgent_runs(runs, 0.0, 0.0) == [], "nothing is known yet"
    assert urgent_runs(runs, 10.0, 600.0) == ["safe"], "the others' deadlines have passed"


jobs_strategy = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60)


@given(jobs_strategy, jobs_strategy, st.permutations("abcd"), st.integers(0, 2))
def test_no_job_is_lost_and_order_within_a_run_and_of_what_was_in_order_stays(
    first: list[tuple[str, int]], second: list[tuple[str, int]], runs: list[str], num_urgent: int
) -> None:
    jobs = [WaitingJob(f"{number}", run, cost) for number, (run, cost) in enumerate(first + second)]
    in_order = jobs[: len(first)]
    new = jobs[len(first) :]
    order = fair_order(in_order, new, runs[:num_urgent])
    assert sorted(order) == sorted(job.id for job in jobs)
    places = {job_id: place for place, job_id in enumerate(order)}
    assert [job.id for job in sorted(in_order, key=lambda job: places[job.id])] == [
        job.id for job in in_order
    ]
    for run in runs:
        of_run = [job.id for job in jobs if job.run == run]
        assert sorted(of_run, key=places.__getitem__) == of_run


@dataclass
class Simulated:
    """A run in the simulation. Rows are counted in shards; arrives, deadline: seconds."""

    name: str
    rows: int
    arrives: float = 0.0
    deadline: float | None = None
    shard_rows: int = 1000
    done: int = 0
    first_at: float | None = None
    ended_at: float | None = None


@dataclass
class Lane:
    """Workers that do `rows_per_s` each, one shard at a time; the queue is put in order every 5 s, as in a worker."""

    runs: Sequence[Simulated]
    num_workers: int = 4
    rows_per_s: float = 50.0
    prompts_every_s: float | None = None
    in_turn: bool = True
    queue: list[WaitingJob] = field(default_factory=list)
    num_in_order: int = 0
    urgent: list[str] = field(default_factory=list)
    prompt_waits: list[float] = field(default_factory=list)

    def simulate(self, until: float) -> None:
        """Run the clock until all runs have ended, or until this time."""
        by_name = {run.name: run for run in self.runs}
        events: list[tuple[float, int, str, WaitingJob | None]] = []
        counter = 0

        def at(moment: float, kind: str, job: WaitingJob | None = None) -> None:
            nonlocal counter
            counter += 1
            heapq.heappush(events, (moment, counter, kind, job))

        for run in self.runs:
            at(run.arrives, f"arrive {run.name}")
        at(0.0, "order")
        if self.prompts_every_s:
            at(0.0, "prompt")
        idle = self.num_workers
        asked_at: dict[str, float] = {}
        finished: list[tuple[float, int]] = []
        while events:
            now, _, kind, job = heapq.heappop(events)
            if now > until or all(run.ended_at is not None for run in self.runs):
                return
            if kind.startswith("arrive"):
                run = by_name[kind.partition(" ")[2]]
                num_shards = -(-run.rows // run.shard_rows)
                self.queue += shards(f"{run.name}:", num_shards, run.shard_rows)
            elif kind == "prompt":
                prompt = WaitingJob(f"p{counter}", PROMPTS, 1)
                asked_at[prompt.id] = now
                self.queue.append(prompt)
                assert self.prompts_every_s is not None
                at(now + self.prompts_every_s, "prompt")
            elif kind == "order":
                at(now + 5.0, "order")
                if self.in_turn:
                    self._order(by_name, finished, now)
            elif job is not None:
                idle += 1
                if job.run != PROMPTS:
                    run = by_name[job.run.rstrip(":")]
                    run.done += run.shard_rows
                    finished.append((now, run.shard_rows))
                    if run.done >= run.rows:
                        run.ended_at = now

            while idle and self.queue:
                claimed = self.queue.pop(0)
                self.num_in_order = max(0, self.num_in_order - 1)
                idle -= 1
                if claimed.run == PROMPTS:
                    self.prompt_waits.append(now - asked_at[claimed.id])
                else:
                    run = by_name[claimed.run.rstrip(":")]
                    run.first_at = now if run.first_at is None else run.first_at
                at(now + claimed.rows / self.rows_per_s, "done", claimed)

    def _order(
        self, by_name: dict[str, Simulated], finished: list[tuple[float, int]], now: float
    ) -> None:
        names = {job.run for job in self.queue} - {PROMPTS}
        looks = []
        for name in names:
            run = by_name[name.rstrip(":")]
            looks.append(RunInQueue(name, run.shard_rows, run.rows - run.done, run.deadline))
        since = max(0.0, now - 600.0)
        rows = sum(count for moment, count in finished if moment >= since)
        rate = rows / (now - since) if now > since else 0.0
        urgent = urgent_runs(looks, rate, now)
        if urgent != self.urgent:
            self.num_in_order = 0
        jobs = {job.id: job for job in self.queue}
        order = fair_order(self.queue[: self.num_in_order], self.queue[self.num_in_order :], urgent)
        self.queue = [jobs[job_id] for job_id in order]
        self.num_in_order = len(self.queue)
        self.urgent = urgent


def busy_lane(*, in_turn: bool) -> Lane:
    """A run of 1,000,000 rows, ten of 1,000, three with a deadline, and a prompt every 10 s: 200 rows a second."""
    small = [Simulated(f"s{number}", 1000, 600.0 + 60 * number, None, 100) for number in range(10)]
    with_deadline = [
        Simulated("d0", 100_000, 700.0, 700.0 + 1200.0),
        Simulated("d1", 50_000, 800.0, 800.0 + 3600.0),
        Simulated("hopeless", 400_000, 900.0, 900.0 + 600.0),
    ]
    runs = [Simulated("big", 1_000_000), *small, *with_deadline]
    return Lane(runs, prompts_every_s=10.0, in_turn=in_turn)


def test_in_a_busy_queue_none_starves_and_the_deadlines_that_can_hold_do() -> None:
    lane = busy_lane(in_turn=True)
    lane.simulate(until=20_000.0)
    runs = {run.name: run for run in lane.runs}
    waits: defaultdict[str, float] = defaultdict(float)
    for run in lane.runs:
        assert run.ended_at is not None, f"{run.name} starves"
        assert run.first_at is not None
        waits[run.name] = run.first_at - run.arrives

    # Four shards are under way, each of 20 s, and the order is looked at every 5 s.
    assert max(waits.values()) <= 120.0
    small = [runs[f"s{number}"] for number in range(10)]
    assert all((run.ended_at or 0) - run.arrives <= 600.0 for run in small)
    for name in ("d0", "d1"):
        assert (runs[name].ended_at or 0) <= (runs[name].deadline or 0), name
    assert max(lane.prompt_waits) <= 60.0
    total_rows = sum(run.rows for run in lane.runs)
    last_end = max(run.ended_at or 0 for run in lane.runs)
    assert last_end <= total_rows / 200.0 * 1.05, "the order costs the workers no time"


def test_in_the_order_of_their_arrival_the_same_runs_starve() -> None:
    """The simulation tells a fair order from none."""
    lane = busy_lane(in_turn=False)
    lane.simulate(until=20_000.0)
    runs = {run.name: run for run in lane.runs}
    assert (runs["s0"].first_at or 0) - runs["s0"].arrives > 3600.0
    assert (runs["d0"].ended_at or 0) > (runs["d0"].deadline or 0)
    assert max(lane.prompt_waits) > 3600.0
