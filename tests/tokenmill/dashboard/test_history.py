"""What the charts show: it outlives workers and dashboards, and stays within its size."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from starlette.testclient import TestClient

from jobs.common.keys import HISTORY_PREFIX, samples_key
from jobs.common.workers import Point
from jobs.runs.redis_state.state import RunState
from tests.doctor.test_redis_faults import as_user, rules_of
from tests.jobs.runs.test_report import PART
from tests.tokenmill.dashboard.conftest import Open
from tests.tokenmill.dashboard.pages.test_pages import RUN, put_run, put_worker
from tokenmill.dashboard.history.charts import Charts
from tokenmill.dashboard.history.recorder import LOCK_KEY, Recorder
from tokenmill.dashboard.history.rings import KINDS, QUEUE, RINGS, WORKER, Kind, Rings
from tokenmill.dashboard.seen import watcher as watcher_module
from tokenmill.dashboard.seen.growth import per_second
from tokenmill.dashboard.seen.watcher import Watcher

#: What docs/operator.md says that all series take at most.
STATED_BYTES = 5_200_000

NOW = time.time() // 600 * 600 + 303


class Clock:
    """A clock that is set by hand."""

    def __init__(self, at: float = NOW) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "LOOK_S", 0.0)
    monkeypatch.setattr(watcher_module, "LOOK_SHARE", math.inf)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(redis: Redis, clock: Clock) -> Recorder:
    return Recorder(Watcher(redis, clock), clock)


Lines = Callable[..., dict[str, list[float | None]]]


@pytest.fixture
def lines(redis: Redis, clock: Clock) -> Lines:
    """Return the lines of a chart by name."""

    def read(of: str, chart: str, name: str = "", range_: str = "1h") -> dict[str, Any]:
        found = Charts(redis, clock).read(of, name, range_)
        assert found is not None
        assert all(len(line["values"]) == len(found["times"]) for line in found["charts"][chart])
        return {line["name"]: line["values"] for line in found["charts"][chart]}

    return read


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def record_for(recorder: Recorder, clock: Clock, seconds: int, tell: Callable[[], None]) -> None:
    """Record every ten seconds, each time after something was told."""
    for _ in range(seconds // 10):
        clock.at += 10
        tell()
        recorder.record()


def test_tokens_of_workers_that_tell_at_other_moments_add_up_to_a_steady_rate(
    redis: Redis, recorder: Recorder, lines: Lines
) -> None:
    for name, begins in (("a", NOW - 400), ("b", NOW - 396.3)):
        for i in range(40):
            at = begins + 9.3 * i
            redis.lpush(samples_key(name), Point(at=at, generation_tokens=93 * i).to_text())
        put_worker(redis, name, updated_at=NOW)
    recorder.record()
    told = lines("overview", "workers")
    sums = [a + b for a, b in zip(told["a"], told["b"], strict=True) if a is not None and b]
    assert len(sums) >= 30
    assert sums == pytest.approx([20.0] * len(sums), rel=0.02)


def test_a_dashboard_that_starts_late_shows_what_workers_have_told_before(
    redis: Redis, recorder: Recorder, lines: Lines
) -> None:
    redis.sadd("rq:queues", "rq:queue:bulk")
    for i in range(30):  # by a clock that is an hour ahead
        at = NOW + 3600 - 300 + 10 * i
        ended = {"bulk": 20 * i}
        waited_ms = {"bulk": 60_000 * i}
        point = Point(
            at=at,
            generation_tokens=100 * i,
            depth={"bulk": 300 - 10 * i},
            ended=ended,
            waited_ms=waited_ms,
        )
        redis.lpush(samples_key("a"), point.to_text())
    put_worker(redis, "a", generation_tokens=4000, updated_at=NOW + 3600)
    recorder.record()
    waiting = known(lines("overview", "waiting")["bulk"])
    assert waiting[0] in (300, 290)
    assert len(waiting) >= 29
    assert known(lines("overview", "workers")["a"])[:28] == pytest.approx([10.0] * 28, rel=0.05)
    assert known(lines("queue", "ended", "bulk")["finished"])[:28] == [2.0] * 28
    assert known(lines("queue", "latency", "bulk")["waited"])[:28] == [3.0] * 28
    assert len(known(lines("overview", "waiting", range_="24h")["bulk"])) >= 4, "minutes too"


def test_what_was_recorded_outlives_the_worker_and_the_dashboard(
    redis: Redis, recorder: Recorder, clock: Clock, lines: Lines
) -> None:
    def tell() -> None:
        tokens = int(50 * (clock.at - NOW))
        put_worker(redis, "a", updated_at=clock.at, generation_tokens=tokens, depth={"bulk": 0})

    record_for(recorder, clock, 1200, tell)
    redis.delete("rq:workers", "rq:worker:a", "tokenmill:worker:a", samples_key("a"))
    clock.at += 600
    again = Recorder(Watcher(redis, clock), clock)
    redis.delete(LOCK_KEY)
    again.record()
    in_hour = lines("worker", "tokens", "a")["generated"]
    assert known(in_hour) == pytest.approx([50.0] * 119)
    assert in_hour[-55:] == [None] * 55, "a gap, where nothing was told"
    assert known(lines("worker", "tokens", "a", "24h")["generated"]) == pytest.approx([50.0] * 21)
    assert known(lines("worker", "tokens", "a", "7d")["generated"]) == pytest.approx([50.0] * 3)


def test_a_wider_row_has_the_mean_or_the_highest_and_a_gap_stays_one(redis: Redis) -> None:
    rings = Rings(redis)
    rings.admit(QUEUE, ["q"], NOW)
    minute = int(NOW // 60)
    with redis.pipeline(transaction=False) as pipe:
        for place, waiting in ((0, 4.0), (1, 8.0), (2, None)):
            row = [waiting, 10.0 * place, 1.0, None, None, None]
            rings.write(pipe, QUEUE, 0, "q", {minute * 6 + place: row})
        pipe.zadd(QUEUE.index_key, {"q": NOW})
        pipe.execute()
    rings.roll_up(QUEUE, 1, minute - 2, minute)
    assert rings.read(QUEUE, 1, ["q"], minute - 2, minute)["q"] == {
        minute: [6.0, 20.0, 1.0, None, None, None]
    }


def test_a_row_of_an_earlier_round_is_none_of_this_one(redis: Redis) -> None:
    rings = Rings(redis)
    rings.admit(WORKER, ["w"], NOW)
    number = int(NOW // 10)
    with redis.pipeline(transaction=False) as pipe:
        rings.write(pipe, WORKER, 0, "w", {number - k: [k, 0.0, 0.0] for k in range(5)})
        pipe.execute()
    assert list(rings.read(WORKER, 0, ["w"], number - 2, number)["w"]) == [
        number - 2,
        number - 1,
        number,
    ]
    later = number + RINGS[0].num_rows - 1
    found = rings.read(WORKER, 0, ["w"], later - RINGS[0].num_rows + 1, later)["w"]
    assert found == {number: [0.0, 0.0, 0.0]}


def test_all_series_together_stay_within_what_the_docs_say(redis: Redis) -> None:
    rings = Rings(redis)
    admitted = {}
    for day in range(3):
        at = NOW + 86400 * day
        for kind in KINDS:
            names = [f"{day}-{number}" for number in range(200)]
            admitted[kind] = rings.admit(kind, names, at)
            with redis.pipeline(transaction=False) as pipe:
                for name in admitted[kind]:
                    row = [1.0] * len(kind.columns)
                    for ring, size in enumerate(RINGS):
                        rings.write(pipe, kind, ring, name, {int(at // size.width_s): row})
                pipe.execute()
    keys = list(redis.scan_iter(f"{HISTORY_PREFIX}:*"))
    used = sum(redis.memory_usage(key, samples=0) or 0 for key in keys)
    assert {kind.name: len(names) for kind, names in admitted.items()} == {
        kind.name: kind.most for kind in KINDS
    }
    assert len(keys) == sum(kind.most + 1 for kind in KINDS)
    assert 0.9 * STATED_BYTES < used <= STATED_BYTES
    assert all(0 < redis.ttl(key) <= 8 * 86400 for key in keys if b":index:" not in key)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_series_that_still_tells_keeps_its_place(redis: Redis, kind: Kind) -> None:
    rings = Rings(redis)
    names = [f"s{number}" for number in range(kind.most)]
    rings.admit(kind, names, NOW)
    assert rings.admit(kind, ["new", *names], NOW + 10) == names
    assert rings.admit(kind, ["new", *names[1:]], NOW + 4000) == [*names[1:], "new"]


def test_one_of_two_dashboards_writes_and_the_other_takes_over(
    redis: Redis, recorder: Recorder, clock: Clock
) -> None:
    other = Recorder(Watcher(redis, clock), clock)
    assert (recorder.record(), other.record(), recorder.record()) == (True, False, True)
    assert 0 < redis.ttl(LOCK_KEY) <= 35
    redis.delete(LOCK_KEY)  # it was silent for as long
    assert (other.record(), recorder.record()) == (True, False)


def test_a_queue_has_its_oldest_jobs_age_its_throughput_and_its_times(
    redis: Redis, recorder: Recorder, clock: Clock, lines: Lines
) -> None:
    for _ in range(3):
        Queue("bulk", connection=redis, serializer="json").enqueue("jobs.complete", "x")
    clock.at += time.time() - NOW + 1200  # other tests may have taken long before this one
    rounds = iter(range(100))

    def tell() -> None:
        number = next(rounds)
        put_worker(
            redis,
            "a",
            updated_at=clock.at,
            depth={"bulk": 3, "idle": 0},
            ended={"bulk": 10 * number},
            ended_badly={"bulk": 5 * number},
            waited_ms={"bulk": 30_000 * number},
            ran_ms={"bulk": 5_000 * number},
        )

    record_for(recorder, clock, 120, tell)
    assert set(known(lines("queue", "waiting", "bulk")["waiting"])) == {3.0}
    ages = known(lines("queue", "oldest", "bulk")["oldest"])
    assert ages[-1] - ages[0] == pytest.approx(110, abs=1)
    assert set(known(lines("queue", "ended", "bulk")["finished"])) == {0.5}
    assert set(known(lines("queue", "ended", "bulk")["failed"])) == {0.5}
    assert set(known(lines("queue", "latency", "bulk")["waited"])) == {3.0}
    assert set(known(lines("queue", "latency", "bulk")["ran"])) == {0.5}


def test_a_runs_rows_are_counted_until_it_ends(
    redis: Redis, recorder: Recorder, clock: Clock, lines: Lines
) -> None:
    put_run(redis, rows=100, shards=10)
    redis.hset(f"tokenmill:run:{RUN}:parts", "total", 10)
    state = RunState(redis, RUN)
    shards = iter(range(10))

    def tell() -> None:
        state.record_part(replace(PART, run=RUN, shard=next(shards), rows=10, errors=1))

    record_for(recorder, clock, 100, tell)
    clock.at += 2
    assert known(lines("run", "rows", RUN)["rows"]) == [1.0] * 9
    assert known(lines("run", "rows", RUN)["errors"]) == [0.1] * 9


def test_workers_that_come_leave_and_die_are_marked(
    redis: Redis, recorder: Recorder, clock: Clock
) -> None:
    def marks() -> list[tuple[str, str]]:
        found = Charts(redis, clock).read("overview", "", "1h")
        assert found is not None
        return [(mark["worker"], mark["what"]) for mark in found["marks"]]

    for name in ("leaves", "dies", "stays"):
        put_worker(redis, name, started_at=NOW - 60)
    recorder.record()
    recorder.record()
    assert sorted(marks()) == [("dies", "came"), ("leaves", "came"), ("stays", "came")]
    found = Charts(redis, clock).read("worker", "stays", "1h")
    assert found is not None
    assert [mark["at"] for mark in found["marks"]] == [NOW - 60], "long before anybody looked"

    put_worker(redis, "leaves", state="stopped", started_at=NOW - 60)
    redis.srem("rq:workers", "rq:worker:leaves")
    put_worker(redis, "dies", silent_s=60, started_at=NOW - 60)
    put_worker(redis, "loads", state="loading")
    clock.at += 10
    redis.delete(LOCK_KEY)
    Recorder(Watcher(redis, clock), clock).record()
    assert sorted(marks()[3:]) == [("dies", "died"), ("leaves", "left")]

    put_worker(redis, "stays", started_at=NOW + 10)
    clock.at += 10
    redis.delete(LOCK_KEY)
    recorder.record()
    assert marks()[5:] == [("stays", "came")], "a worker of the same name took its place"


def test_the_user_that_ships_may_write_the_history(redis: Redis, redis_url: str) -> None:
    put_worker(redis, "a")
    redis.sadd("rq:queues", "rq:queue:bulk")
    redis.rpush("rq:queue:bulk", "job")
    user = Redis.from_url(as_user(redis, redis_url, "dashboard", rules_of("dashboard")))
    try:
        clock = Clock()
        recorder = Recorder(Watcher(user, clock), clock)
        for _ in range(8):
            clock.at += 10
            assert recorder.record()
        assert Charts(user, clock).read("overview", "", "24h") is not None
    finally:
        user.close()
        redis.execute_command("ACL", "DELUSER", "dashboard")


def test_a_user_without_the_rights_is_told_so_in_the_place_of_charts(
    redis: Redis, redis_url: str, open_page: Open
) -> None:
    user = Redis.from_url(as_user(redis, redis_url, "producer", rules_of("producer")))
    try:
        assert open_page(user).get("/").status_code == 200
        answer = open_page(user).get("/series.json")
        assert answer.status_code == 503
        assert "NoPermission" in answer.json()["problem"]
    finally:
        user.close()
        redis.execute_command("ACL", "DELUSER", "producer")


def test_whatever_stands_where_the_history_should_is_charted_or_left_out(
    redis: Redis, page: TestClient, recorder: Recorder
) -> None:
    redis.sadd("rq:queues", "rq:queue:bulk")
    put_worker(redis, "a", depth={"bulk": 1})
    recorder.record()
    redis.set(QUEUE.key("bulk"), b"\xff" * QUEUE.num_bytes)
    redis.delete(WORKER.key("a"))
    redis.rpush(WORKER.key("a"), "x")
    redis.zadd(WORKER.index_key, {b"\xff\x1b[2J": time.time()})
    redis.zadd(f"{HISTORY_PREFIX}:marks", {"[": time.time(), '{"at": "x"}': time.time()})
    for range_ in ("15m", "1h", "24h", "7d"):
        for of, name in (("overview", ""), ("queue", "bulk"), ("worker", "a"), ("run", "\ud800")):
            asked = {"of": of, "name": name.encode(errors="replace"), "range": range_}
            answer = page.get("/series.json", params=asked)
            assert answer.status_code == 200
            assert "\x1b" not in answer.text
    assert page.get("/series.json?of=nothing").status_code == 404
    assert page.get("/series.json?range=2y").status_code == 404


def test_a_full_redis_costs_rows_and_nothing_else(
    redis: Redis, recorder: Recorder, clock: Clock, lines: Lines
) -> None:
    redis.sadd("rq:queues", "rq:queue:bulk")
    recorder.attempt()
    redis.config_set("maxmemory", "1")
    try:
        clock.at += 10
        recorder.attempt()
        assert "OutOfMemory" in recorder.problem
        clock.at += 2
        assert known(lines("overview", "waiting")["bulk"]) == [0.0], "what was written is shown"
    finally:
        redis.config_set("maxmemory", "0")
    recorder.attempt()
    assert recorder.problem == ""


def test_speed_is_told_between_two_points_of_one_life_of_a_worker() -> None:
    older, newer = Point(at=10.0, rows=5), Point(at=12.0, rows=9)
    assert per_second(newer, older, "rows") == 2.0
    assert per_second(older, newer, "rows") is None, "the clock was set back"
    assert per_second(Point(at=14.0), newer, "rows") is None, "it was started anew"
    assert per_second(newer, newer, "rows") is None
