"""Keys of RQ's and ours that hold what no worker wrote there: they are set aside, and jobs go on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now

from tests.rq_workers import ROOT, Workers, leftovers, text_of, wait_until, wait_until_started
from worker.store.job_store import JobStore
from worker.store.quarantine import Quarantine
from worker.store.records.claimed_job import Wanted
from worker.store.records.outcome import Outcome
from worker.store.registries import Registries

NAME = "strange"
QUARANTINE = "tokenmill:quarantine"

SHARED = [
    QUARANTINE,  # first: what was noted there is not told any more
    "rq:queues",
    "rq:workers",
    "rq:groups",
    "rq:rl-keys",
    *(f"rq:{name}:bulk" for name in ("queue", "wip", "finished", "failed", "deferred", "canceled")),
    "rq:scheduled:bulk",
    "rq:queue:bulk:intermediate",
    "rq:workers:bulk",
    "tokenmill:held:bulk",
    "tokenmill:fleet:bulk",
    f"rq:worker:{NAME}",
    f"tokenmill:worker:{NAME}",
]


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


def replace_by_another_type(redis: Redis, key: str) -> None:
    """Put a set where no set is expected, else a list; all at once."""
    with redis.pipeline() as pipe:
        pipe.delete(key)
        if key in ("rq:queues", "rq:workers", "rq:groups", "rq:rl-keys", "rq:workers:bulk"):
            pipe.rpush(key, "odd")
        else:
            pipe.sadd(key, "odd")
        pipe.execute()


def enqueue(queue: Queue, prompt: str) -> Job:
    """Enqueue as a producer does that tries again while its queue is of another type."""
    found: list[Job] = []

    def has_enqueued() -> bool:
        try:
            found.append(queue.enqueue("jobs.complete", prompt, max_tokens=1))
        except ResponseError:
            return False
        return True

    wait_until(has_enqueued)
    return found[0]


def claim(jobs: JobStore, most: int = 10, max_functions: int = 10) -> list[str]:
    wanted = [Wanted("bulk", most, uuid4().hex[:24], takes_suspects=True, max_functions=max_functions)]
    return [each.job_id for each in jobs.claim(wanted, float("inf"))[0].jobs]


def test_a_key_of_another_type_costs_no_job_its_result(workers: Workers, tmp_path: Path) -> None:
    """Neither one that is enqueued then, nor one that a worker holds."""
    go, queue = tmp_path / "go", workers.queue("bulk")
    process = workers.start("--name", NAME)
    held = queue.enqueue("jobs.complete", f"file:{go}", max_tokens=1)
    wait_until_started(held)
    for key in SHARED:
        replace_by_another_type(workers.redis, key)
        assert text_of(workers.result(enqueue(queue, key))) == f"echo:{key}"
    places = [f"{QUARANTINE}:{key}" for key in SHARED]
    wait_until(lambda: workers.redis.exists(*places) == len(places))
    assert all(0 < workers.redis.ttl(place) <= 7 * 24 * 3600 for place in places)
    wait_until(lambda: all(f"): {key}: a " in workers.log(process) for key in SHARED))
    go.touch()
    assert text_of(workers.result(held)) == f"echo:file:{go}"
    process.terminate()
    assert process.wait(60) == 0
    assert leftovers(workers.redis, "bulk") == []


def test_a_lane_of_another_type_stops_no_other(workers: Workers) -> None:
    workers.redis.set("rq:queue:high", "no list")
    workers.redis.set("tokenmill:held:high", "no hash")
    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    log = workers.burst()
    assert text_of(workers.result(job)) == "echo:a"
    assert "Redis did not answer" not in log


def test_scheduled_jobs_are_run_beside_keys_of_another_type(workers: Workers) -> None:
    past, job = datetime(2026, 1, 1, tzinfo=UTC), None
    job = workers.queue("bulk").enqueue_at(past, "jobs.complete", "a", max_tokens=1)
    for key in ("rq:scheduled:high", "rq:scheduler-lock:high", "rq:queue:bulk"):
        workers.redis.set(key, "no zset, no lock that ends, no list")
    workers.start("--with-scheduler")
    assert text_of(workers.result(job)) == "echo:a"


def test_counts_and_results_that_take_no_more_keep_no_job_from_its_end(redis: Redis, bulk: Queue) -> None:
    jobs, job = JobStore(redis, "w", lease_s=30), bulk.enqueue("f")
    redis.hset("rq:worker:w", mapping={"successful_job_count": "many", "total_working_time": "inf"})
    redis.xadd(f"rq:results:{job.id}", {"a": "b"}, id="18446744073709551615-18446744073709551615")
    claimed = jobs.claim([Wanted("bulk", 1, "a" * 24, takes_suspects=True)], float("inf"))[0].jobs[0]
    assert jobs.finish([Outcome(claimed, "finished", 1, now(), 1.5)]) == ["done"]
    assert redis.hmget("rq:worker:w", "successful_job_count", "total_working_time") == [b"1", b"1.5"]
    assert job.latest_result() is not None
    noted = [told[b"reason"] for _, told in redis.xrange(QUARANTINE)]
    assert sorted(noted) == [
        b"a stream whose ids are used up",
        b"no number to count on in successful_job_count",
        b"no number to count on in total_working_time",
    ]


@pytest.mark.parametrize("member", [b"no execution", b"a:\xff", b"\xff"])
def test_a_held_entry_that_names_no_execution_is_set_aside(redis: Redis, member: bytes) -> None:
    redis.hset("tokenmill:held:bulk", member, "|")
    assert JobStore(redis, "w", lease_s=30).reclaim_abandoned(["bulk"], 1, 5) == []
    assert redis.hkeys("tokenmill:held:bulk") == []
    assert [told[b"entry"] for _, told in redis.xrange(QUARANTINE)] == [member]


def test_a_function_whose_id_is_no_text_is_not_left_in_the_queue(redis: Redis, bulk: Queue) -> None:
    redis.hset(b"rq:job:\xff", mapping={"status": "queued", "enqueued_at": "x", "tokenmill_kind": "function"})
    redis.rpush("rq:queue:bulk", b"\xff")
    job = bulk.enqueue("f")
    assert claim(JobStore(redis, "w", lease_s=30), max_functions=0) == [job.id]


def test_a_job_whose_record_was_lost_is_still_held_by_who_holds_it(redis: Redis, bulk: Queue) -> None:
    first, second = JobStore(redis, "first", lease_s=30), JobStore(redis, "second", lease_s=30)
    job = bulk.enqueue("f")
    [claimed] = first.claim([Wanted("bulk", 1, "a" * 24, takes_suspects=True)], float("inf"))[0].jobs
    redis.set("tokenmill:held:bulk", "no hash")
    assert second.quarantine.check(["bulk"]) == 1
    assert first.renew([claimed]) == []
    assert redis.hlen("tokenmill:held:bulk") == 1
    redis.delete("tokenmill:held:bulk", f"rq:execution:{job.id}:{claimed.execution_id}")
    assert first.release([claimed], "given_back", 5) == []
    assert claim(second) == [job.id]
    assert first.renew([claimed]) == [claimed]


def test_a_claim_that_is_asked_for_again_finds_its_jobs_also_where_their_record_was_lost(
    redis: Redis, bulk: Queue
) -> None:
    job, wanted = bulk.enqueue("f"), Wanted("bulk", 1, "a" * 24, takes_suspects=True)
    for _ in range(2):  # each has not heard of the other's reply
        [claim] = JobStore(redis, "w", lease_s=30).claim([wanted], float("inf"))
        assert [each.job_id for each in claim.jobs] == [job.id]
        redis.delete("tokenmill:held:bulk")


@pytest.mark.parametrize("key", ["tokenmill:maintenance:bulk", "rq:scheduler-lock:bulk"])
@pytest.mark.parametrize("ttl_s", [None, 10**6])
def test_a_lock_that_does_not_end_is_nobodys(redis: Redis, key: str, ttl_s: int | None) -> None:
    redis.set(key, "somebody", ex=ttl_s)
    redis.set("rq:clean_registries:bulk", 1, ex=899)
    assert Quarantine(redis, "w").check(["bulk"]) == 1
    assert not redis.exists(key)
    assert redis.exists("rq:clean_registries:bulk")


def test_a_lease_that_does_not_end_is_nobodys(redis: Redis, bulk: Queue) -> None:
    jobs, job = JobStore(redis, "w", lease_s=30), bulk.enqueue("f")
    [claimed] = jobs.claim([Wanted("bulk", 1, "a" * 24, takes_suspects=True)], float("inf"))[0].jobs
    key = f"rq:execution:{job.id}:{claimed.execution_id}"
    redis.delete(key)
    redis.set(key, "a stranger's")
    assert jobs.reclaim_abandoned(["bulk"], 1, 5) == []
    assert bulk.get_job_ids() == [job.id]


def test_registries_are_cleaned_beside_entries_that_are_no_text(redis: Redis, bulk: Queue) -> None:
    for key in ("rq:workers", "rq:workers:bulk", "rq:groups", "rq:group:a"):
        redis.sadd(key, b"\xff", "gone")
    redis.sadd("rq:groups", "a", "b")
    redis.set("rq:group:b", "no set")
    redis.zadd("rq:failed:bulk", {b"\xff": 1, "gone": 1})
    Registries(redis, "w").clean(["bulk"])
    for key in ("rq:workers", "rq:workers:bulk", "rq:groups", "rq:group:a", "rq:failed:bulk"):
        assert not redis.exists(key)


DAMAGES: list[Callable[[Redis, str], object]] = [
    lambda redis, job_id: redis.hset(f"rq:job:{job_id}", mapping={"ended_ttl": "soon", "next_run": "later"}),
    lambda redis, job_id: (redis.delete(f"rq:job:{job_id}"), redis.set(f"rq:job:{job_id}", "no hash")),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=["values", "type"])
def test_an_end_that_was_altered_before_its_dependents_were_queued_is_closed(
    redis: Redis, bulk: Queue, damage: Callable[[Redis, str], object]
) -> None:
    jobs, job = JobStore(redis, "w", lease_s=30), bulk.enqueue("f")
    bulk.enqueue("f", depends_on=job)
    [claimed] = jobs.claim([Wanted("bulk", 1, "a" * 24, takes_suspects=True)], float("inf"))[0].jobs
    assert jobs.finish([Outcome(claimed, "failed", "", now(), 1.0)]) == ["dependents"]
    damage(redis, job.id)
    jobs.close(claimed)
    assert leftovers(redis, "bulk") == []


def test_no_script_makes_a_command_that_a_key_of_another_type_ends_half_way() -> None:
    scripts = list((ROOT / "worker" / "store" / "lua").glob("*.lua"))
    assert len(scripts) > 10
    for script in scripts:
        if script.name != "quarantine.lua":
            assert not re.search(r"redis\.p?call", script.read_text()), f"{script.name} goes round `call`"


def test_the_quarantine_is_bounded_and_its_log_is_too(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine(redis, "w")
    quarantine.check(["bulk"])
    redis.rpush("rq:queue:bulk", *[b"\xff%d" % number for number in range(1200)])
    jobs = JobStore(redis, "w", lease_s=30)
    while redis.exists("rq:queue:bulk"):
        assert claim(jobs) == []
    assert redis.xlen(QUARANTINE) == 1000
    quarantine.tell(logging.getLogger("test"))
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == "set aside in Redis: 980 more"
    quarantine.tell(logging.getLogger("test"))
    assert len(caplog.messages) == 21
