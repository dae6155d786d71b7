"""When a run is said to end: off by at most a third from a fifth of the way on."""

import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.utils import utcformat

from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, worker_key
from jobs.parquet.shards import shard_work
from jobs.runs.plans.plan import Plan, work_shares
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.run_statistics import COUNTED, PartStats
from jobs.runs.watching.reading import list_runs, read_snapshot
from jobs.runs.watching.snapshot import STALLED_S, left_text
from jobs.runs.watching.time_left import LEAST_S, PartsDone, Progress, Span, seconds_left, time_left
from tests.jobs.answering import add_worker, feed, opened_task, run_task
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

TABLE = pa.table({"prompt": ["x" * n for n in range(1, 101)], "other": ["y" * 500] * 100})


@pytest.fixture
def plan(runs: Runs) -> Plan:
    """A run of four shards, of which each asks more than the one before."""
    pq.write_table(TABLE, runs.source, row_group_size=25, compression="none", use_dictionary=False)
    runs.plan(rows_per_shard=25)
    return Plan.from_text((runs.output / "_plan.json").read_text())


def test_planning_counts_the_bytes_of_each_shards_row_groups(
    redis: Redis, runs: Runs, plan: Plan
) -> None:
    found = plan.sizes
    assert list(found) == sorted(found)
    assert found[3] - found[0] == pytest.approx(75 * 25, rel=0.1), "of 75 letters more a row"
    stored = RunState(redis, plan.run).facts()["sizes"]
    assert json.loads(stored) == work_shares([25] * 4, found) == plan.shares


def test_rows_of_one_group_count_alike(runs: Runs) -> None:
    pq.write_table(TABLE, runs.source, row_group_size=50, compression="none", use_dictionary=False)
    runs.plan(rows_per_shard=25)
    first, second, third, fourth = Plan.from_text((runs.output / "_plan.json").read_text()).sizes
    assert (first, third) == (second, fourth)
    assert third - first == pytest.approx(50 * 25, rel=0.1), "of 50 letters more a row"


def test_a_run_under_way_tells_what_is_left(
    redis: Redis, runs: Runs, invoke: Invoke, plan: Plan
) -> None:
    assert read_snapshot(redis, plan.run).left_s is None
    first, second, *_ = runs.jobs
    run_task(replace(runs.context(), worker_name="w-1"), first.func_name, *first.args)
    (part,) = RunState(redis, plan.run).parts_of([0]).values()
    assert part.worker == "w-1"
    now = time.time()
    share = plan.sizes[0] / sum(plan.sizes) + 0.25
    record = replace(part, started_at=now - 100 * share / 2, ended_at=now)
    redis.hset(f"tokenmill:run:{plan.run}:parts", "0", record.to_record())
    meta = {"rows": 25, "rows_done": 0, "rows_open": 0, "tokens": 0}
    fields = {"status": "started", "tokenmill_progress": json.dumps(meta), "worker_name": "w-1"}
    redis.hset(second.key, mapping={**fields, "started_at": utcformat(datetime.now(UTC))})
    redis.zadd("rq:wip:bulk", {f"{second.id}:abc": 9e12})
    redis.lrem("rq:queue:bulk", 1, second.id)
    add_worker(redis, "w-1")
    left = read_snapshot(redis, plan.run).left_s
    assert left == pytest.approx(100 - 100 * share / 2, rel=0.05)
    (listed,) = list_runs(redis)
    assert listed.left_s == pytest.approx(left, rel=0.05), "a list tells the same"
    redis.hset(second.key, "tokenmill_progress", json.dumps({**meta, "rows_done": 25}))
    assert (read_snapshot(redis, plan.run).left_s or 0) < 0.9 * (left or 0)
    redis.set(worker_key("w-1"), '{"state": "busy"}', ex=WORKER_STATS_TTL_S - 2 * SILENT_S)
    assert read_snapshot(redis, plan.run).left_s is None, "nobody is there"
    add_worker(redis, "w-2")
    silent = read_snapshot(redis, plan.run).left_s
    assert silent == pytest.approx(left, rel=0.05), "it was killed: its shard is to be done again"
    assert "left     " in invoke("status", plan.run).output


def test_a_part_tells_how_long_its_shard_waited_behind_others(
    redis: Redis, runs: Runs, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: 1000.0)
    monkeypatch.setattr(shard_work, "time", clock)
    first = runs.jobs[0]
    task = opened_task(runs.context(), first.func_name, first.args)
    clock.time = lambda: 1060.0
    feed(task)
    clock.time = lambda: 1070.0
    task.result()
    (part,) = RunState(redis, plan.run).parts_of([0]).values()
    assert (part.started_at, part.waited_s, part.ended_at) == (1000.0, 60.0, 1070.0)
    parts = PartsDone([0], {0: part}, vars(part))
    left = time_left("[1, 1]", 2, 50, parts, {}, 1070.0)
    assert left == pytest.approx(10.0), "it worked for ten seconds"


#: Rows of a shard.
SHARD = 50


