"""Jobs that must not run: refused with a clear error, nothing imported, the others unharmed."""

import json
import pickle
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rq import Callback, Queue
from rq.job import Job, JobStatus

from tests.rq_workers import Workers, leftovers, text_of, wait_until, wait_until_started


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def raw_job(workers: Workers, payload: Any) -> Job:
    """Queue a job whose payload RQ's own client would not write."""
    job = workers.queue("bulk").enqueue("jobs.complete", "x")
    workers.redis.hset(
        job.key, "data", payload if isinstance(payload, bytes) else json.dumps(payload)
    )
    return job


def failure_of(workers: Workers, job: Job) -> str:
    assert job.get_status() == JobStatus.FAILED
    return str(workers.result(job).exc_string)


def test_a_function_outside_the_list_is_neither_imported_nor_run(
    workers: Workers, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    names = [
        "os.system",
        "jobs.complete.__globals__",
        "tests.worker.poison.touch",
        "jobs.complte",
        "",
    ]
    bad = {name: raw_job(workers, [name, None, [f"touch {mark}"], {}]) for name in names}
    good = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.burst(POISON_MARK=str(mark))
    for name, job in bad.items():
        assert "TOKENMILL_ALLOWED_FUNCTIONS" in failure_of(workers, job)
        assert repr(name) in failure_of(workers, job)
    assert "did you mean 'jobs.complete'?" in failure_of(workers, bad["jobs.complte"])
    assert not mark.exists()
    assert good.get_status() == JobStatus.FINISHED
    assert leftovers(workers.redis, "bulk") == []


def test_a_foreign_callback_refuses_the_job_and_is_not_imported(
    workers: Workers, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    hook = Callback("tests.worker.poison.touch")
    hooks: list[dict[str, Any]] = [
        {role: hook} for role in ("on_success", "on_failure", "on_stopped")
    ]
    jobs = [
        workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1, **each) for each in hooks
    ]
    workers.burst(POISON_MARK=str(mark))
    for job in jobs:
        assert "tests.worker.poison.touch" in failure_of(workers, job)
    assert not mark.exists()


def test_a_pickle_payload_is_never_loaded(workers: Workers, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    stock = Queue("bulk", connection=workers.redis)
    pickled = stock.enqueue("jobs.complete", Bomb(mark))
    meta = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.redis.hset(meta.key, "meta", pickle.dumps(Bomb(mark)))
    workers.burst()
    assert "not JSON" in failure_of(workers, workers.job(pickled.id))
    assert meta.get_status() == JobStatus.FINISHED
    assert not mark.exists()


def test_a_pickle_waiting_in_a_registry_or_behind_another_job_is_never_loaded(
    workers: Workers, tmp_path: Path
) -> None:
    mark, bomb = tmp_path / "mark", pickle.dumps(Bomb(tmp_path / "mark"))
    queue = workers.queue("bulk")
    first = queue.enqueue("jobs.complete", "a", max_tokens=1)
    dependent = queue.enqueue("jobs.complete", "b", max_tokens=1, depends_on=first)
    late = queue.enqueue_at(datetime(2026, 1, 1, tzinfo=UTC), "jobs.complete", "c", max_tokens=1)
    abandoned = queue.enqueue("jobs.complete", "d", max_tokens=1)
    queue.remove(abandoned)
    workers.redis.zadd("rq:wip:bulk", {f"{abandoned.id}:execution": 1})
    workers.redis.hset(
        abandoned.key, mapping={"status": "started", "started_at": "", "retries_left": 1}
    )
    for job in (dependent, late, abandoned):
        workers.redis.hset(job.key, mapping={"data": bomb, "result": bomb, "meta": bomb})
        workers.redis.sadd("rq:group:g", job.id)
        workers.redis.xadd(
            f"rq:results:{job.id}", {"type": 1, "return_value": bomb, "created_at": "0"}
        )
    workers.redis.sadd("rq:groups", "g")
    workers.burst("--with-scheduler")
    workers.burst()  # what the first one's scheduler and maintenance have queued
    assert text_of(workers.result(first)) == "echo:a"
    for job in (dependent, late):
        assert workers.redis.hget(job.key, "status") == b"failed"
    assert not mark.exists()


BAD_PAYLOADS: list[Any] = [
    b"\x80\x04junk",
    ["jobs.complete"],
    [["jobs.complete"], None, [], {}],
    ["jobs.complete", None, "text", {}],
    ["jobs.complete", "an instance", ["a"], {}],
    ["jobs.complete", None, [{"a": 1}], {}],
    ["jobs.complete", None, ["a"], {"max_tokens": "64"}],
    ["jobs.complete", None, ["a"], {"no_such_name": 1}],
    ["jobs.complete", None, ["a"], {"temperature": 10**400}],
    ["jobs.complete", None, [""], {}],
    ["jobs.chat", None, [[{"role": "user"}]], {}],
    ["jobs.score_shard", None, ["x", "y"], {}],
    ["jobs.score_parquet", None, [], {}],
]


def test_a_bad_payload_fails_its_own_job_and_no_other(workers: Workers) -> None:
    bad, good = [], []
    for payload in BAD_PAYLOADS:
        bad.append(raw_job(workers, payload))
        good.append(workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1))
    workers.burst()
    for payload, job in zip(BAD_PAYLOADS, bad, strict=True):
        assert failure_of(workers, job), payload
    assert {job.get_status() for job in good} == {JobStatus.FINISHED}
    assert leftovers(workers.redis, "bulk") == []


DAMAGES = [
    ("timeout", "soon"),
    ("retries_left", "many"),
    ("created_at", "yesterday"),
    ("retry_intervals", "[]"),
    ("dependency_ids", "{"),
    ("repeats_left", str(2**63)),
]


def test_an_id_that_is_no_text_stops_neither_the_worker_nor_other_jobs(workers: Workers) -> None:
    """No client of RQ's can enqueue one, but a producer's rules let it write the keys."""
    odd, bulk = b"\xff", workers.queue("bulk")
    copied = workers.redis.hgetall(bulk.enqueue("jobs.complete", "a", max_tokens=1).key)
    workers.redis.hset(b"rq:job:" + odd, mapping=copied)
    workers.redis.lpush("rq:queue:bulk", odd)
    workers.redis.rpush("rq:queue:bulk:intermediate", odd)
    workers.redis.set("rq:queue:bulk:intermediate:first_seen:\N{REPLACEMENT CHARACTER}", "soon")
    workers.redis.zadd("rq:wip:bulk", {odd: 1, odd + b":" + odd: 1})
    workers.redis.hset("tokenmill:held:bulk", mapping={odd: "", odd + b":" + odd: ""})
    job = bulk.enqueue("jobs.complete", "b", max_tokens=1)
    workers.burst()
    assert text_of(workers.result(job)) == "echo:b"
    workers.redis.flushall()  # nobody can let go of what has no name


def test_a_damaged_hash_fails_its_own_job_and_no_other(workers: Workers) -> None:
    bad, good = [], []
    for field, value in DAMAGES:
        bad.append(workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1))
        workers.redis.hset(bad[-1].key, mapping={"retries_left": 2, field: value})
        good.append(workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1))
    workers.burst()
    for damage, job in zip(DAMAGES, bad, strict=True):
        assert workers.redis.hget(job.key, "status") == b"failed", damage
        found = str(job.latest_result().exc_string)  # type: ignore[union-attr]
        assert re.search(r"damaged \(\w+.*\): enqueue it again", found), damage
    assert {job.get_status() for job in good} == {JobStatus.FINISHED}
    assert leftovers(workers.redis, "bulk") == []


