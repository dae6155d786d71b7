"""Redis over TLS, users who may do no more than they need, and passwords that show up nowhere."""

import subprocess
from collections.abc import Iterator
from contextlib import chdir
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError
from rq import Callback, Queue, Repeat, Retry, Worker
from rq.command import send_shutdown_command, send_stop_job_command
from rq.group import Group
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs.cli import main
from jobs.doctor.redis_server import commands_of
from tests.forking import ForkedWorkers
from tests.rq_workers import RQ, Workers, leftovers, text_of, wait_until, wait_until_started
from tests.worker.secure_redis import (
    PRODUCER_PASSWORD,
    WORKER_PASSWORD,
    SecureRedis,
    running_secure_redis,
)

F = "tests.worker.functions."


@pytest.fixture
def server(redis_executable: str, tmp_path: Path) -> Iterator[SecureRedis]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with (
        TemporaryDirectory(prefix="r") as short,
        running_secure_redis(redis_executable, folder, Path(short)) as running,
    ):
        yield running


@pytest.fixture
def workers(server: SecureRedis, tmp_path: Path) -> Iterator[Workers]:
    """Workers as the user `worker`; the test's own connection is that of the user `producer`."""
    running = ForkedWorkers(server.url("worker", WORKER_PASSWORD), tmp_path)
    running.redis = Redis.from_url(server.url("producer", PRODUCER_PASSWORD), socket_timeout=None)
    yield running
    running.close()
    running.redis.close()


