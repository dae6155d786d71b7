"""Queues that are emptied, jobs that are put to the front, and failed jobs that are deleted."""

from redis import Redis
from rq import Queue

from jobs.queues import changes as queue_changes
from jobs.queues.changes import delete_failed, empty_queue, move_to_front
from tests.tokenmill.dashboard.test_jobs_seen import end, fail


def waiting(redis: Redis, name: str = "bulk") -> Queue:
    queue = Queue(name, connection=redis, serializer="json")
    for number in range(5):
        queue.enqueue("jobs.complete", "x", job_id=f"j{number}")
    return queue


def test_a_job_comes_to_the_front_once_and_one_that_was_taken_stays_away(redis: Redis) -> None:
    queue = waiting(redis)
    assert move_to_front(redis, "bulk", "j3")
    assert queue.job_ids == ["j3", "j0", "j1", "j2", "j4"]
    redis.lrem("rq:queue:bulk", 1, "j2")
    assert not move_to_front(redis, "bulk", "j2")
    assert queue.job_ids == ["j3", "j0", "j1", "j4"]


def test_an_emptied_queue_loses_what_waits_and_keeps_what_runs(redis: Redis) -> None:
    queue = waiting(redis)
    redis.lrem("rq:queue:bulk", 1, "j0")
    redis.zadd("rq:executions:j1", {"e": 1})
    told: list[int] = []
    assert empty_queue(redis, "bulk", told.append) == 4
    assert (queue.job_ids, told) == ([], [4])
    assert sorted(redis.scan_iter("rq:job:*")) == [b"rq:job:j0", b"rq:job:j1"]


def test_a_job_that_is_enqueued_again_while_its_queue_is_emptied_is_kept(
    redis: Redis, monkeypatch: object
) -> None:
    queue = waiting(redis)
    delete_taken = queue_changes._delete_taken

    def enqueue_first(*args: object) -> None:
        if redis.hget("rq:job:j2", "enqueued_at") != b"later":
            redis.hset("rq:job:j2", "enqueued_at", "later")
        delete_taken(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(queue_changes, "_delete_taken", enqueue_first)  # type: ignore[attr-defined]
    assert empty_queue(redis, "bulk") == 5
    assert list(redis.scan_iter("rq:job:*")) == [b"rq:job:j2"]
    assert queue.job_ids == []


def test_failed_jobs_are_deleted_with_their_results_and_those_enqueued_again_stay(
    redis: Redis,
) -> None:
    for job_id in ("one", "two", "again"):
        fail(redis, job_id)
        end(redis, job_id)
    redis.hset("rq:job:one", "group_id", "g")
    redis.sadd("rq:group:g", "one", "two")
    redis.hset("rq:job:again", "status", "queued")
    redis.zadd("rq:failed:bulk", {"gone": 1})
    assert delete_failed(redis, "bulk", ["one", "gone", "again", "none"]) == [
        "one",
        "gone",
        "again",
    ]
    assert redis.zrange("rq:failed:bulk", 0, -1) == [b"two"]
    assert not redis.exists("rq:job:one", "rq:results:one")
    assert redis.smembers("rq:group:g") == {b"two"}
    assert redis.exists("rq:job:again", "rq:results:again") == 2
