"""What the dashboard tells Prometheus of queues, so that workers can be started where none runs."""

import time
from datetime import timedelta

from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from rq import Queue

from tests.tokenmill.dashboard.conftest import TOKEN, Open


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By the metric's name and its labels' values."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def test_jobs_of_the_named_queues_are_counted_while_no_worker_runs(
    redis: Redis, open_page: Open
) -> None:
    queue = Queue("bulk", connection=redis, serializer="json")
    for _ in range(3):
        queue.enqueue("jobs.complete", "x")
    queue.enqueue_in(timedelta(hours=1), "jobs.complete", "later")
    queue.enqueue_in(timedelta(hours=-1), "jobs.complete", "late")
    Queue("producers-own", connection=redis, serializer="json").enqueue("jobs.complete", "x")
    redis.zadd("rq:wip:bulk", {"a:b": 1e12})
    found = samples(open_page(queues=("bulk", "never-seen")).get("/metrics").text)
    assert {key[2]: value for key, value in found.items() if key[:2] == ("rq_jobs", "bulk")} == {
        "queued": 3, "claimed": 0, "started": 1, "scheduled": 2, "deferred": 0, "finished": 0, "failed": 0,
    }  # fmt: skip
    assert found["tokenmill_jobs_due", "bulk"] == 1, (
        "of the scheduled ones, that whose time has come"
    )
    assert found["rq_jobs", "never-seen", "queued"] == 0
    assert 0 <= found["tokenmill_oldest_job_seconds", "bulk"] < 60
    assert found["tokenmill_oldest_job_seconds", "never-seen"] == 0
    assert 0 < found["tokenmill_redis_memory_bytes",] < found["tokenmill_redis_memory_limit_bytes",]
    assert found["tokenmill_redis_write_failed", "aof_last_write_status"] == 0
    assert not any("producers-own" in key for key in found)


def test_runs_whose_deadline_will_not_hold_are_counted(redis: Redis, open_page: Open) -> None:
    now = time.time()
    for number, deadline in enumerate((now - 1, now + 3600, None)):
        run = f"{number:016x}"
        facts = {"output": "/out", "queue": "bulk", "rows": 10, "shards": 1, "submission": 1}
        if deadline is not None:
            facts["deadline"] = deadline
        redis.hset(f"tokenmill:run:{run}", mapping=facts)
        redis.zadd("tokenmill:run:index", {run: number})
    page = open_page(queues=("bulk", "other"))
    found = samples(page.get("/metrics").text)
    assert found["tokenmill_runs_deadline_at_risk", "bulk"] == 1, (
        "the run whose deadline has passed"
    )
    assert found["tokenmill_runs_deadline_at_risk", "other"] == 0
    redis.hset(f"tokenmill:run:{0:016x}", "finished", 1)
    assert samples(page.get("/metrics").text)["tokenmill_runs_deadline_at_risk", "bulk"] == 0


def test_what_a_worker_has_claimed_and_not_begun_is_counted_by_the_word_of_the_one_that_told_last(
    redis: Redis, open_page: Open
) -> None:
    for name, number, left_s in (("old", 7, 3000), ("new", 2, 3590)):
        redis.sadd("rq:workers", f"rq:worker:{name}")
        redis.hset(f"rq:worker:{name}", mapping={"queues": "bulk", "state": "busy"})
        redis.set(f"tokenmill:worker:{name}", f'{{"claimed": {{"bulk": {number}}}}}', ex=left_s)
    found = samples(open_page(queues=("bulk",)).get("/metrics").text)
    assert found["rq_jobs", "bulk", "claimed"] == 2


def test_prometheus_sends_the_token_and_gets_the_metrics_alone(open_page: Open) -> None:
    page = open_page(queues=("bulk",), token=TOKEN)
    for wrong in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Basic {TOKEN}"}):
        assert page.get("/metrics", headers=wrong).status_code == 401
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert page.get("/metrics", headers=right).status_code == 200
    assert page.get("/series.json", headers=right).status_code == 401
    assert page.get("/livez").text == "ok\n"


def test_no_queue_named_no_metrics_and_no_redis_no_zeros(open_page: Open) -> None:
    assert open_page().get("/metrics").status_code == 404
    away = Redis.from_url("unix:///nowhere/s")
    answer = open_page(away, queues=("bulk",)).get("/metrics")
    assert (answer.status_code, "rq_jobs" in answer.text) == (503, False)
