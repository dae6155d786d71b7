"""`tokenmill info` and `tokenmill requeue`: RQ's commands without reading, and running, what a job holds."""

import pickle
import re
import time
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis
from rq import Queue, RateLimit
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from jobs.cli import main
from jobs.common.keys import FAR_S
from jobs.queues.flood import read_producers
from tests.worker.test_hostile_jobs import Bomb


def tokenmill(url: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["--url", url, *args])


def failed_jobs(queue: Queue, *job_ids: str, **options: Any) -> list[Job]:
    """Put jobs among the queue's failed ones as a worker would, the first one longest ago."""
    jobs = []
    for i, job_id in enumerate(job_ids):
        job = queue.enqueue("jobs.complete", "a", job_id=job_id, **options)
        queue.remove(job)
        job.set_status(JobStatus.FAILED)
        queue.connection.zadd(FailedJobRegistry(queue=queue).key, {job_id: 1e12 + i})
        queue.connection.hset(job.key, "ended_at", "2026-01-01T00:00:00.000000Z")
        queue.connection.expire(job.key, 1000)
        jobs.append(job)
    return jobs


def test_a_pickle_written_as_a_job_does_not_run(
    redis: Redis, redis_url: str, queue: Queue, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    for job in (
        *failed_jobs(queue, "failed"),
        queue.enqueue("jobs.complete", "a", job_id="abandoned"),
    ):
        redis.hset(
            job.key,
            mapping={"data": bomb, "meta": bomb, "result": bomb, "success_callback_name": "x"},
        )
    redis.zadd("rq:wip:bulk", {"abandoned:execution": 1})
    redis.hset("rq:worker:w", mapping={"state": "busy", "queues": "bulk", "current_job": "failed"})
    redis.sadd("rq:workers", "rq:worker:w")
    shown = tokenmill(redis_url, "info")
    assert shown.exit_code == 0
    assert (
        "1 waiting, 0 claimed, 1 executing, 0 scheduled, 0 deferred, 0 finished, 1 failed"
        in shown.output
    )
    assert "worker w: busy on bulk, job failed" in shown.output
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "failed").output == "requeued 1 job\n"
    assert queue.job_ids == ["abandoned", "failed"]
    assert not mark.exists()


def test_a_requeued_job_is_as_rq_leaves_it(redis: Redis, redis_url: str, queue: Queue) -> None:
    ours, rqs = failed_jobs(queue, "ours", "rqs")
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "ours").exit_code == 0
    rqs.requeue()
    assert queue.job_ids == ["ours", "rqs"]
    assert queue.failed_job_registry.get_job_ids(cleanup=False) == []
    left, expected = (Job.fetch(job.id, redis, JSONSerializer).to_dict() for job in (ours, rqs))
    for field in ("enqueued_at", "created_at", "exc_info", "last_heartbeat"):
        left.pop(field, None), expected.pop(field, None)
    assert left == expected
    assert redis.ttl(ours.key) == -1, "a queued job would have gone when the failed one was to go"


def test_requeue_all_takes_the_oldest_up_to_its_limit_and_names_those_that_are_gone(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    ids = [f"job-{i:03}" for i in range(250)]
    jobs = failed_jobs(queue, *ids)
    redis.delete(jobs[0].key)
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "--all", "--limit", "3").output == (
        "requeued 2 jobs\n1 is listed as failed but gone: job-000\n"
    )
    assert queue.job_ids == ids[1:3]
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "--all").output.startswith(
        "requeued 247 jobs\n"
    )
    assert queue.job_ids == ids[1:]


