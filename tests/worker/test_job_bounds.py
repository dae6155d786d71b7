"""What a job's hash may cost the worker that reads it: memory and time, whatever was written there."""

import json
import tracemalloc
import zlib
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.table import ALLOWED_FUNCTIONS
from tests.rq_workers import Workers, leftovers, text_of
from worker.errors import TooLarge
from worker.io_thread.held.admission import Admission
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob, ClaimRequest

MIB = 1 << 20


def enqueue(redis: Redis, **fields: bytes | str) -> str:
    """Queue a job with these fields of its hash as they stand; return its id."""
    job = Queue("bulk", connection=redis, serializer=JSONSerializer).enqueue("jobs.complete", "a")
    redis.hset(job.key, mapping=fields)  # type: ignore[arg-type]
    return str(job.id)


def claim(redis: Redis, most: int = 50) -> list[ClaimedJob]:
    wanted = ClaimRequest("bulk", most, f"{redis.incr('claims'):024x}", takes_suspects=True)
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


@pytest.mark.parametrize(
    "field", ["meta", "webhooks", "dependency_ids", "repeat_intervals", "extra"]
)
def test_a_hash_beyond_its_bound_stays_in_redis(redis: Redis, field: str) -> None:
    enqueue(redis, **{field: b"[" + b" " * 64 * MIB + b"]"})
    held: list[ClaimedJob] = []
    assert peak_mib(lambda: held.extend(claim(redis))) < 16
    assert isinstance(held[0].damage, TooLarge)
    assert "bytes in Redis, more than the limit of 9437184" in str(held[0].damage)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":1},', b"[[[]]],", b'["[",{}],'])
def test_a_payload_of_lists_and_objects_is_refused_before_it_is_parsed(
    redis: Redis, unit: bytes
) -> None:
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


def test_jobs_beyond_their_bounds_fail_by_name_and_no_other(workers: Workers) -> None:
    redis = workers.redis
    lists = zlib.compress(b'["jobs.complete",null,[' + b"[]," * MIB + b"1],{}]")
    bad = {
        "lists and objects": enqueue(redis, data=lists),
        "more than the limit of 4194304 bytes": enqueue(redis, data=zlib.compress(bytes(5 * MIB))),
        "bytes in Redis": enqueue(redis, meta=b"x" * 10 * MIB),
        "meta has": enqueue(redis, meta=b"x" * 2 * MIB),
    }
    long = workers.queue("bulk").enqueue("jobs.complete", "a", job_id="x" * 256)
    bad["the job's id has 256 characters, more than the limit of 255"] = long.id
    good = workers.queue("bulk").enqueue("jobs.complete", "x" * MIB, max_tokens=1, meta={"a": 1})
    workers.burst()
    assert len(text_of(workers.result(good))) == MIB + len("echo:")
    for reason, job_id in bad.items():
        text = str(workers.result(workers.job(job_id)).exc_string)
        assert reason in text
        assert text.endswith("tokenmill: client\n")
    assert leftovers(workers.redis, "bulk") == []
