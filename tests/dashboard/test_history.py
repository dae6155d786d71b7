"""The charts' lines: what workers tell in turns, added up over time."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.watch.samples import Point
from tests.dashboard.test_pages import put_worker
from tokenmill_dashboard.history import MAX_LINES, NUM_STEPS, STEP_S, History
from tokenmill_dashboard.watcher import Watcher


def rates(history: History, now: float, name: str = "generation_tokens") -> list[float]:
    found = next(line for line in history.series(now)["tokens"] if line["name"] == name)
    return [value for value in found["values"] if value]


def test_tokens_of_workers_that_tell_at_other_moments_add_up_to_a_steady_rate() -> None:
    history = History()
    for name, begins in (("a", 1000.0), ("b", 1003.7)):
        for i in range(40):
            at = begins + 9.3 * i
            history.add_point(name, Point(at=at, generation_tokens=int(93 * i)), at)
    assert rates(history, 1350.0)[2:-2] == pytest.approx([20.0] * len(rates(history, 1350.0)[2:-2]), rel=0.02)


def test_a_worker_that_was_started_anew_or_was_silent_adds_nothing_for_that_time() -> None:
    history = History()
    for at, tokens in ((1000.0, 500), (1010.0, 100), (1020.0, 200), (2000.0, 9000), (2010.0, 9100)):
        history.add_point("a", Point(at=at, generation_tokens=tokens), at)
    assert sum(rates(history, 2100.0)) * STEP_S == pytest.approx(200)
    assert history.rate("a", "generation_tokens") == pytest.approx(10.0)
    assert history.rate("b", "generation_tokens") is None


def test_depth_that_was_counted_replaces_what_workers_told() -> None:
    history = History()
    history.add_point("a", Point(at=1000.0, depth={"bulk": 5, "prompts": 1}), 1000.0)
    history.add_depth({"bulk": 7, "late": 3}, 1001.0)
    history.add_point("c", Point(at=1005.0, depth={"bulk": 9}), 1005.0)
    history.add_point("b", Point(at=1011.0, depth={"bulk": 4}), 1011.0)
    lines = {line["name"]: line["values"][-2:] for line in history.series(1015.0)["depth"]}
    assert lines == {"bulk": [7, 4], "late": [3, None]}


def test_of_many_queues_the_longest_have_a_line_and_the_others_one_together() -> None:
    history = History()
    history.add_depth({f"q{i}": i for i in range(100)}, 1000.0)
    lines = history.series(1000.0)["depth"]
    assert [line["name"] for line in lines] == [*(f"q{i}" for i in range(94, 100)), "94 other queues"]
    assert len(lines) == MAX_LINES + 1
    assert lines[-1]["values"][-1] == sum(range(94))


@given(st.lists(st.tuples(st.floats(0, 1e15), st.integers(0, 2**62), st.floats(0, 1e9)), max_size=20))
def test_whatever_workers_tell_an_hour_is_all_that_is_shown(told: list[tuple[float, int, float]]) -> None:
    history = History()
    for at, tokens, moment in told:
        history.add_point("a", Point(at=at, generation_tokens=tokens, depth={"bulk": tokens}), moment)
        history.add_depth({"bulk": 1}, moment)
    series = history.series(1e9)
    assert len(series["times"]) <= NUM_STEPS
    for line in (*series["depth"], *series["tokens"]):
        assert len(line["values"]) == len(series["times"])
    json.dumps(series, allow_nan=False)


def test_a_dashboard_that_starts_late_shows_what_workers_have_told_before(redis: Redis) -> None:
    now = time.time()
    put_worker(redis, "a", generation_tokens=4000)
    for i in range(30):  # by a clock that is an hour ahead
        point = Point(at=now + 3600 - 300 + 10 * i, generation_tokens=100 * i, depth={"bulk": 300 - 10 * i})
        redis.lpush("tokenmill:samples:a", point.to_text())
    told = json.loads(redis.get("tokenmill:worker:a") or b"{}")
    redis.set("tokenmill:worker:a", json.dumps({**told, "updated_at": now + 3600}), keepttl=True)
    watcher = Watcher(redis)
    watcher.look()
    [depth] = watcher.series()["depth"]
    assert depth["name"] == "bulk"
    known = [value for value in depth["values"] if value is not None]
    assert known[0] in (300, 290)
    assert len(known) >= 29
    written = [value for value in watcher.series()["tokens"][0]["values"] if value]
    assert written[2:-2] == pytest.approx([10.0] * len(written[2:-2]), rel=0.05)


def test_a_look_serves_all_that_look_at_about_the_same_time(redis: Redis) -> None:
    watcher = Watcher(redis)
    assert watcher.look() is watcher.look()