def test_an_id_or_a_command_that_would_steer_a_terminal_is_escaped_and_cut_in_the_log(
    workers: Workers,
) -> None:
    odd = "x\x1b[2J\x1b[8m\r\n12:00:00 job good finished \u202e\x9b2J" + "y" * 100_000
    for queue in ("high", "bulk"):
        job = workers.queue(queue).enqueue("jobs.complete", "a", max_tokens=1)
        workers.redis.lrem(f"rq:queue:{queue}", 1, job.id)
        workers.redis.rename(job.key, f"rq:job:{queue}{odd}")
        workers.redis.rpush(f"rq:queue:{queue}", queue + odd)
    hang = workers.queue("bulk").enqueue("jobs.complete", "hang")
    process = workers.start("--name", "w")
    wait_until_started(hang)
    for command in ("stop-job", odd):
        message = json.dumps({"command": command, "job_id": odd}, ensure_ascii=False)
        workers.redis.publish("rq:pubsub:w", message)
    wait_until(lambda: "ignored" in workers.log(process).partition("not working on job")[2])
    shown = workers.log(process)
    assert r"bulkx\x1b[2J\x1b[8m\r\n12:00:00 job good finished \u202e\x9b2Jyyy" in shown
    assert all(line.isprintable() and len(line) < 3000 for line in shown.split("\n"))
    assert not [line for line in shown.split("\n") if line.startswith("12:00:00 job good")]


@pytest.mark.long
def test_invented_dependents_of_some_jobs_keep_those_of_another_waiting_for_a_moment_only(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    attacks = [queue.enqueue("jobs.complete", "a", max_tokens=1) for _ in range(8)]
    for job in attacks:
        workers.redis.sadd(job.dependents_key, *(f"{job.id}-{number}" for number in range(100_000)))
    first = queue.enqueue("jobs.complete", "a", max_tokens=1)
    dependent = queue.enqueue("jobs.complete", "b", max_tokens=1, depends_on=first)
    workers.start()
    assert text_of(workers.result(dependent)) == "echo:b"
    held = {key.partition(b":")[0].decode() for key in workers.redis.hkeys("tokenmill:held:bulk")}
    assert held >= {job.id for job in attacks}, "it waited until all of the others were read"
