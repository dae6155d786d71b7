"""What a producer writes into a job's hash fails that job, or is passed over; its meta comes back as it was."""

import errno
import json
import logging
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue, Repeat
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from jobs.common.keys import PROGRESS_FIELD
from jobs.common.plain_log import JOB_ID_FIELD, PLAIN
from tests.worker.fake_engine import FakeEngine
from tests.worker.stores import claim, failed, release, succeeded, worker_store
from tests.worker.whole_worker import WholeWorker
from worker.store.records.job_record import _KEPT_FIELDS

FIELDS = sorted(
    {
        *_KEPT_FIELDS,
        b"created_at",
        b"sequences",
        b"tokenmill_kind",
        b"tokenmill_progress",
        b"ended_by",
        b"closed_by",
    }
)
GARBAGE = [
    b"", b"\xff\xfe", b"{", b"[]", b"{}", b'{"5": 5}', b"null", b'"x"', b"-1", b"1e400", b"9" * 30, b"[[[1]]]",
    b'["a"]', b"true", pickle.dumps({"owner": "web"}), b"\x00" * 10, b"[null]", b'[{"url": 1}]', b"NaN",
]  # fmt: skip


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer, default_timeout=-1)


@pytest.fixture
def whole(redis: Redis, tmp_path: Path) -> Any:
    whole = WholeWorker(redis, str(tmp_path))
    yield whole
    whole.close()


def work_off(whole: WholeWorker, queue: Queue) -> None:
    for _ in range(400):
        assert whole.turn()
        if not whole.runner.num_held and not queue.job_ids:
            return
    raise AssertionError(f"{whole.runner.num_held} jobs are held for ever")


def test_garbage_in_any_field_of_a_jobs_hash_harms_no_other_job(
    queue: Queue, whole: WholeWorker
) -> None:
    redis, draw = queue.connection, random.Random(7)
    for field in FIELDS:
        values = draw.sample(GARBAGE, 8)
        bad = [queue.enqueue("jobs.complete", ["a", "b"], max_tokens=2) for _ in values]
        for job, value in zip(bad, values, strict=True):
            redis.hset(job.key, field, value)
        good = queue.enqueue("jobs.complete", "a", max_tokens=1)
        work_off(whole, queue)
        assert whole.io.failure is None
        assert good.get_status() == JobStatus.FINISHED, field
        if field != b"enqueued_at":
            assert redis.hkeys("tokenmill:held:bulk") == [], field
        redis.flushall()


@pytest.mark.parametrize("intervals", ['{"5": 5}', '"soon"', "[[]]", "7"])
def test_malformed_intervals_fail_their_own_job_by_name(
    queue: Queue, whole: WholeWorker, intervals: str
) -> None:
    bad = queue.enqueue("jobs.complete", "a", max_tokens=1, repeat=Repeat(times=2))
    queue.connection.hset(bad.key, "repeat_intervals", intervals)
    good = queue.enqueue("jobs.complete", "a", max_tokens=1)
    work_off(whole, queue)
    assert good.get_status() == JobStatus.FINISHED
    assert queue.connection.hget(bad.key, "status") == b"failed"


@pytest.mark.parametrize(
    "dumps", [pickle.dumps, lambda meta: json.dumps(meta).encode()], ids=["pickle", "json"]
)
@pytest.mark.parametrize("prompt", ["a", "x" * 10_000], ids=["small", "large"])
def test_a_producers_meta_stays_byte_for_byte_whatever_is_shown_meanwhile(
    queue: Queue, whole: WholeWorker, dumps: Callable[[Any], bytes], prompt: str
) -> None:
    redis = queue.connection
    job = queue.enqueue("jobs.complete", [prompt, "hang"], meta={"customer": "blue"})
    for _ in range(6):
        whole.turn()
    meta = dumps({"owner": "web"})
    redis.hset(job.key, "meta", meta)
    whole.runner.jobs._jobs[0].open_task.progress = lambda: {"prompts_done": 1}  # type: ignore[union-attr,method-assign]
    for _ in range(3):
        whole.turn()
    assert json.loads(redis.hget(job.key, PROGRESS_FIELD) or b"")["prompts_done"] == 1
    assert redis.hget(job.key, "meta") == meta
    whole.io.stop_job(job.id)
    work_off(whole, queue)
    assert redis.hget(job.key, "meta") == meta


def test_an_old_execution_shows_no_progress_on_a_job_that_was_enqueued_again(queue: Queue) -> None:
    job = queue.enqueue("jobs.complete", "a", job_id="same")
    store = worker_store(queue.connection)
    old = claim(store)
    assert store.show_progress([(old[0], {"prompts_done": 1})]) == [True]
    queue.enqueue("jobs.complete", "b", job_id="same")
    assert store.show_progress([(old[0], {"prompts_done": 9})]) == [False]
    new = claim(store)
    assert queue.connection.hget(job.key, PROGRESS_FIELD) is None, "an earlier execution's is shown"
    assert store.show_progress([(old[0], {"prompts_done": 9}), (new[0], {"prompts_done": 2})]) == [
        False,
        True,
    ]
    shown = json.loads(queue.connection.hget(job.key, PROGRESS_FIELD) or b"")
    assert shown.pop("reported_at") == pytest.approx(time.time(), abs=60)
    assert shown == {"prompts_done": 2}


