"""Which jobs of a queue a claim takes, and which it leaves where they are."""

from typing import Any

from redis import Redis
from rq import Queue
from rq.suspension import resume, suspend

from jobs.common.keys import FORMAT, FORMAT_FIELD, KIND_FIELD, MODEL_FIELD
from tests.rq_workers import Workers
from tests.worker.stores import wanted, worker_store
from worker.store.records.claimed_job import Claim

PROMPT = "jobs.complete"


def take(redis: Redis, *, model: str = "ours", **options: Any) -> Claim:
    return worker_store(redis, models=(model,)).claim([wanted(**options)], float("inf"))[0]


def ids(claimed: Claim) -> list[str]:
    return [each.job_id for each in claimed.jobs]


def enqueue(bulk: Queue, job_id: str, model: str | None = None, kind: str | None = None) -> None:
    bulk.enqueue("f", job_id=job_id)
    for name, value in ((MODEL_FIELD, model), (KIND_FIELD, kind)):
        if value is not None:
            bulk.connection.hset(f"rq:job:{job_id}", name, value)


def test_jobs_of_another_model_stay_in_the_queue_in_their_order(redis: Redis, bulk: Queue) -> None:
    for job_id, model in (
        ("a", "other"),
        ("b", None),
        ("c", "other"),
        ("d", "ours"),
        ("e", "other"),
    ):
        enqueue(bulk, job_id, model)
    taken = take(redis)
    assert (ids(taken), taken.num_foreign) == (["b", "d"], 3)
    assert bulk.job_ids == ["a", "c", "e"]
    assert ids(take(redis, model="other")) == ["a", "c", "e"]


def test_a_job_needs_its_model_and_each_of_its_adapters(redis: Redis, bulk: Queue) -> None:
    for job_id, needed in (
        ("a", "ours\nsql@1"),
        ("b", "ours\nsql@2"),
        ("c", "ours\nsql@1\nfr@1"),
        ("d", "sql"),
        ("e", "other\nsql@1"),
    ):
        enqueue(bulk, job_id, needed)
    names = ["sql", "sql@1"]
    store = worker_store(redis, models=("ours",), more_models=lambda: names)
    assert ids(store.claim([wanted()], float("inf"))[0]) == ["a", "d"]
    names += ["fr", "fr@1"]  # a folder has come
    assert ids(store.claim([wanted()], float("inf"))[0]) == ["c"]
    assert bulk.job_ids == ["b", "e"]


def test_jobs_of_a_newer_version_stay_in_the_queue_and_shards_of_an_older_one(
    redis: Redis, bulk: Queue
) -> None:
    for number, (format, kind) in enumerate(
        [
            (FORMAT + 1, "file"),
            (FORMAT, "file"),
            (FORMAT - 1, "file"),
            (FORMAT + 1, None),
            (FORMAT - 1, None),
        ]
    ):
        enqueue(bulk, f"j{number}", kind=kind)
        redis.hset(f"rq:job:j{number}", FORMAT_FIELD, format)
    taken = take(redis, max_files=5)
    assert ids(taken) == ["j1", "j4"]
    assert (taken.num_foreign, taken.num_newer) == (3, 2)
    assert bulk.job_ids == ["j0", "j2", "j3"]


def test_known_files_stay_while_their_places_are_taken_and_functions_do_not_count_as_such(
    redis: Redis, bulk: Queue
) -> None:
    for number, kind in enumerate(["file", "function", "file", "file", None]):
        enqueue(bulk, f"j{number}", kind=kind)
    assert ids(take(redis, max_files=1, max_functions=1)) == ["j0", "j1", "j4"]
    assert bulk.job_ids == ["j2", "j3"]
    assert ids(take(redis, max_files=0)) == []
    assert ids(take(redis, max_files=5, max_functions=0)) == ["j2", "j3"]


def test_a_claim_sent_again_takes_no_more_and_leaves_the_order(redis: Redis, bulk: Queue) -> None:
    for job_id, model in (("a", "other"), ("b", None), ("c", "other"), ("d", None)):
        enqueue(bulk, job_id, model)
    token = "a" * 24
    first = take(redis, token=token, most=1)
    again = take(redis, token=token, most=1)
    assert ids(first) == ids(again) == ["b"]
    assert [each.execution_id for each in first.jobs] == [each.execution_id for each in again.jobs]
    assert bulk.job_ids == ["a", "c", "d"]


def test_what_an_earlier_claim_took_is_told_while_suspended_and_no_other_job_is_taken(
    redis: Redis, bulk: Queue
) -> None:
    """So nothing is claimed once `rq suspend` has returned, however slow the worker is that was about to."""
    enqueue(bulk, "a")
    earlier = take(redis, token="a" * 24)
    suspend(redis)
    enqueue(bulk, "b")
    again = take(redis, token="a" * 24)
    assert (ids(again), again.is_suspended) == (ids(earlier), False)
    held_up = take(redis)
    assert (ids(held_up), held_up.is_suspended, bulk.job_ids) == ([], True, ["b"])
    resume(redis)
    assert ids(take(redis)) == ["b"]


def test_a_claim_looks_behind_a_thousand_jobs_that_stay_and_no_further(
    redis: Redis, bulk: Queue
) -> None:
    for number in range(1005):
        enqueue(bulk, f"n{number}", "other" if number != 999 else None)
    enqueue(bulk, "last")
    assert ids(take(redis, most=1)) == ["n999"]
    taken = take(redis, most=1)
    assert (ids(taken), taken.num_foreign) == ([], 1005), "all of the queue counts as out of reach"
    assert bulk.job_ids[-1] == "last"


def test_a_claim_looks_for_prompts_behind_two_hundred_files_and_no_further(
    redis: Redis, bulk: Queue
) -> None:
    """Each look costs the server time."""
    for number in range(205):
        enqueue(bulk, f"n{number}", kind="file" if number != 100 else None)
    enqueue(bulk, "last")
    assert ids(take(redis, max_files=0)) == ["n100"]
    assert ids(take(redis, max_files=0)) == []
    assert len(ids(take(redis, max_files=6, most=6))) == 6
    assert ids(take(redis, max_files=0)) == ["last"]


def test_a_burst_worker_leaves_what_only_another_model_may_run(workers: Workers) -> None:
    bulk = workers.queue("bulk")
    foreign, ours = (bulk.enqueue(PROMPT, text) for text in ("theirs", "ours"))
    workers.redis.hset(foreign.key, MODEL_FIELD, "of another model")
    workers.burst()
    assert ours.is_finished
    assert bulk.job_ids == [foreign.id]


def test_deaths_that_a_producer_writes_into_its_jobs_are_nobodys_word(
    redis: Redis, bulk: Queue
) -> None:
    for job_id in "ab":
        enqueue(bulk, job_id)
        redis.hset(f"rq:job:{job_id}", "worker_deaths", "5")
    [taken] = worker_store(redis).claim([wanted()], suspect_deaths=4)
    assert [(each.job_id, each.deaths) for each in taken.jobs] == [("a", 0), ("b", 0)]


def test_a_job_that_took_workers_with_it_is_claimed_by_itself(redis: Redis, bulk: Queue) -> None:
    for job_id in "abc":
        enqueue(bulk, job_id)
    redis.set("tokenmill:deaths:a", 4)
    [taken] = worker_store(redis).claim([wanted()], suspect_deaths=4)
    assert [(each.job_id, each.deaths) for each in taken.jobs] == [("a", 4)]
