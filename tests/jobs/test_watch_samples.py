"""What is read of workers' samples: whatever anybody wrote, and of many workers in few round trips."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, samples_key, worker_key
from jobs.watch.samples import MAX_POINTS, Point, WorkerSample, read_points, read_samples, worker_names

POINT = Point(at=5.0, prompt_tokens=7, kv_cache_usage=0.25, depth={"prompts": 3, "büro": 0})


def test_a_point_is_read_as_it_was_written() -> None:
    assert Point.from_object(json.loads(POINT.to_text())) == POINT


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda each: (
    st.lists(each) | st.dictionaries(st.text() | st.sampled_from(["at", "rows", "depth", "queues"]), each)
)))  # fmt: skip
def test_whatever_was_written_gives_a_sample_that_can_be_shown(value: object) -> None:
    found = (
        value if isinstance(value, dict) else {"depth": value, "queues": value, "at": value, "rows": value}
    )
    sample = WorkerSample.of_worker("w", {**found, "updated_at": value}, 1.0)
    assert all(type(number) is int and number >= 0 for number in (sample.rows, *sample.depth.values()))
    assert math.isfinite(sample.at)
    assert all(name.isprintable() for name in (sample.model, *sample.queues, *sample.depth))


def test_speed_is_told_between_two_points_of_one_life_of_a_worker() -> None:
    older, newer = Point(at=10.0, rows=5), Point(at=12.0, rows=9)
    assert newer.per_second(older, "rows") == 2.0
    assert older.per_second(newer, "rows") is None, "the clock was set back"
    assert Point(at=14.0).per_second(newer, "rows") is None, "it was started anew"
    assert newer.per_second(newer, "rows") is None


def test_workers_are_read_in_the_order_of_their_names_without_those_that_tell_nothing(redis: Redis) -> None:
    names = [f"w{i:03}" for i in range(450)]
    with redis.pipeline() as pipe:
        pipe.sadd("rq:workers", "rq:worker:rq's own", *(f"rq:worker:{name}" for name in names))
        for name in names:
            told = {"state": "draining", "queues": ["a"], "max_num_seqs": 4, "num_requests_running": 3}
            pipe.set(worker_key(name), json.dumps(told), ex=WORKER_STATS_TTL_S)
        pipe.execute()
    redis.expire(worker_key("w007"), WORKER_STATS_TTL_S - 2 * SILENT_S)
    samples = read_samples(redis)
    assert worker_names(redis) == ["rq's own", *names]
    assert [sample.name for sample in samples] == names
    assert [sample.name for sample in samples if sample.is_silent] == ["w007"]
    assert samples[0].is_draining
    assert (samples[0].queues, samples[0].batch_fill) == (("a",), 0.75)
    assert [sample.name for sample in read_samples(redis, ["w001", "gone"])] == ["w001"]


def test_points_come_in_the_order_of_time_and_bad_ones_are_left_out(redis: Redis) -> None:
    redis.lpush(
        samples_key("w"),
        "[" * 20_000,
        "no json",
        "[]",
        '{"at": "x"}',
        json.dumps({"at": 1, "x": "y" * 20_000}),
    )
    for at in (1.0, 2.0, 3.0):
        redis.lpush(samples_key("w"), Point(at=at).to_text())
    redis.set(samples_key("typed"), "x")
    points = read_points(redis, ["w", "typed", "none"])
    assert [point.at for point in points["w"]] == [1.0, 2.0, 3.0]
    assert (points["typed"], points["none"]) == ([], [])
    assert [point.at for point in read_points(redis, ["w"], most=2)["w"]] == [2.0, 3.0]


@pytest.mark.parametrize("most", [0, -1])
def test_no_points_are_read_where_none_are_asked_for(redis: Redis, most: int) -> None:
    redis.lpush(samples_key("w"), *[POINT.to_text()] * (MAX_POINTS + 5))
    assert read_points(redis, ["w"], most=most) == {"w": []}
    assert len(read_points(redis, ["w"])["w"]) == MAX_POINTS