def command(workers: Workers, url: str, *command: str) -> str:
    """Run a command as its user sees it; return all it prints."""
    done = subprocess.run(
        command,
        env=workers.environment(RQ_REDIS_URL=url),
        cwd=workers.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def tokenmill(workers: Workers, url: str, *args: str) -> str:
    """What a command of ours prints, which does not end with an error that nobody has told."""
    with chdir(workers.folder):
        done = CliRunner(env={"RQ_REDIS_URL": url}).invoke(main, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def test_a_worker_and_a_producer_do_their_work_over_tls_with_the_users_we_document(
    workers: Workers, server: SecureRedis, tmp_path: Path
) -> None:
    url = server.url("producer", PRODUCER_PASSWORD)
    queue: Queue = workers.queue("bulk")
    first = queue.enqueue("jobs.complete", "a", max_tokens=1)
    ended = [
        first,
        queue.enqueue(F + "add", 1, 1, depends_on=first),
        queue.enqueue(F + "add", 1, 1, repeat=Repeat(times=1)),
        queue.enqueue(F + "report", step=1),
        queue.enqueue_in(timedelta(seconds=1), F + "add", 1, 1),
    ]
    failed = queue.enqueue(F + "boom", "no", retry=Retry(max=2, interval=[0, 1]))
    hang = queue.enqueue("jobs.complete", "hang")
    queue.enqueue(F + "add", 1, 1).cancel()
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    printed = command(
        workers, url, *RQ, "enqueue", "-S", "json", "-q", "bulk", "jobs.complete", "prompt=hi"
    )
    printed += tokenmill(
        workers, url, "submit", "in.parquet", "out", "--queue", "bulk", "--max-tokens", "1"
    )

    process = workers.start("--with-scheduler", "--name", "w")
    wait_until_started(hang)
    send_stop_job_command(workers.redis, hang.id, serializer=JSONSerializer)
    assert "stopped by user" in str(workers.result(hang).exc_string)
    for job in ended:
        workers.result(job)
    wait_until(
        lambda: failed.get_status() == JobStatus.FAILED and (tmp_path / "out" / "_SUCCESS").exists()
    )
    for words, says in (
        ("status out", "finished"),
        ("cancel out", "nothing was left to cancel"),
        ("runs --state finished", " finished "),
        ("workers", "\nw "),
        ("errors out", "0 rows with an error"),
        ("info", "worker w: "),
        ("flood bulk", "queue bulk: 0 waiting"),
        ("flood bulk --stop -", "cancelled 0 waiting jobs"),
    ):
        assert says in tokenmill(workers, url, *words.split())
    printed += command(
        workers, workers.url, *RQ, "info", "--raw", "--worker-class", "worker.BatchWorker"
    )
    assert "worker w" in printed
    assert server.admin.hget("rq:worker:w", "ip_address") != b"unknown"
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert leftovers(server.admin, "bulk") == []
    assert "requeued 1 job" in tokenmill(workers, url, "requeue", "--queue", "bulk", failed.id)
    # redis-py introduces itself by CLIENT SETINFO and more, which this server does not know.
    # `tokenmill info` asks for what only workers may read, and does without.
    expected = ("client", "tokenmill:held:bulk")
    refused = [entry for entry in server.admin.acl_log() if entry["object"] not in expected]
    assert refused == [], "a user was refused something that it needs"
    workers.queue("flooded").enqueue("jobs.complete", "a")
    assert "needs the workers' Redis user" in tokenmill(
        workers, url, *["flood", "flooded", "--stop", "-"]
    )
    used = {
        name.removeprefix("cmdstat_").partition("|")[0]
        for name in server.admin.info("commandstats")
    }
    asked = {words[0] for words in commands_of("worker")}
    # Valkey 9 itself begins with CONFIG GET; one of a user's would have been refused above.
    others = {
        "acl",
        "auth",
        "client",
        "config",
        "exec",
        "hello",
        "multi",
        "scan",
        "unwatch",
        "watch",
    }
    assert used - asked - others == set(), "tokenmill doctor does not ask for what is needed"

    written = [
        path.read_bytes().decode("latin-1")
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    ]
    everything = repr([(key, server.admin.dump(key)) for key in server.admin.scan_iter()])
    shown = "".join([printed, workers.log(process), everything, *written])
    for password in (WORKER_PASSWORD, PRODUCER_PASSWORD):
        assert password not in shown


@pytest.mark.parametrize(
    ("user", "password"), [("worker", WORKER_PASSWORD), ("producer", PRODUCER_PASSWORD)]
)
def test_the_users_we_document_reach_nothing_else(
    server: SecureRedis, user: str, password: str
) -> None:
    server.admin.set("somebody:else", "private")
    with Redis.from_url(server.url(user, password)) as client:
        for words in (
            "GET somebody:else",
            "SET somebody:else mine",
            "KEYS *",
            "FLUSHALL",
            "CONFIG GET *",
            "SHUTDOWN",
            "MONITOR",
            "DEBUG SLEEP 0",
            "CLIENT KILL TYPE normal",
            "SCRIPT FLUSH",
            "REPLICAOF no one",
            "PUBLISH somebody hello",
        ):
            with pytest.raises(ResponseError) as refusal:
                client.execute_command(*words.split())
            switched_off = "not allowed" in str(
                refusal.value
            )  # DEBUG and MODULE, by Redis 7 itself
            assert isinstance(refusal.value, NoPermissionError) or switched_off


#: What would hold up the server, or write what only workers may.
REFUSED = [
    ("SCRIPT", "LOAD", "while true do end"),
    ("EVAL", "return 1", "0"),
    ("EVALSHA", "0" * 40, "0"),
    ("SET", "rq:suspended", "1"),
    ("RPUSH", "tokenmill:claim:0", "x"),
    ("DEL", "tokenmill:restored"),
    ("LPUSH", "tokenmill:epochs", "1:x"),
    ("SET", "tokenmill:deaths:another's", "4"),
    ("SET", "tokenmill:journal:another's", "x"),
    ("SADD", "rq:workers:bulk", "rq:worker:invented"),
    ("ZADD", "tokenmill:fleet:bulk", "2000000000", "invented"),
    ("SET", "tokenmill:served:invented", "{}"),
    ("RENAME", "rq:queue:bulk", "rq:queue:other"),
    ("BLPOP", "rq:queue:bulk", "0.1"),
    ("LCS", "rq:job:a", "rq:job:b"),
    ("SORT", "rq:queue:bulk"),
    ("SETRANGE", "rq:job:a", "536870000", "x"),
]


def test_a_producer_can_neither_hold_up_the_server_nor_reach_what_only_workers_write(
    server: SecureRedis,
) -> None:
    with Redis.from_url(server.url("producer", PRODUCER_PASSWORD)) as client:
        for words in REFUSED:
            with pytest.raises(ResponseError) as refusal:
                client.execute_command(*words)
            is_of_another_version = "unknown command" in str(refusal.value)
            assert isinstance(refusal.value, NoPermissionError) or is_of_another_version, words


def test_a_producer_has_the_rights_for_what_rq_offers_it(
    workers: Workers, server: SecureRedis
) -> None:
    queue: Queue = workers.queue("bulk")
    call: dict[str, Any] = {"args": ("a",), "kwargs": {"max_tokens": 1}}
    group = Group.create(connection=workers.redis)
    grouped = group.enqueue_many(
        queue, [Queue.prepare_data("jobs.complete", **call) for _ in range(2)]
    )
    failing = queue.enqueue(F + "boom", "no", meta={"a": 1})
    front = queue.enqueue("jobs.complete", **call, at_front=True, job_id="front")
    assert queue.get_job_position(front) == 0
    front.meta["b"] = 2
    front.save_meta()
    front.save()
    once = queue.enqueue(
        "jobs.complete", **call, repeat=Repeat(times=1), on_success=Callback(F + "tell")
    )
    behind = queue.enqueue("jobs.complete", **call, depends_on=once)
    once.cancel(enqueue_dependents=True)
    behind.delete()
    queue.enqueue_at(datetime(2030, 1, 1, tzinfo=UTC), "jobs.complete", **call).cancel()
    later = queue.enqueue_in(timedelta(days=1), "jobs.complete", **call)
    queue.scheduled_job_registry.remove(later, delete_job=True)
    workers.burst()
    assert all(text_of(workers.result(job)) == "echo:a" for job in [*grouped, front])
    assert {job.id for job in group.get_jobs()} == {job.id for job in grouped}
    assert failing.get_status() == JobStatus.FAILED
    assert queue.failed_job_registry.get_job_ids() == [failing.id]
    assert [each and each.id for each in Job.fetch_many([front.id, "gone"], workers.redis, "json")]
    assert len(front.results()) == 1
    failing.requeue()
    assert queue.count == 1
    assert len(queue.jobs) == 1
    failing.cancel()
    queue.enqueue("jobs.complete", **call).delete(delete_dependents=True)
    for registry in (
        queue.finished_job_registry,
        queue.started_job_registry,
        queue.canceled_job_registry,
    ):
        registry.get_job_ids()
    send_shutdown_command(workers.redis, "nobody")
    assert Queue.all(connection=workers.redis) == [queue]
    assert Worker.all(connection=workers.redis) == []
    refused = [entry for entry in server.admin.acl_log() if entry["object"] != "client"]
    assert refused == []


@pytest.mark.parametrize(
    ("scheme", "user", "told"),
    [
        ("rediss", "poor", ["refuses to serve user 'poor'", "ops/redis-users.acl"]),
        ("redis", "worker", ["does not answer", "rediss:// where it speaks TLS"]),
        ("rediss", "wrong", ["invalid username-password pair"]),
    ],
    ids=["without rights", "without TLS", "with a wrong password"],
)
def test_a_start_that_redis_does_not_serve_ends_with_one_line_that_names_host_and_user(
    workers: Workers, server: SecureRedis, scheme: str, user: str, told: list[str]
) -> None:
    server.admin.execute_command("ACL", "SETUSER", "poor", "on", f">{WORKER_PASSWORD}", "+ping")
    url = server.url(user, WORKER_PASSWORD)
    if scheme == "redis":
        url = url.replace("rediss:", "redis:").partition("?")[0]
    process = workers.start(RQ_REDIS_URL=url)
    assert process.wait(timeout=60) == 1
    for shown in (workers.log(process), tokenmill(workers, url, "status")):
        [line] = shown.splitlines()
        assert f"://localhost:{server.port}/0 " in line
        assert all(part in line for part in told)
