"""RQ's command line with our worker: pools, flags, suspend, info, and starts that cannot work."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.cron import get_cron_job_ids
from rq.job import JobStatus
from rq.utils import utcparse

from tests.rq_workers import Workers, stats_of, text_of, wait_until, wait_until_started
from tests.worker.stores import claim, worker_store
from worker.store.worker_record import end_leases_of, living_namesake, successor

F = "tests.worker.functions."

CRON = """
import jobs
import rq.serializers
from rq.cron import register

rq.serializers.PickleSerializer = rq.serializers.JSONSerializer
register(jobs.complete, "bulk", ("good morning",), {"max_tokens": 3}, interval=86400, name="daily")
"""


def test_a_pool_replaces_a_dead_worker_and_stops_warm(workers: Workers, tmp_path: Path) -> None:
    gate = f"file:{tmp_path}/go"
    pool = workers.start(command="worker-pool")
    wait_until(lambda: workers.redis.smembers("rq:workers:bulk"))
    victim = workers.redis.smembers("rq:workers").pop()
    wait_until(lambda: workers.redis.hget(victim, "pid"))
    os.kill(int(workers.redis.hget(victim, "pid") or 0), signal.SIGKILL)
    job = workers.queue("bulk").enqueue("jobs.complete", gate)
    wait_until_started(job)
    pool.send_signal(signal.SIGTERM)
    wait_until(lambda: "stop signal" in workers.log(pool))
    (tmp_path / "go").touch()
    assert pool.wait(timeout=30) == 0
    assert text_of(workers.result(job)) == f"echo:{gate}"
    workers.redis.flushall()  # the killed one could not sign off; RQ forgets it when its hash expires


NAMESAKE = {"hostname": socket.gethostname(), "pid": "999999999", "birth": "2026-11-29T10:00:00Z"}


@pytest.mark.parametrize(
    ("namesake", "is_heard", "holder"),
    [
        ({}, True, ""),
        (NAMESAKE, True, ""),
        ({**NAMESAKE, "pid": str(os.getpid())}, True, ""),
        ({**NAMESAKE, "pid": "1"}, False, ""),
        ({**NAMESAKE, "pid": "1"}, True, f"process 1 on host {socket.gethostname()}"),
        ({**NAMESAKE, "hostname": "other", "death": "2026-11-29T10:00:00Z"}, True, ""),
        ({**NAMESAKE, "hostname": "other"}, False, "process 999999999 on host other"),
    ],
    ids=["none", "killed", "own id", "silent", "living", "left", "elsewhere"],
)
def test_a_name_is_free_once_its_worker_is_known_to_be_dead(
    redis: Redis, namesake: dict[str, str], is_heard: bool, holder: str
) -> None:
    if namesake:
        redis.hset("rq:worker:w", mapping=namesake)
    if is_heard:
        redis.set("tokenmill:served:w", "{}")
    assert living_namesake(redis, "w", socket.gethostname()) == holder


def test_a_killed_worker_whose_parent_has_not_reaped_it_is_dead(redis: Redis) -> None:
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    redis.hset("rq:worker:w", mapping={**NAMESAKE, "pid": str(zombie.pid)})
    redis.set("tokenmill:served:w", "{}")
    assert living_namesake(redis, "w", socket.gethostname()) == ""
    zombie.wait()


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({}, ""),
        ({**NAMESAKE, "birth": "2026-11-29T10:00:00.000001Z"}, ""),
        ({**NAMESAKE, "birth": "2026-11-29T09:59:59Z"}, ""),
        ({**NAMESAKE, "birth": "tomorrow"}, ""),
        (
            {**NAMESAKE, "hostname": "b", "birth": "2026-11-29T10:00:01Z"},
            "process 999999999 on host b",
        ),
    ],
    ids=["none", "own", "brought back by a failover", "no time", "younger"],
)
def test_a_name_is_lost_only_to_a_younger_worker(
    redis: Redis, entry: dict[str, str], found: str
) -> None:
    if entry:
        redis.hset("rq:worker:w", mapping=entry)
    assert successor(redis, "w", utcparse("2026-11-29T10:00:00.000001Z")) == found


def test_a_worker_that_thaws_leaves_if_another_was_started_under_its_name(workers: Workers) -> None:
    redis = workers.redis
    frozen = workers.start("--name", "w")
    wait_until(lambda: redis.exists("tokenmill:served:w"))
    os.kill(frozen.pid, signal.SIGSTOP)
    redis.delete("tokenmill:served:w")  # it expires when a worker is silent for long
    other = workers.start("--name", "w")
    wait_until(lambda: redis.hget("rq:worker:w", "pid") == str(other.pid).encode())
    os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait(timeout=30) == 0
    log = workers.log(frozen)
    assert log.count(f"the name w now belongs to another worker (process {other.pid}") == 1
    assert redis.hmget("rq:worker:w", "pid", "death") == [str(other.pid).encode(), None]
    assert redis.smembers("rq:workers") == {b"rq:worker:w"}
    assert stats_of(workers, "w")["pid"] == other.pid
    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    assert text_of(workers.result(job)) == "echo:a"


def test_only_the_leases_of_the_namesake_end(redis: Redis) -> None:
    queue = Queue("bulk", connection=redis, serializer="json")
    for name in ("w", "other"):
        queue.enqueue("jobs.complete", "a", job_id=f"job-of-{name}")
        claim(worker_store(redis, name))
    redis.set("rq:execution:job-of-other:text", "no hash", ex=60)
    redis.hset("tokenmill:held:bulk", "job-of-other:text", "|")
    assert end_leases_of(redis, "w", ["bulk", "high"]) == 1
    abandoned = worker_store(redis).find_abandoned(["bulk"], 1.0)
    assert [job.job_id for job in abandoned] == ["job-of-w"]


def test_a_worker_starts_under_the_name_of_one_that_was_killed_and_not_under_that_of_a_living_one(
    workers: Workers,
) -> None:
    workers.redis.hset("rq:worker:w", mapping=NAMESAKE)
    workers.redis.sadd("rq:workers", "rq:worker:w")
    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    claim(worker_store(workers.redis, "w"))
    log = workers.burst("--name", "w")
    assert "the last worker of this name died with 1 jobs, whose leases are ended" in log
    assert text_of(workers.result(job)) == "echo:a"

    workers.redis.hset("rq:worker:x", mapping={**NAMESAKE, "hostname": "other"})
    refused = workers.start("--burst", "--name", "x")
    assert refused.wait(timeout=30) == 1
    assert "the name x belongs to another worker, process 999999999 on host other" in workers.log(
        refused
    )


@pytest.mark.parametrize(
    ("serializer", "environment", "message"),
    [
        ((), {}, "-S json"),
        (("-S", "json"), {"TOKENMILL_MAX_NUM_SEQS": "many"}, "TOKENMILL_MAX_NUM_SEQS"),
    ],
    ids=["pickle", "setting"],
)
def test_a_pool_whose_workers_cannot_start_stops_with_the_reason(
    workers: Workers, serializer: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    pool = workers.start(
        "--num-workers", "2", command="worker-pool", serializer=serializer, **environment
    )
    assert pool.wait(timeout=30) is not None
    log = workers.log(pool)
    assert "stopping the pool, none of its workers can start" in log
    assert message in log
    assert log.count("Starting worker started") <= 4, "it went on starting workers"


def test_what_runs_goes_on_while_suspended_and_nothing_is_claimed(
    workers: Workers, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    queue = workers.queue("bulk")
    running = [queue.enqueue("jobs.complete", gate), queue.enqueue(F + "meet", "gate")]
    workers.start("--name", "w")
    wait_until_started(*running)
    workers.rq("suspend")
    held = queue.enqueue("jobs.complete", "b", max_tokens=1)
    (tmp_path / "go").touch()
    workers.redis.rpush("gate", "go")
    assert text_of(workers.result(running[0])) == f"echo:{gate}"
    assert workers.result(running[1]).return_value == "go"
    wait_until(lambda: workers.redis.hget("rq:worker:w", "state") == b"suspended")
    assert held.get_status() == JobStatus.QUEUED
    workers.rq("suspend", "--duration", "1")
    assert text_of(workers.result(held)) == "echo:b", "it did not resume by itself"


@pytest.mark.long
@pytest.mark.usefixtures("new_interpreters")
def test_rq_info_loads_no_model(workers: Workers, tmp_path: Path) -> None:
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("torch", "transformers", "pyarrow", "engine"):
        (poison / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    workers.queue("bulk").enqueue("jobs.complete", "hang")
    workers.start("--name", "w")
    wait_until(lambda: workers.redis.hget("rq:worker:w", "state") == b"busy")
    python_path = f"{poison}:{workers.environment()['PYTHONPATH']}"
    assert "worker w" in workers.rq(
        "info", "--raw", "-w", "worker.BatchWorker", PYTHONPATH=python_path
    )


def test_flags_set_what_they_set_in_rq(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = workers.environment()
    del environment["TOKENMILL_LEASE_S"]
    monkeypatch.setattr(workers, "environment", lambda: environment)
    job = workers.queue("bulk").enqueue("jobs.complete", "hang")
    flags = (
        "--worker-ttl",
        "100",
        "--job-monitoring-interval",
        "200",
        "--quiet",
        "--name",
        "my-worker",
    )
    process = workers.start(*flags)
    wait_until(lambda: stats_of(workers, "my-worker").get("jobs_held") == 1)
    assert 100 < workers.redis.ttl("rq:worker:my-worker") <= 160
    lease = workers.redis.keys(f"rq:execution:{job.id}:*")
    assert 200 < workers.redis.ttl(lease[0]) <= 245
    assert workers.log(process) == ""


def test_the_logging_level_is_what_rqs_own_worker_makes_of_it(workers: Workers) -> None:
    logs = {level: workers.burst("--logging_level", level) for level in ("INFO", "WARNING")}
    assert "started with PID" in logs["INFO"]
    assert "Listening on high, bulk" in logs["INFO"]
    assert logs["WARNING"] == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--job-class", F + "OwnJob"),
            "--job-class tests.worker.functions.OwnJob is not supported",
        ),
        (
            ("--queue-class", F + "OwnQueue"),
            "tests.worker.functions.OwnQueue does not name its keys",
        ),
        (("--dequeue-strategy", "random"), "--dequeue-strategy"),
    ],
    ids=["job class", "queue class", "dequeue strategy"],
)
def test_what_rq_offers_and_a_batch_cannot_do_is_refused(
    workers: Workers, flags: tuple[str, ...], says: str
) -> None:
    process = workers.start("--burst", *flags)
    assert process.wait(timeout=60) == 1
    assert says in workers.log(process)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TOKENMILL_MODEL": "/no/such/model"}, "/no/such/model"),
        (
            {"TOKENMILL_LOG_FORMAT": "yaml"},
            "TOKENMILL_LOG_FORMAT='yaml': expected text, json, or auto",
        ),
    ],
)
def test_what_a_user_can_mend_ends_the_start_with_one_line(
    workers: Workers, environment: dict[str, str], says: str
) -> None:
    process = workers.start(worker_class="worker.BatchWorker", **environment)
    assert process.wait(timeout=60) == 1
    log = workers.log(process)
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if "cannot start" in line]
    assert says in line


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "No module named 'my_functions'"),
        ("def other(): pass", "my_function"),
        ("raise RuntimeError('no database')", "RuntimeError: no database"),
    ],
)
def test_an_allowed_function_that_cannot_be_imported_stops_the_start(
    workers: Workers, tmp_path: Path, module: str | None, reason: str
) -> None:
    if module is not None:
        (tmp_path / "my_functions.py").write_text(module)
    path = f"{tmp_path}:{workers.environment()['PYTHONPATH']}"
    worker = workers.start(TOKENMILL_ALLOWED_FUNCTIONS="my_functions.my_function", PYTHONPATH=path)
    assert worker.wait(timeout=60) == 1
    log = workers.log(worker)
    assert "TOKENMILL_ALLOWED_FUNCTIONS names 'my_functions.my_function'" in log
    assert reason in log
    assert "Traceback" not in log


def test_what_rq_cron_enqueues_runs(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "cron.py").write_text(CRON)
    workers.start()
    cron = workers.run_command(
        ["cron", "cron.py"], tmp_path / "log", tmp_path, workers.environment()
    )
    workers.processes.append(cron)
    wait_until(lambda: get_cron_job_ids("daily", workers.redis))
    (job_id,) = get_cron_job_ids("daily", workers.redis)
    assert text_of(workers.result(workers.job(job_id))) == "echo:good morning"
    cron.terminate()
    assert cron.wait(timeout=60) == 0, (tmp_path / "log").read_text()


def test_requeue_runs_a_failed_job_again(workers: Workers) -> None:
    failed = workers.queue("bulk").enqueue("jobs.complete", "refuse")
    workers.burst()
    assert "Requeueing 1 jobs" in workers.rq("requeue", "-S", "json", "--queue", "bulk", "--all")
    assert failed.get_status() == JobStatus.QUEUED
    workers.burst()
    assert failed.get_status() == JobStatus.FAILED
    assert len(failed.results()) == 2