#: Tokens of a row's prompt and answer, and its text where it may be that of others.
Row = tuple[int, int, int | None]


@dataclass
class Worker:
    """Answers rows in steps of 10 ms, 2 for each row in it and 0.1 for each token of a prompt. batch: rows at once."""

    name: str
    clock: float = 0.0
    batch: int = 16
    shards: list[int] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    """Of each row: its shard, how many of its tokens are left, and how many it has in all."""


class Run:
    """A run on a clock of its own, that says each second how long it goes on."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.shards = [rows[start : start + SHARD] for start in range(0, len(rows), SHARD)]
        sizes = [sum(prompt for prompt, _, _ in shard) for shard in self.shards]
        self.shares = json.dumps(work_shares([len(shard) for shard in self.shards], sizes))
        self.rows, self.waiting = len(rows), deque(range(len(self.shards)))
        self.sent, self.done = [0] * len(self.shards), [0] * len(self.shards)
        self.computed = [0] * len(self.shards)
        self.computed_done = [0] * len(self.shards)
        self.workers: list[Worker] = []
        self.begun: dict[int, tuple[float, str]] = {}
        self.parts: dict[int, PartStats] = {}
        self.known: set[int] = set()
        self.told: list[tuple[float, float]] = []

    def ask(self, now: float) -> None:
        running = {
            shard: self.progress(shard, worker, now)
            for worker in self.workers
            for shard in worker.shards
        }
        counts = {
            name: sum(getattr(part, name) for part in self.parts.values()) for name in COUNTED
        }
        parts = PartsDone(self.parts.keys(), self.parts, counts)
        left = time_left(self.shares, len(self.shards), self.rows, parts, running, now)
        if left is not None:
            self.told.append((now, left))

    def progress(self, shard: int, worker: Worker, now: float) -> Progress:
        at, name = self.begun[shard]
        open_rows = [row for row in worker.running if row[0] == shard]
        tokens_open = sum(answer - left for _, left, answer in open_rows)
        return Progress(
            rows=self.done[shard],
            tokens=self.computed_done[shard] + tokens_open,
            rows_open=len(open_rows),
            tokens_open=tokens_open,
            shard_rows=len(self.shards[shard]),
            started_at=at,
            reported_at=now,
            worker=name,
        )

    def step(self, worker: Worker) -> bool:
        """Take one step of a worker; False where it has nothing to do."""
        seconds = 0.0
        while len(worker.running) < worker.batch:
            shard = next(
                (each for each in worker.shards if self.sent[each] < len(self.shards[each])), None
            )
            if shard is None:
                if not self.waiting:
                    break
                worker.shards.append(shard := self.waiting.popleft())
                self.begun[shard] = worker.clock, worker.name
            prompt, answer, text = self.shards[shard][self.sent[shard]]
            self.sent[shard] += 1
            if text is not None and text in self.known:
                self.count(worker, shard)
                continue
            self.known.update(() if text is None else (text,))
            self.computed[shard] += answer
            worker.running.append([shard, answer, answer])
            seconds += 1e-4 * prompt
        worker.clock += seconds + 0.01 + 0.002 * len(worker.running)
        for each in worker.running:
            each[1] -= 1
            if not each[1]:
                self.computed_done[each[0]] += each[2]
                self.count(worker, each[0])
        worker.running = [each for each in worker.running if each[1]]
        return bool(worker.running or self.waiting or worker.shards)

    def count(self, worker: Worker, shard: int) -> None:
        self.done[shard] += 1
        if self.done[shard] == len(self.shards[shard]):
            started_at, name = self.begun.pop(shard)
            worker.shards.remove(shard)
            tokens = sum(answer for _, answer, _ in self.shards[shard])
            self.parts[shard] = PartStats(
                run="0" * 16, shard=shard, rows=len(self.shards[shard]), errors=0, prompt_tokens=0,
                completion_tokens=tokens, cached_tokens=0, generated_tokens=self.computed[shard],
                started_at=started_at, ended_at=worker.clock, worker=name,
                model="", fingerprint="", dtype="", attention_backend="", version="",
            )  # fmt: skip

    def go(self, workers: list[Worker], until: float = math.inf) -> float:
        """Work until so much of the rows is done, or all; return when."""
        self.workers = workers
        asked_at = now = max(each.clock for each in workers)
        while workers and sum(self.done) < until * self.rows:
            worker = min(workers, key=lambda each: each.clock)
            if not self.step(worker):
                workers.remove(worker)
                continue
            now = max(now, worker.clock)
            if worker.clock >= asked_at + 1:
                self.ask(asked_at := worker.clock)
        return now

    def give_back(self, worker: Worker) -> None:
        """A worker leaves, or the run is cancelled: its open shards are begun again."""
        for shard in worker.shards:
            del self.begun[shard]
            self.sent[shard] = self.done[shard] = self.computed[shard] = 0
            self.computed_done[shard] = 0
            self.waiting.appendleft(shard)

    def check(self, began_at: float, end: float, since: float = 0.0) -> None:
        """From a fifth of the run on until a tenth is left, when the last batch empties."""
        first, last = max(since, began_at + (end - began_at) / 5), end - (end - began_at) / 10
        off = [
            abs(left - (end - now)) / (end - now) for now, left in self.told if first <= now <= last
        ]
        assert len(off) > 5
        assert max(off) <= 1 / 3, [f"{each:.2f}" for each in off]


def by_length(rng: random.Random, rows: int) -> list[Row]:
    lengths = sorted(min(200, int(rng.lognormvariate(2.5, 1)) + 1) for _ in range(rows))
    return [(each, 4 + each // 4, None) for each in lengths]


def few_long(rng: random.Random, rows: int) -> list[Row]:
    return [(12, 200 if rng.random() < 0.02 else rng.randint(4, 16), None) for _ in range(rows)]


def repeated(rng: random.Random, rows: int) -> list[Row]:
    lengths = [rng.randint(5, 60) for _ in range(rows // 3)]
    return [
        (lengths[text], 24, text) for text in (rng.randrange(len(lengths)) for _ in range(rows))
    ]


@pytest.mark.parametrize(("make", "rows"), [(by_length, 5000), (few_long, 5000), (repeated, 6000)])
def test_the_end_of_a_worker_alone(
    make: Callable[[random.Random, int], list[Row]], rows: int
) -> None:
    run = Run(make(random.Random(0), rows))
    run.check(0.0, run.go([Worker("a")]))


def test_the_end_of_a_run_of_a_few_batches_whose_rows_end_together() -> None:
    run = Run([(20, 100, None)] * 1500)
    run.check(0.0, run.go([Worker("a", batch=256)]))


def test_the_end_where_one_worker_joins_and_one_leaves() -> None:
    run, workers = Run(by_length(random.Random(1), 10_000)), [Worker("a"), Worker("b")]
    workers.append(Worker("c", run.go(workers, until=0.15)))
    left_at = run.go(workers, until=0.4)
    run.give_back(workers.pop(0))
    run.check(0.0, run.go(workers), since=left_at + 3)


def test_the_end_of_a_run_that_was_cancelled_and_resumed() -> None:
    run, worker = Run(few_long(random.Random(1), 5000)), Worker("a")
    run.go([worker], until=0.3)
    run.give_back(worker)
    began_at = worker.clock + 3
    run.check(began_at, run.go([Worker("a", began_at)]))


def test_without_anything_to_go_by_nothing_is_told() -> None:
    assert seconds_left([], 0.0, 0.0) == 0.0
    assert seconds_left([], 1.0, 0.0) is None
    assert seconds_left([Span("a", 0.0, 5.0, 0.0)], 1.0, 5.0) is None
    done = [Span("a", 0.0, 10.0, 0.5)]
    assert seconds_left(done, 0.5, 11.0) == pytest.approx(10.0), "it is about to go on"
    assert seconds_left(done, 0.5, 100.0) is None, "nobody works on it"


def test_without_news_the_estimate_stays() -> None:
    parts = PartsDone([], {}, dict.fromkeys(COUNTED, 0))
    progress = Progress(rows=10, shard_rows=25, started_at=0.0, reported_at=20.0, worker="a")
    told = [time_left("[1, 1]", 2, 50, parts, {0: progress}, now) for now in (20.0, 25.0, 90.0)]
    assert told == [pytest.approx(80.0)] * 3


def test_the_first_seconds_are_not_taken_for_the_pace() -> None:
    def left(now: float) -> float | None:
        return seconds_left([Span("a", 0.0, now, 0.01, is_under_way=True)], 0.99, now)

    assert left(LEAST_S - 1) is None
    assert left(LEAST_S) is not None


def test_a_run_whose_shards_report_nothing_is_stalled(
    redis: Redis, invoke: Invoke, plan: Plan
) -> None:
    add_worker(redis, "w-1")
    job = f"{plan.run}-00000"
    redis.lrem("rq:queue:bulk", 1, job)
    redis.zadd("rq:wip:bulk", {f"{job}:abc": 9e12})
    now = time.time()

    def left(reported_at: float) -> str:
        """What is told of a shard that began 100 s ago, and of which a row in five is done."""
        progress = {"rows": 25, "rows_done": 5, "reported_at": reported_at}
        began_at = utcformat(datetime.fromtimestamp(now - 100, UTC))
        fields = {"status": "started", "worker_name": "w-1", "started_at": began_at}
        redis.hset(f"rq:job:{job}", mapping={**fields, "tokenmill_progress": json.dumps(progress)})
        return left_text(read_snapshot(redis, plan.run))

    assert left(now).endswith(" s")
    assert "stalled" not in left(now)
    redis.hset(f"tokenmill:run:{plan.run}", "began_at", str(now - 100))
    rate = read_snapshot(redis, plan.run).rows_per_s
    assert rate == pytest.approx(5 / 100), "the time without news does not count"
    assert left(now - STALLED_S - 5).startswith("stalled for 3")
    assert "left     stalled for 3" in invoke("status", plan.run).output
    assert left(now - 95) == "stalled for 1 min 35 s"
