"""The audit sees what it is there for: a loss, a double and an orphan that were planted."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.faults.faulty_worker import WorkerPlan, serve
from tests.faults.ledger import Ledger
from tests.forking import FORK
from tests.redis_server import running_redis_server
from tests.rq_workers import wait_until


@pytest.fixture(scope="module")
def worked_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Redis, Ledger, Path]]:
    """Redis, ledger and the output of one run, after a clean worker has done all that was asked."""
    folder = tmp_path_factory.mktemp("faults")
    for name in ("data", "marks", "logs"):
        (folder / name).mkdir()
    with running_redis_server() as url, Redis.from_url(url) as redis:
        ledger = Ledger(redis, folder / "data", random.Random(0))
        ledger.ask_jobs(11)
        run = ledger.ask_run()
        process = FORK.Process(target=serve, args=(WorkerPlan("w", url, folder),), daemon=True)
        process.start()
        wait_until(ledger.all_ended)
        process.kill()
        process.join()
        yield redis, ledger, run.output


@pytest.fixture
def done(worked_off: tuple[Redis, Ledger, Path], tmp_path: Path) -> Iterator[tuple[Redis, Ledger, Path]]:
    """The same for each test, whatever the others plant."""
    redis, ledger, output = worked_off
    keys = {key: redis.dump(key) for key in redis.scan_iter()}
    page = dict(ledger._expected), list(ledger._runs)
    shutil.copytree(output, tmp_path / "out")
    yield worked_off
    redis.flushall()
    for key, value in keys.items():
        redis.restore(key, 0, value)
    ledger._expected, ledger._runs = page
    shutil.rmtree(output)
    shutil.copytree(tmp_path / "out", output)


def finished(redis: Redis) -> Job:
    ids = redis.zrange("rq:finished:high", 0, -1)
    jobs = Job.fetch_many([i.decode() for i in ids], redis, JSONSerializer)
    return next(job for job in jobs if job and job.func_name == "jobs.complete" and job.repeats_left is None)


def test_nothing_is_found_where_nothing_went_wrong(done: tuple[Redis, Ledger, Path]) -> None:
    found = done[1].audit()
    assert found.is_clean, found.details
    assert (found.jobs, found.rows, found.delivered) == (14, 300, 314)


def test_a_job_without_its_result_is_lost(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, _ = done
    redis.delete(f"rq:results:{finished(redis).id}")
    found = ledger.audit()
    assert (found.lost, found.doubled, found.delivered) == (1, 0, 313)


def test_a_job_that_vanished_is_lost(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, _ = done
    finished(redis).delete()
    assert ledger.audit().lost == 1


def test_a_job_with_two_results_is_doubled(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, _ = done
    key = f"rq:results:{finished(redis).id}"
    ((_, entry),) = redis.xrange(key)
    redis.xadd(key, entry)
    found = ledger.audit()
    assert (found.lost, found.doubled) == (0, 1)


def test_a_job_in_two_registries_is_doubled(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, _ = done
    redis.zadd("rq:failed:high", {finished(redis).id: 1})
    assert ledger.audit().doubled == 1


def test_a_lost_a_doubled_and_an_altered_row_are_seen(done: tuple[Redis, Ledger, Path]) -> None:
    _, ledger, output = done
    shutil.copy(output / "part-00001.parquet", output / "part-00002.parquet")
    altered = pq.read_table(output / "part-00003.parquet")
    column = altered["completion"].to_pylist()
    column[0] = "another row's answer"
    names = altered.schema.names
    altered = altered.set_column(names.index("completion"), "completion", [column])
    pq.write_table(altered, output / "part-00003.parquet")
    found = ledger.audit()
    assert (found.lost, found.doubled) == (12 + 1, 12)


def test_what_nobody_removes_is_an_orphan(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, output = done
    job = finished(redis)
    redis.hset(f"rq:execution:{job.id}:dead", "id", "dead")
    redis.zadd("rq:wip:high", {f"{job.id}:dead": 2e9})
    (output / "_tmp.dead.part-00001.parquet").touch()
    assert ledger.audit().orphaned == 3


def test_an_error_without_a_name_of_ours_is_wrong(done: tuple[Redis, Ledger, Path]) -> None:
    redis, ledger, _ = done
    queue = Queue("bulk", connection=redis, serializer=JSONSerializer)
    run = ledger._runs[0]
    job = Job.fetch(run.planning[0], redis, JSONSerializer)
    job._handle_failure("Traceback ...\nKeyError: 'x'", redis.pipeline())
    queue.failed_job_registry.add(job, exc_string="Traceback ...\nKeyError: 'x'")
    assert ledger.audit().wrong == 1