def test_jobs_of_a_cancelled_run_are_not_requeued_and_hide_no_other(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    run, other = "0123456789abcdef", "f123456789abcdef"
    of_run = [f"{run}-{shard:05}" for shard in range(210)]
    failed_jobs(queue, *of_run, f"{run}-00001-2", f"{run}-plan", f"{other}-00000", "prompt")
    redis.hset(f"tokenmill:run:{run}", "cancelled", 1)
    redis.hset(f"tokenmill:run:{other}", "queue", "bulk")
    one = tokenmill(redis_url, "requeue", "--queue", "bulk", of_run[0], f"{other}-00000")
    assert one.exit_code == 1
    assert one.output.startswith("requeued 1 job\n")
    assert (
        f"1 not requeued: {of_run[0]}: `tokenmill submit` with the same arguments resumes a run"
        in one.output
    )
    rest = tokenmill(redis_url, "requeue", "--queue", "bulk", "--all", "--limit", "1")
    assert rest.exit_code == 0
    assert rest.output.startswith("requeued 1 job\n212 not requeued: ")
    assert queue.job_ids == [f"{other}-00000", "prompt"]
    redis.hdel(f"tokenmill:run:{run}", "cancelled")  # it was submitted again
    assert (
        tokenmill(redis_url, "requeue", "--queue", "bulk", of_run[0]).output == "requeued 1 job\n"
    )


def test_requeue_all_leaves_jobs_that_ask_for_what_is_wrong(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    ids = [f"job-{i:03}" for i in range(230)]
    failed_jobs(queue, *ids)
    for job_id in ids[5:215]:
        error = b64encode(zlib.compress(b"jobs.errors.PromptTooLong: 9\ntokenmill: client\n"))
        redis.xadd(f"rq:results:{job_id}", {"type": 2, "exc_string": error})
    told = tokenmill(redis_url, "requeue", "--queue", "bulk", "--all", "--limit", "19").output
    assert told.startswith("requeued 19 jobs\n210 left, because what they ask for is wrong")
    assert queue.job_ids == [*ids[:5], *ids[215:229]]
    one = tokenmill(redis_url, "requeue", "--queue", "bulk", "job-005")
    assert one.output == "requeued 1 job\n"


def test_requeue_all_takes_the_jobs_of_one_error_even_if_it_was_their_fault(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    ids = [f"job-{i:03}" for i in range(330)]
    failed_jobs(queue, *ids)
    for job_id in ids[110:]:
        name = "NotAllowed" if int(job_id[-1]) % 2 else "PromptTooLong"
        text = f"Traceback: x\nworker.errors.{name}: 9\ntokenmill: client\n"
        error = b64encode(zlib.compress(text.encode()))
        redis.xadd(f"rq:results:{job_id}", {"type": 2, "exc_string": error})
    command = ("requeue", "--queue", "bulk", "--all")
    assert tokenmill(redis_url, *command, "--error", "Traceback").output == "requeued 0 jobs\n"
    told = tokenmill(redis_url, *command, "--error", "NotAllowed", "--limit", "5").output
    assert told == "requeued 5 jobs\n"
    told = tokenmill(redis_url, *command, "--error", "NotAllowed").output
    assert told == "requeued 105 jobs\n"
    assert queue.job_ids == ids[111::2]
    told = tokenmill(redis_url, "requeue", "--queue", "bulk", "job-000", "--error", "a")
    assert told.exit_code == 2


def test_requeue_of_what_has_not_failed_changes_nothing_and_says_so(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    queue.enqueue("jobs.complete", "a", job_id="waiting")
    before = redis.hgetall("rq:job:waiting")
    shown = tokenmill(redis_url, "requeue", "--queue", "bulk", "waiting", "no\x1b[2Jsuch")
    assert shown.exit_code == 1
    assert "not among the failed jobs of bulk: waiting, no\\x1b[2Jsuch" in shown.output
    assert queue.job_ids == ["waiting"]
    assert redis.hgetall("rq:job:waiting") == before


@pytest.mark.parametrize(
    "command",
    [("requeue", "--queue", "bukl", "--all"), ("requeue", "--queue", "bukl", "job")],
    ids=["all", "one"],
)
def test_requeue_names_a_queue_that_does_not_exist(
    redis: Redis, redis_url: str, queue: Queue, command: tuple[str, ...]
) -> None:
    assert "no queue is named bukl: there is none" in tokenmill(redis_url, *command).output
    failed_jobs(queue, "job")
    shown = tokenmill(redis_url, *command)
    assert shown.exit_code == 1
    assert shown.output == "Error: no queue is named bukl: there are bulk\n"


def test_requeue_all_of_an_empty_queue_is_no_error(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    queue.enqueue("jobs.complete", "a")
    queue.empty()
    shown = tokenmill(redis_url, "requeue", "--queue", "bulk", "--all")
    assert (shown.exit_code, shown.output) == (0, "requeued 0 jobs\n")


@pytest.mark.parametrize("key", ["rq:failed:bulk", "rq:job:job"])
def test_a_key_of_another_type_stops_a_requeue_before_anything_is_written(
    redis: Redis, redis_url: str, queue: Queue, key: str
) -> None:
    failed_jobs(queue, "job")
    redis.delete(key)
    redis.set(key, "text")
    before = {each: redis.dump(each) for each in redis.scan_iter()}
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "job").exit_code == 1
    assert {each: redis.dump(each) for each in redis.scan_iter()} == before


def test_info_shows_names_that_others_chose_escaped_and_cut(redis: Redis, redis_url: str) -> None:
    name = b"red\x1b[31m\n\xff" + b"x" * 300
    redis.sadd("rq:queues", b"rq:queue:" + name)
    redis.sadd("rq:workers", "rq:worker:w", "rq:worker:gone")
    redis.hset("rq:worker:w", mapping={"state": "busy\r", "current_job": "\x9b2J"})
    shown = tokenmill(redis_url, "info").output
    assert shown.startswith(r"queue red\x1b[31m\n\xffxxx")
    assert "xxx...: 0 waiting, 0 claimed, 0 executing" in shown
    assert r"worker w: busy\r on ?, job \x9b2J; 0 finished" in shown
    assert len(shown.splitlines()) == 2
    assert all(line.isprintable() for line in shown.splitlines())


def test_info_is_right_where_a_full_redis_took_nothing_from_a_worker(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    """Jobs were claimed and could not be shown as begun; the worker could not write that it goes on."""
    queue.enqueue("jobs.complete", "a")
    redis.hset("tokenmill:held:bulk", mapping={"a:1": "|", "b:1": "|", "c:1": "|"})
    redis.zadd("rq:wip:bulk", {"c:1": time.time() + FAR_S})
    redis.hset("rq:worker:w", mapping={"state": "suspended", "queues": "bulk"})
    redis.sadd("rq:workers", "rq:worker:w")

    resumed = tokenmill(redis_url, "info").output
    assert "queue bulk: 1 waiting, 2 claimed, 1 executing, " in resumed
    assert "worker w: was suspended on bulk; " in resumed
    assert "rq resume" not in resumed
    redis.set("rq:suspended", 1)
    suspended = tokenmill(redis_url, "info").output
    assert "worker w: suspended on bulk; " in suspended
    assert "all workers are suspended and claim nothing: `rq resume` lets them go on" in suspended


def test_a_requeued_job_with_a_rate_limit_waits_for_its_slot(
    redis: Redis, redis_url: str, queue: Queue
) -> None:
    queue.enqueue("jobs.complete", "a", rate_limit=RateLimit("one", 1))
    failed_jobs(queue, "failed")
    redis.hset("rq:job:failed", mapping={"rate_limit_key": "one", "rate_limit_concurrency": 1})
    assert tokenmill(redis_url, "requeue", "--queue", "bulk", "failed").exit_code == 0
    assert Job.fetch("failed", redis, JSONSerializer).get_status() == JobStatus.RATE_LIMITED


def test_who_floods_a_queue_is_seen_and_stopped_in_one_command(
    redis: Redis, redis_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "625c814dbfdb9778"
    queue.enqueue("jobs.score_shard", job_id=f"{run}-00003")
    queue.enqueue("jobs.complete", "mine", job_id="mine")
    flood = [
        queue.enqueue("jobs.complete", "x", meta={"producer": "team a\x1b"}) for _ in range(250)
    ]
    held = flood[-1]
    others = [queue.enqueue("jobs.complete", "x", meta={"producer": "team b"}).id for _ in range(3)]
    redis.zadd(f"rq:executions:{held.id}", {"execution": 1e12})
    redis.hset("rq:job:mine", "meta", pickle.dumps({"producer": "team a"}))

    shown = tokenmill(redis_url, "flood", "bulk").output.splitlines()
    assert shown[0].startswith("queue bulk: 255 waiting, the first for ")
    assert [line.split("  ")[0].split() for line in shown[1:2]] == [["JOBS"]]
    assert [re.split("  +", line.strip()) for line in shown[2:]] == [
        ["250", r"team a\x1b", r"tokenmill flood bulk --stop 'team a\x1b'"],
        ["3", "team b", "tokenmill flood bulk --stop 'team b'"],
        ["1", f"run {run}", f"tokenmill cancel {run}"],
        ["1", "no producer named", "tokenmill flood bulk --stop -"],
    ]

    monkeypatch.setattr("jobs.cli.operator_commands.MAX_PRODUCERS", 2)
    shown = tokenmill(redis_url, "flood", "bulk").output.splitlines()
    assert len(shown) == 5
    assert shown[-1] == "and 2 producers with fewer jobs"

    monkeypatch.setattr("jobs.queues.flood._PAGE", 100)
    stopped = tokenmill(redis_url, "flood", "bulk", "--stop", r"team a\x1b")
    assert stopped.output == "cancelled 249 waiting jobs\n"
    assert queue.job_ids == [f"{run}-00003", "mine", held.id, *others], "a worker has the last one"
    assert flood[0].get_status() == JobStatus.CANCELED
    assert 0 < redis.ttl(flood[0].key) <= 3600, "it would take memory for ever"
    assert redis.ttl("rq:job:mine") == -1
    assert tokenmill(redis_url, "flood", "bulk", "--stop", f"run {run}").exit_code == 2
    typo = tokenmill(redis_url, "flood", "bulk", "--stop", "team c")
    assert typo.exit_code == 1
    assert f"no job of team c waits on queue bulk: there are team b, run {run}" in typo.output
    assert tokenmill(redis_url, "flood", "nothing").output == "queue nothing: 0 waiting\n"


def test_of_a_long_queue_some_jobs_spread_over_its_length_are_read(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.queues.flood.MAX_READ", 20)
    monkeypatch.setattr("jobs.queues.flood._PAGE", 10)
    redis.rpush("rq:queue:bulk", *(f"625c814dbfdb9778-{number:05}" for number in range(50)))
    redis.rpush("rq:queue:bulk", *(f"job{number}" for number in range(50)))
    producers = read_producers(redis, "bulk")
    assert (producers.num_waiting, producers.num_read) == (100, 20)
    assert producers.estimate("-") == 50


def test_counts_out_of_a_sample_are_said_to_be_about_right(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.queues.flood.MAX_READ", 20)
    monkeypatch.setattr("jobs.queues.flood._PAGE", 10)
    redis.rpush("rq:queue:bulk", *(f"job{number}" for number in range(100)))
    _, sample, _, row = tokenmill(redis_url, "flood", "bulk").output.splitlines()
    assert sample.startswith("20 of them were read, spread over the queue: ")
    assert row.startswith("about 100  no producer named")


def test_an_empty_redis_says_how_to_start_a_worker(redis: Redis, redis_url: str) -> None:
    shown = tokenmill(redis_url, "info")
    assert shown.exit_code == 0
    assert shown.output.startswith("no queue; no worker: start one with `rq worker ")
