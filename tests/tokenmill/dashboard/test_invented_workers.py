"""Whatever a producer writes where workers tell of themselves, all that reads it goes on."""

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis
from starlette.testclient import TestClient

from jobs.cli import main
from jobs.common.keys import loading_key, samples_key, worker_key
from jobs.common.workers import (
    LOADING,
    MAX_ENTRIES,
    MAX_TEXT_CHARS,
    WorkerSample,
    listening_on,
    read_workers,
)
from tests.examples import examples
from tests.tokenmill.dashboard.conftest import Open
from tests.tokenmill.dashboard.pages.test_pages import put_run, put_worker
from tokenmill.dashboard.seen import watcher

FIELDS = [*WorkerSample.__dataclass_fields__, "updated_at"]
TEXTS = st.text(st.characters(exclude_categories=()), max_size=5)
ODD = st.sampled_from(
    [
        "soon",
        "\ud800",
        "\x1b[2J",
        "9" * 5000,
        [[]] * 2000,
        {"bulk": -1},
        1e308,
        1 << 62,
        [None],
        -0.0,
    ]
)
GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | TEXTS | ODD,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
RECORDS = st.dictionaries(st.sampled_from(FIELDS), GARBAGE, min_size=1)
EVERY_EXAMPLE = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def put_record(redis: Redis, name: str, record: Any) -> None:
    """Write a record of a worker that looks alive, and the same as its last hour."""
    redis.sadd("rq:workers", f"rq:worker:{name}")
    redis.hset(f"rq:worker:{name}", mapping={"state": "busy", "queues": "bulk"})
    key = (
        loading_key(name)
        if isinstance(record, dict) and record.get("state") == LOADING
        else worker_key(name)
    )
    redis.set(key, json.dumps(record), ex=3600)
    redis.lpush(
        samples_key(name), json.dumps(record), "[", json.dumps({"at": time.time(), "rows": 1})
    )


def read_everything(page: TestClient, redis: Redis, redis_url: str) -> None:
    """Fail unless each reader of workers answers, and shows nothing that a terminal obeys."""
    for path in ("/", "/series.json", "/metrics"):
        answer = page.get(path)
        assert answer.status_code == 200, (path, answer.text)
    for command in (["workers"], ["workers", "--json"], ["info"], ["status"], ["runs"]):
        done = CliRunner().invoke(main, ["--url", redis_url, *command])
        assert (done.exit_code, done.exception) == (0, None), (command, done.output)
        assert "\x1b" not in done.output
    assert listening_on(read_workers(redis), "bulk")


@pytest.fixture
def page(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A dashboard that looks at Redis at each request."""
    monkeypatch.setattr(watcher, "LOOK_S", 0.0)
    monkeypatch.setattr(watcher, "LOOK_SHARE", float("inf"))
    return open_page(queues=("bulk",))


@EVERY_EXAMPLE
@given(records=st.lists(RECORDS, min_size=1, max_size=4))
@example(
    records=[
        {"updated_at": "soon"},
        {"queues": 5},
        {"models": 5, "claimed": [1]},
        {"state": LOADING, "at": {}},
    ]
)
@example(
    records=[
        {"held": {"a": "\ud800"}, "model": "\ud800", "version": None},
        {"kv_cache_usage": float("nan")},
    ]
)
@example(
    records=[
        {
            "silent_s": "x",
            "name": 5,
            "prompt_tokens": 10**400,
            "cached_tokens": -1,
            "depth": {"bulk": "x"},
        }
    ]
)
def test_invented_records_of_workers_fail_no_reader(
    page: TestClient, redis: Redis, redis_url: str, records: list[dict[str, Any]]
) -> None:
    redis.flushall()
    put_worker(redis, "real")
    put_run(redis)
    for number, record in enumerate(records):
        put_record(redis, f"invented-{number}", record)
    read_everything(page, redis, redis_url)


@pytest.mark.parametrize("record", [[], 5, "x", None, {}, [{}]])
def test_a_record_that_is_no_object_is_none(
    page: TestClient, redis: Redis, redis_url: str, record: Any
) -> None:
    put_record(redis, "invented", record)
    read_everything(page, redis, redis_url)
    assert [worker.sample for worker in read_workers(redis)] == [None]


def test_keys_of_another_type_fail_no_reader(
    page: TestClient, redis: Redis, redis_url: str
) -> None:
    put_worker(redis, "invented")
    for key in ("tokenmill:worker:other", "tokenmill:worker:other:loading", "rq:worker:other"):
        redis.rpush(key, "x")
    redis.sadd("rq:workers", "rq:worker:other", b"rq:worker:\xff\x1b")
    redis.set("tokenmill:samples:invented", "x")
    read_everything(page, redis, redis_url)


def test_each_value_of_a_record_is_of_its_kind_and_within_bounds() -> None:
    wrong = WorkerSample.from_object(
        {
            "at": float("inf"),
            "prompt_tokens": True,
            "kv_cache_usage": -1,
            "model": "m" * (MAX_TEXT_CHARS + 1),
            "queues": ["a"] * (MAX_ENTRIES + 1),
            "held": {"a": -1, "b": 2},
            "models": ["a", 5, None],
            "dtype": "\x1b",
        }
    )
    assert wrong == WorkerSample(held={"b": 2}, models=["a"], dtype="\\x1b")
