"""The charts' lines: what workers tell in turns, added up over time."""

import json
import time

import pytest
from redis import Redis

from jobs.common.workers import Point
from tests.tokenmill.dashboard.test_pages import put_worker
from tokenmill.dashboard.history import History, per_second
from tokenmill.dashboard.watcher import Watcher


def rates(history: History, now: float, name: str = "generation_tokens") -> list[float]:
    found = next(line for line in history.series(now)["tokens"] if line["name"] == name)
    return [value for value in found["values"] if value]


def test_tokens_of_workers_that_tell_at_other_moments_add_up_to_a_steady_rate() -> None:
    history = History()
    for name, begins in (("a", 1000.0), ("b", 1003.7)):
        for i in range(40):
            at = begins + 9.3 * i
            history.add_point(name, Point(at=at, generation_tokens=int(93 * i)), at)
    assert rates(history, 1350.0)[2:-2] == pytest.approx(
        [20.0] * len(rates(history, 1350.0)[2:-2]), rel=0.02
    )


def test_a_dashboard_that_starts_late_shows_what_workers_have_told_before(redis: Redis) -> None:
    now = time.time()
    put_worker(redis, "a", generation_tokens=4000)
    for i in range(30):  # by a clock that is an hour ahead
        point = Point(
            at=now + 3600 - 300 + 10 * i, generation_tokens=100 * i, depth={"bulk": 300 - 10 * i}
        )
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


def test_speed_is_told_between_two_points_of_one_life_of_a_worker() -> None:
    older, newer = Point(at=10.0, rows=5), Point(at=12.0, rows=9)
    assert per_second(newer, older, "rows") == 2.0
    assert per_second(older, newer, "rows") is None, "the clock was set back"
    assert per_second(Point(at=14.0), newer, "rows") is None, "it was started anew"
    assert per_second(newer, newer, "rows") is None
