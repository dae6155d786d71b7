"""When a run is said to end, compared with when simulated runs end."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.runs.computed_share import Computed, ComputedShare
from jobs.runs.eta import Done, seconds_left
from jobs.runs.shard_fit import Extent
from jobs.runs.under_way import Begun, Running, Tokens

BATCH = 16


@dataclass
class Worker:
    """Answers rows in steps of 10 ms, 2 for each row in it and 0.1 for each token of a prompt."""

    name: str
    speed: float = 1.0
    clock: float = 0.0
    shards: list[int] = field(default_factory=list)
    running: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each row: its shard, its number in it, the tokens of its answer that are left."""


@dataclass
class Run:
    """A simulated run. rows: of each shard (tokens of prompt, of answer) of its rows, in order."""

    rows: list[list[tuple[int, int]]]
    has_sizes: bool = True
    has_tokens: bool = True
    done: list[Done] = field(default_factory=list)
    told: list[tuple[float, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.rows)))
        self.sent = [0] * len(self.rows)
        self.left = [len(rows) for rows in self.rows]
        self.started: dict[int, tuple[float, str]] = {}
        self.workers: list[Worker] = []

    def extent(self, shard: int) -> Extent:
        rows = self.rows[shard]
        return Extent(len(rows), sum(prompt for prompt, _ in rows) if self.has_sizes else len(rows))

    def ask(self, now: float) -> None:
        running = [
            Running(
                self.extent(shard),
                len(self.rows[shard]),
                at,
                name,
                len(self.rows[shard]) - self.left[shard],
                self.open(shard),
                self.begun(shard),
            )
            for shard, (at, name) in self.started.items()
        ]
        waiting = [self.extent(shard) for shard in self.waiting]
        self.told.append((now, seconds_left(self.done, running, waiting, now)))

    def open(self, shard: int) -> int:
        return self.sent[shard] + self.left[shard] - len(self.rows[shard])

    def begun(self, shard: int) -> Begun | None:
        """Tokens of the rows that were sent."""
        if not self.has_tokens:
            return None
        left = {row: left for worker in self.workers for of, row, left in worker.running if of == shard}
        sent = self.rows[shard][: self.sent[shard]]
        return Begun(
            sum(prompt for row, (prompt, _) in enumerate(sent) if row not in left),
            sum(prompt for row, (prompt, _) in enumerate(sent) if row in left),
            0,
            sum(answer for row, (_, answer) in enumerate(sent) if row not in left),
            sum(answer - left[row] for row, (_, answer) in enumerate(sent) if row in left),
        )

    def tokens(self, shard: int) -> Tokens | None:
        rows = self.rows[shard]
        return Tokens(sum(row[0] for row in rows), sum(row[1] for row in rows)) if self.has_tokens else None

    def step(self, worker: Worker) -> bool:
        """Take one step of a worker; False where it has nothing to do."""
        seconds = 0.0
        while len(worker.running) < BATCH:
            unsent = [shard for shard in worker.shards if self.sent[shard] < len(self.rows[shard])]
            if not unsent:
                if not self.waiting:
                    break
                worker.shards.append(shard := self.waiting.popleft())
                self.started[shard] = worker.clock, worker.name
                continue
            shard = unsent[0]
            prompt, answer = self.rows[shard][self.sent[shard]]
            worker.running.append((shard, self.sent[shard], answer))
            self.sent[shard] += 1
            seconds += 1e-4 * prompt
        if not worker.running:
            return False
        worker.clock += (seconds + 0.01 + 0.002 * len(worker.running)) / worker.speed
        worker.running = [(shard, row, left - 1) for shard, row, left in worker.running]
        for shard, _, _ in [each for each in worker.running if each[2] <= 0]:
            self.left[shard] -= 1
            if not self.left[shard]:
                started_at, name = self.started.pop(shard)
                worker.shards.remove(shard)
                self.done.append(Done(self.extent(shard), started_at, worker.clock, name, self.tokens(shard)))
        worker.running = [each for each in worker.running if each[2] > 0]
        return True

    def lose(self, worker: Worker) -> None:
        """A worker is killed: its shards are begun again, by others."""
        for shard in worker.shards:
            del self.started[shard]
            self.sent[shard], self.left[shard] = 0, len(self.rows[shard])
            self.waiting.appendleft(shard)

    def go(self, workers: list[Worker], events: Sequence[tuple[float, Worker | str]] = ()) -> float:
        """Work to the end, which is returned. events: workers that join, names of those that are killed."""
        self.workers = workers
        left = deque(sorted(events, key=lambda each: each[0]))
        asked_at, end = 0.0, 0.0
        while workers or left:
            worker = min(workers, key=lambda each: each.clock) if workers else None
            if left and (worker is None or left[0][0] <= worker.clock):
                at, event = left.popleft()
                if isinstance(event, Worker):
                    event.clock = at
                    workers.append(event)
                else:
                    (killed,) = [each for each in workers if each.name == event]
                    workers.remove(killed)
                    self.lose(killed)
                continue
            assert worker is not None
            if not self.step(worker):
                workers.remove(worker)
                continue
            end = max(end, worker.clock)
            if worker.clock >= asked_at:
                self.ask(worker.clock)
                asked_at = worker.clock + 1.0
        assert not self.started
        assert not self.waiting
        return end