@pytest.mark.parametrize("end", [succeeded, failed])
def test_deaths_count_for_one_try_and_go_with_its_end(
    queue: Queue, end: Callable[..., Any]
) -> None:
    """As of a job with a fixed id on spot machines, which is enqueued each night."""
    store = worker_store(queue.connection)
    for _ in range(6):
        queue.enqueue("jobs.complete", "a", job_id="nightly", repeat=None)
        held = claim(store)
        assert [each.deaths for each in store.release(held, "abandoned", 5)] == [0], (
            "its lease still runs"
        )
        assert release(store, held, "engine_died") == []
        held = claim(store)
        assert [each.deaths for each in held] == [1]
        assert store.finish([end(held[0])]) == ["done"]
    assert queue.connection.keys("tokenmill:deaths:*") == []


@pytest.mark.parametrize(
    ("has_begun", "holder"),
    [(True, "worker dead"), (False, "a worker that had not begun it")],
    ids=["begun", "held"],
)
def test_a_takeover_tells_whose_job_it_takes_why_and_how_many_workers_have_died_with_it(
    queue: Queue, whole: WholeWorker, caplog: pytest.LogCaptureFixture, has_begun: bool, holder: str
) -> None:
    redis, dead = queue.connection, worker_store(queue.connection, "dead")
    whole.turn()
    job = queue.enqueue("jobs.complete", "a", max_tokens=1)
    (held,) = claim(dead)
    if has_begun:
        assert dead.show_begun([(held, now())]) == []
    redis.delete(f"rq:execution:{job.id}:{held.execution_id}", "tokenmill:maintenance:bulk")
    work_off_once = [whole.turn() for _ in range(6)]
    assert all(work_off_once)
    assert (
        f"bulk: job {job.id} is taken over from {holder}, whose lease ended: worker death 1; "
        "after 2 it fails"
    ) in caplog.text
    (line,) = [record for record in caplog.records if "taken over from" in record.getMessage()]
    PLAIN.filter(line)
    assert vars(line)[JOB_ID_FIELD] == job.id, "lines of JSON name the job"
    assert whole.tally.takeovers == {("bulk", 1): 1}
    assert Job.fetch(job.id, redis, JSONSerializer).get_status() == JobStatus.FINISHED


def test_a_takeover_of_many_jobs_is_one_line(
    queue: Queue, whole: WholeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    whole.turn()
    dead = worker_store(queue.connection, "dead")
    for _ in range(5):
        queue.enqueue("jobs.complete", "a", max_tokens=1)
    held = claim(dead)
    assert dead.show_begun([(each, now()) for each in held]) == []
    for each in held:
        queue.connection.delete(f"rq:execution:{each.job_id}:{each.execution_id}")
    queue.connection.delete("tokenmill:maintenance:bulk")
    work_off(whole, queue)
    takeovers = [line for line in caplog.records if "taken over from" in line.getMessage()]
    lines = [line.getMessage() for line in takeovers if line.levelno >= logging.WARNING]
    assert lines == [
        "bulk: 5 jobs are taken over from worker dead, whose lease ended: worker death 1; after 2 they fail"
    ]


@pytest.mark.parametrize("key", ["rq:executions:{}", "rq:job:{}"])
def test_another_kind_of_value_at_a_jobs_key_harms_no_other_job(
    queue: Queue, whole: WholeWorker, key: str
) -> None:
    redis = queue.connection
    held, waits = queue.enqueue("jobs.complete", "hang"), queue.enqueue("jobs.complete", "hang")
    queue.remove(waits)
    for _ in range(3):
        whole.turn()
    for job in (held, waits):
        redis.delete(key.format(job.id))
        redis.set(key.format(job.id), "no such thing")
    redis.rpush("rq:queue:bulk", waits.id)
    good = [queue.enqueue("jobs.complete", "a", max_tokens=1) for _ in range(3)]
    work_off(whole, queue)
    assert [job.get_status() for job in good] == [JobStatus.FINISHED] * 3


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many open files"), MemoryError()], ids=["EMFILE", "memory"]
)
def test_a_worker_that_lacks_descriptors_or_memory_for_a_request_gives_its_job_back(
    queue: Queue, whole: WholeWorker, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, lacking = FakeEngine.prepare, [error]

    def lack(self: FakeEngine, prompt: Any, *params: Any) -> Any:
        if prompt == "b" and lacking:
            raise lacking.pop()
        return prepare(self, prompt, *params)

    monkeypatch.setattr(FakeEngine, "prepare", lack)
    job = queue.enqueue("jobs.complete", ["a", "b"], max_tokens=2)
    good = queue.enqueue("jobs.complete", "a", max_tokens=2)
    work_off(whole, queue)
    assert not lacking
    assert good.get_status() == JobStatus.FINISHED
    result = job.latest_result()
    assert result is not None
    assert [choice["text"] for choice in result.return_value["choices"]] == ["echo:a", "echo:b"]


def test_what_is_claimed_and_has_not_begun_is_counted(queue: Queue, whole: WholeWorker) -> None:
    for _ in range(2):
        queue.enqueue("jobs.complete", "hang")
    claim(worker_store(queue.connection, "other"))
    begun = queue.enqueue("jobs.complete", "hang")
    for _ in range(6):
        whole.turn()
    counts = whole.tally.statistics.jobs_by_queue["bulk"]
    assert (counts["queued"], counts["claimed"], counts["started"]) == (0, 2, 1)
    whole.io.stop_job(begun.id)
    whole.turn()
