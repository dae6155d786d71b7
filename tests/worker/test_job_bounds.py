"""What a job's hash may cost the worker that reads it: memory and time, whatever was written there."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.table import ALLOWED_FUNCTIONS
from tests.rq_workers import Workers, leftovers, text_of
from worker.errors import TooLarge
from worker.io_thread.held.admission import Admission
from worker.store.job_store import JobStore
from worker.store.records.bounds import check_containers
from worker.store.records.claimed_job import ClaimedJob, Wanted

MIB = 1 << 20
CALL = ["jobs.complete", None, ["a"], {"max_tokens": 1}]


def enqueue(redis: Redis, **fields: bytes | str) -> str:
    """Queue a job with these fields of its hash as they stand; return its id."""
    job = Queue("bulk", connection=redis, serializer=JSONSerializer).enqueue("jobs.complete", "a")
    redis.hset(job.key, mapping=fields)  # type: ignore[arg-type]
    return str(job.id)


def claim(redis: Redis, most: int = 50) -> list[ClaimedJob]:
    wanted = Wanted("bulk", most, f"{redis.incr('claims'):024x}", takes_suspects=True)
    return JobStore(redis, "w", lease_s=30).claim([wanted], float("inf"))[0].jobs


def admit(claimed: ClaimedJob) -> Any:
    return Admission(ALLOWED_FUNCTIONS).admit(claimed, claimed.record.payload())


def peak_mib(work: Any) -> float:
    """The most memory that `work` had at a time, in MiB."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def test_a_field_that_nobody_reads_is_not_unpacked(redis: Redis) -> None:
    bomb = zlib.compress(bytes(128 * MIB))
    job_id = enqueue(redis, exc_info=bomb, result=b"[" + b"[]," * MIB + b"1]")
    held: list[ClaimedJob] = []
    assert peak_mib(lambda: held.extend(claim(redis))) < 16
    assert [(each.job_id, each.damage) for each in held] == [(job_id, None)]


@pytest.mark.parametrize("field", ["meta", "webhooks", "dependency_ids", "repeat_intervals", "extra"])
def test_a_hash_beyond_its_bound_stays_in_redis(redis: Redis, field: str) -> None:
    enqueue(redis, **{field: b"[" + b" " * 64 * MIB + b"]"})
    held: list[ClaimedJob] = []
    assert peak_mib(lambda: held.extend(claim(redis))) < 16
    assert isinstance(held[0].damage, TooLarge)
    assert "bytes in Redis, more than the limit of 9437184" in str(held[0].damage)


def test_a_hash_of_too_many_fields_stays_in_redis(redis: Redis) -> None:
    enqueue(redis, **{f"field {number}": "x" for number in range(1000)})
    damage = claim(redis)[0].damage
    assert isinstance(damage, TooLarge)
    assert "more than the limit of 1000 fields" in str(damage)


@pytest.mark.parametrize("field", ["timeout", "result_ttl", "failure_ttl", "ttl"])
def test_seconds_that_are_none_are_named(redis: Redis, field: str) -> None:
    enqueue(redis, **{field: "abc"})
    assert str(claim(redis)[0].damage) == f"{field} is b'abc', expected whole seconds"


def test_an_id_that_is_too_long_says_what_to_do(redis: Redis) -> None:
    enqueue(redis, timeout="180")
    [claimed] = claim(redis)
    claimed = replace(claimed, job_id="a" * 256)
    with pytest.raises(TooLarge, match="256 characters, more than the limit of 255: enqueue it with"):
        admit(claimed)


def test_a_claim_takes_no_more_than_its_bytes(redis: Redis) -> None:
    ids = [enqueue(redis, description=b"x" * 4 * MIB) for _ in range(5)]
    taken = [[each.job_id for each in claim(redis)] for _ in range(3)]
    assert [job_id for some in taken for job_id in some] == ids
    assert max(map(len, taken)) == 3


def test_a_held_job_keeps_no_blanks_of_its_payload(redis: Redis) -> None:
    for _ in range(10):
        enqueue(redis, data=zlib.compress(json.dumps(CALL).encode() + b" " * 3 * MIB))
    tracemalloc.start()
    held = claim(redis)
    calls = [admit(each) for each in held]
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert [call.args for call in calls] == [["a"]] * 10
    assert kept < MIB


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":1},', b"[[[]]],", b'["[",{}],'])
def test_a_payload_of_lists_and_objects_is_refused_before_it_is_parsed(redis: Redis, unit: bytes) -> None:
    text = b'["jobs.complete",null,[' + unit * (3 * MIB // len(unit)) + b"1],{}]"
    enqueue(redis, data=zlib.compress(text))
    [claimed] = claim(redis)

    def refuse() -> None:
        with pytest.raises(TooLarge, match="lists and objects, more than the limit of 104857"):
            admit(claimed)

    assert peak_mib(refuse) < 32


def test_brackets_and_quotes_in_a_prompt_are_no_lists(redis: Redis) -> None:
    prompt = '{"a": [[], "\\", {}]} \\' * 40_000
    enqueue(redis, data=zlib.compress(json.dumps(["jobs.complete", None, [prompt], {}]).encode()))
    assert admit(claim(redis)[0]).args == [prompt]


JSON = st.recursive(
    st.none() | st.integers() | st.text('"[{\\}]a,:\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"[{\\a', max_size=4), inner, max_size=4)
    ),
)


def num_containers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@given(JSON)
def test_lists_and_objects_are_counted_without_parsing(value: Any) -> None:
    text, most = json.dumps(value).encode(), num_containers(value)
    check_containers("payload", text, most)
    if most:
        with pytest.raises(TooLarge, match=f"holds {most} lists"):
            check_containers("payload", text, most - 1)


def test_a_dependent_beyond_its_bounds_is_queued_unread_and_fails_by_name(workers: Workers) -> None:
    queue = workers.queue("bulk")
    first = queue.enqueue("jobs.complete", "a", max_tokens=1)
    large = queue.enqueue("jobs.complete", "b", max_tokens=1, depends_on=first)
    good = queue.enqueue("jobs.complete", "c", max_tokens=1, depends_on=first)
    workers.redis.hset(large.key, "extra", b"x" * 32 * MIB)
    process = workers.start()
    assert text_of(workers.result(good)) == "echo:c"
    assert "bytes in Redis" in str(workers.result(large).exc_string)
    process.terminate()
    assert process.wait(timeout=60) == 0


def test_jobs_beyond_their_bounds_fail_by_name_and_no_other(workers: Workers) -> None:
    redis = workers.redis
    lists = zlib.compress(b'["jobs.complete",null,[' + b"[]," * MIB + b"1],{}]")
    bad = {
        "lists and objects": enqueue(redis, data=lists),
        "more than the limit of 4194304 bytes": enqueue(redis, data=zlib.compress(bytes(5 * MIB))),
        "bytes in Redis": enqueue(redis, meta=b"x" * 10 * MIB),
        "meta has": enqueue(redis, meta=b"x" * 2 * MIB),
    }
    good = workers.queue("bulk").enqueue("jobs.complete", "x" * MIB, max_tokens=1, meta={"a": 1})
    workers.burst()
    assert len(text_of(workers.result(good))) == MIB + len("echo:")
    for reason, job_id in bad.items():
        text = str(workers.result(workers.job(job_id)).exc_string)
        assert reason in text
        assert text.endswith("tokenmill: client\n")
    assert leftovers(workers.redis, "bulk") == []