def errors(run: Run, end: float, since: float = 0.0) -> list[float]:
    """Of the time that was left, from a quarter of the run on until a twentieth is left."""
    begin, stop = since + (end - since) / 4, end - (end - since) / 20
    told = [(now, left) for now, left in run.told if begin <= now <= stop]
    return [abs((left or 0.0) - (end - now)) / (end - now) for now, left in told]


def shards(rows: Sequence[tuple[int, int]], per_shard: int = 50) -> list[list[tuple[int, int]]]:
    return [list(rows[start : start + per_shard]) for start in range(0, len(rows), per_shard)]


def sorted_by_length(rng: random.Random, rows: int = 1500) -> list[tuple[int, int]]:
    return [(n, 10 + n // 20) for n in sorted(int(rng.lognormvariate(4, 1)) + 1 for _ in range(rows))]


def falling(rng: random.Random, rows: int = 1500) -> list[tuple[int, int]]:
    return sorted_by_length(rng, rows)[::-1]


def few_long_answers(rng: random.Random, rows: int = 1500) -> list[tuple[int, int]]:
    return [(60, 150 if rng.random() < 0.03 else rng.randint(4, 12)) for _ in range(rows)]


def few_long_prompts(rng: random.Random, rows: int = 1500) -> list[tuple[int, int]]:
    return [(4000 if rng.random() < 0.01 else rng.randint(10, 60), 12) for _ in range(rows)]


def alike(rng: random.Random, rows: int = 1500) -> list[tuple[int, int]]:
    return [(100, 16) for _ in range(rows)]


KINDS = [sorted_by_length, falling, few_long_answers, few_long_prompts, alike]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_end_is_told_within_10_percent_of_what_is_left(
    make: Callable[[random.Random, int], list[tuple[int, int]]], workers: int
) -> None:
    found = []
    for seed in range(3):
        run = Run(shards(make(random.Random(seed), 750 * (workers + 1))))
        found += errors(run, run.go([Worker(f"w{number}") for number in range(workers)]))
    assert statistics.median(found) <= 0.10


def test_long_answers_that_stay_open_are_not_taken_for_nearly_done() -> None:
    """Of each shard under way all rows but some long ones are answered."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for seed, has_tokens in itertools.product(range(3), found):
        run = Run(shards(few_long_answers(random.Random(seed))), has_tokens=has_tokens)
        end = run.go([Worker("a")])
        found[has_tokens] += errors(run, end)
    assert statistics.median(found[True]) < statistics.median(found[False])


@pytest.mark.parametrize("texts", [300, 3000])
def test_fewer_and_fewer_rows_are_new_where_they_are_drawn_from_some_texts(texts: int) -> None:
    rng, seen, found = random.Random(texts), set[int](), []
    shares: list[float] = []
    for shard in range(40):
        drawn = {rng.randrange(texts) for _ in range(100)}
        new = len(drawn - seen)
        seen |= drawn
        shares.append(new / 100)
        if shard < 10:
            found.append(Computed(100 * shard + 50, new, new / 100))
    told = ComputedShare.of(found)
    ahead = sum(told.at(100 * shard + 50) for shard in range(10, 40))
    assert ahead == pytest.approx(sum(shares[10:]), rel=0.25, abs=0.5)
    assert ComputedShare.of([replace(each, rows=100, share=1.0) for each in found]).at(1e6) == 1.0
    assert 0 <= ComputedShare.of(found[:1]).at(1e9) <= 1


def test_without_sizes_rows_are_counted() -> None:
    run = Run(shards(alike(random.Random(0))), has_sizes=False)
    assert statistics.median(errors(run, run.go([Worker("a"), Worker("b", speed=2.5)]))) <= 0.10
    blind = Run(shards(sorted_by_length(random.Random(0))), has_sizes=False)
    sighted = Run(shards(sorted_by_length(random.Random(0))))
    worse, better = (statistics.median(errors(run, run.go([Worker("a")]))) for run in (blind, sighted))
    assert worse > 3 * better, "sizes are what tells that the longest rows are still to come"


def test_it_follows_workers_that_join_and_are_killed() -> None:
    found = []
    for make, seed in itertools.product(KINDS, range(2)):
        rows = shards(make(random.Random(seed)) * 2)
        alone = Run(rows).go([Worker("a")])
        joins, dies = 0.2 * alone, 0.35 * alone
        run = Run(rows)
        end = run.go([Worker("a"), Worker("b")], [(joins, Worker("c")), (dies, "b")])
        found += errors(Run(rows, told=[each for each in run.told if each[0] > dies]), end)
    assert statistics.median(found) <= 0.10


def test_three_workers_end_sooner_than_two() -> None:
    run = Run(shards(alike(random.Random(1))))
    run.go([Worker("a"), Worker("b")], [(5.0, Worker("c"))])
    before = [left for now, left in run.told if now < 5.0][-1]
    after = next(left for now, left in run.told if now > 6.0)
    assert (after or 0.0) < 0.85 * (before or 0.0)


def test_a_resumed_run_is_told_by_what_came_since_and_before() -> None:
    rows = shards(alike(random.Random(2)))
    first = Run(rows)
    first.go([Worker("a")])
    earlier = [
        replace(each, started_at=each.started_at - 9000, ended_at=each.ended_at - 9000) for each in first.done
    ]
    resumed = Run(rows[15:])
    resumed.done = earlier[:15]
    end = resumed.go([Worker("b", speed=0.5)])
    assert statistics.median(errors(resumed, end)) <= 0.10


def test_without_anything_to_go_by_nothing_is_told() -> None:
    one = Extent(100, 1000.0)
    assert seconds_left([], [], [], 0.0) == 0.0
    assert seconds_left([], [], [one], 0.0) is None
    assert seconds_left([], [Running(one, 100, 0.0, "a", 0)], [one], 5.0) is None
    done = [Done(one, 0.0, 10.0, "a")]
    assert seconds_left(done, [], [one], 11.0) == pytest.approx(10.0), "it is about to go on"
    assert seconds_left(done, [], [one], 100.0) is None, "nobody works on it"


extents = st.builds(Extent, st.integers(0, 1000), st.floats(0, 1e12))
moments = st.floats(-1e9, 1e10)
names = st.sampled_from(["", "a", "b"])
tokens = st.builds(Tokens, st.integers(0, 10**6), st.integers(0, 10**6))


@given(
    st.lists(st.builds(Done, extents, moments, moments, names, st.none() | tokens), max_size=20),
    st.lists(
        st.builds(
            Running,
            extents,
            st.floats(0, 1000),
            moments,
            names,
            st.integers(0, 2000),
            st.integers(0, 2000),
            st.none() | st.builds(Begun, *[st.integers(0, 10**6)] * 5),
        ),
        max_size=9,
    ),
    st.lists(extents, max_size=20),
    moments,
)
def test_whatever_is_recorded_it_is_a_time_or_none(
    done: list[Done], running: list[Running], waiting: list[Extent], now: float
) -> None:
    left = seconds_left(done, running, waiting, now)
    assert left is None or (left >= 0 and math.isfinite(left))
