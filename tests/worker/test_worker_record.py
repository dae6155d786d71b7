"""What a worker shows of itself stays true while Redis is full, and while it loads again under its old name."""

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, served_key, worker_key
from jobs.common.workers import LOADING, Point, read_workers
from worker.store.worker_record import WorkerRecord, shown_loading


def record_of(redis: Redis, name: str) -> WorkerRecord:
    redis.sadd("rq:workers", f"rq:worker:{name}")
    return WorkerRecord(redis, name, ["bulk"], lambda *_: None, {"models": ["small"]})


def test_a_worker_does_not_look_silent_because_redis_is_full(redis: Redis) -> None:
    record = record_of(redis, "w")
    record.show("busy", None, {}, Point(at=0.0))
    redis.expire(worker_key("w"), WORKER_STATS_TTL_S - 2 * SILENT_S)
    redis.expire(served_key("w"), 1)
    (worker,) = read_workers(redis)
    assert worker.is_silent

    redis.config_set("maxmemory", "1")
    with pytest.raises(ResponseError, match="maxmemory"):
        record.show("busy", None, {}, Point(at=0.0))
    redis.config_set("maxmemory", "0")
    (worker,) = read_workers(redis)
    assert not worker.is_silent
    assert worker.sample is not None
    assert list(worker.sample.models) == ["small"]
    assert redis.ttl(served_key("w")) > SILENT_S / 2


def test_a_worker_that_loads_under_the_name_of_a_killed_one_is_shown_and_not_the_killed_one(
    redis: Redis,
) -> None:
    killed = record_of(redis, "w")
    killed.show("busy", None, {}, Point(at=0.0))
    redis.expire(worker_key("w"), WORKER_STATS_TTL_S - 2 * SILENT_S)
    with shown_loading(redis, "w", ["bulk"], "small", "folder"):
        (worker,) = read_workers(redis)
        assert worker.sample is not None
        assert worker.sample.state == LOADING
        assert not worker.is_silent
    record_of(redis, "w").show("idle", None, {}, Point(at=0.0))
    (worker,) = read_workers(redis)
    assert worker.sample is not None
    assert worker.sample.state == "idle"
