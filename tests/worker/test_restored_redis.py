"""A Redis that comes back with older data: what was answered since stands on its queue again, and nobody claims it."""

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click.testing
import pytest
from redis import Redis
from rq import Queue

from jobs.cli import main
from tests.forking import ForkedWorkers
from tests.redis_server import redis_server_executable, wait_until_ready
from tests.rq_workers import wait_until
from tests.worker.stores import claim, succeeded, wanted, worker_store
from tests.worker.whole_worker import WholeWorker
from worker.io_thread import io_loop
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import Claim


class Clock:
    """Unix seconds of all workers here."""

    now = time.time()

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


def store_of(redis: Redis, name: str = "w") -> JobStore:
    return worker_store(redis, name, clock=CLOCK)


def take(store: JobStore) -> Claim:
    return store.claim([wanted()], float("inf"))[0]


def pass_seconds(redis: Redis, look: Callable[[], object], number: int) -> None:
    """Let workers look for jobs, in a new second each time."""
    for _ in range(number):
        CLOCK.now += 1
        redis.delete("tokenmill:epoch-made")
        look()


def snapshot(redis: Redis) -> dict[bytes, Any]:
    return {key: redis.dump(key) for key in redis.scan_iter()}


def restore(redis: Redis, saved: dict[bytes, Any]) -> None:
    redis.flushall()
    for key, value in saved.items():
        redis.restore(key, 0, value)


def run(redis_url: str, *command: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["--url", redis_url, *command])


def answered_since_a_snapshot(
    redis: Redis, bulk: Queue, store: JobStore, num_seconds: int
) -> dict[bytes, Any]:
    """Answer a prompt after a snapshot, and go on for so many seconds; return the snapshot."""
    pass_seconds(redis, lambda: take(store), 10)
    bulk.enqueue("f", job_id="a")
    saved = snapshot(redis)
    (claimed,) = claim(store)
    store.finish([succeeded(claimed)])
    pass_seconds(redis, lambda: take(store), num_seconds)
    return saved


def test_a_worker_that_saw_newer_data_holds_all_claims_until_a_person_confirms(
    redis: Redis, redis_url: str, bulk: Queue
) -> None:
    store, fresh = store_of(redis), store_of(redis, "fresh")
    restore(redis, answered_since_a_snapshot(redis, bulk, store, 10))
    assert bulk.job_ids == ["a"]
    assert (take(store).hold, take(fresh).hold, take(store).hold) == ("restored",) * 3
    assert bulk.job_ids == ["a"]
    held = run(redis_url, "restore-check")
    assert held.exit_code == 1
    assert "queue bulk: 1 waiting" in held.output
    assert take(store).hold == "restored", "to look confirms nothing"
    confirmed = run(redis_url, "restore-check", "--confirm")
    assert (confirmed.exit_code, confirmed.output.splitlines()[-1]) == (
        0,
        "confirmed: the workers claim what is queued",
    )
    assert [job.job_id for job in take(fresh).jobs] == ["a"]
    pass_seconds(redis, lambda: (take(store), take(fresh)), 10)
    assert (take(store).hold, take(fresh).hold) == ("", "")
    assert run(redis_url, "restore-check").output.startswith("workers may claim jobs")


def test_a_worker_that_starts_after_the_restore_does_not_hide_it(redis: Redis, bulk: Queue) -> None:
    store, fresh = store_of(redis), store_of(redis, "fresh")
    saved = answered_since_a_snapshot(redis, bulk, store, 10)
    restore(redis, saved)
    redis.delete("rq:queue:bulk")
    pass_seconds(redis, lambda: take(fresh), 100)
    assert take(store).hold == "restored"


def test_a_producer_is_told_whose_user_the_check_needs(redis: Redis, redis_url: str) -> None:
    redis.acl_setuser("p", enabled=True, passwords=["+pw"], keys=["rq:*"], commands=["+@all"])
    try:
        told = run(redis_url.replace("unix://", "unix://p:pw@"), "restore-check")
    finally:
        redis.acl_deluser("p")
    assert told.exit_code == 1
    assert "needs the workers' Redis user" in told.output


@pytest.mark.parametrize("num_seconds", [0, 2])
def test_the_seconds_that_an_append_only_file_may_lose_hold_nothing(
    redis: Redis, bulk: Queue, num_seconds: int
) -> None:
    store = store_of(redis)
    restore(redis, answered_since_a_snapshot(redis, bulk, store, num_seconds))
    assert [job.job_id for job in take(store).jobs] == ["a"]


def test_an_empty_redis_and_a_worker_that_was_away_for_long_hold_nothing(
    redis: Redis, bulk: Queue
) -> None:
    store, other = store_of(redis), store_of(redis, "other")
    pass_seconds(redis, lambda: take(store), 10)
    pass_seconds(redis, lambda: take(other), 700)
    assert take(store).hold == ""
    pass_seconds(redis, lambda: take(store), 10)
    redis.flushall()
    assert (take(store).hold, take(other).hold) == ("", "")
    pass_seconds(redis, lambda: (take(store), take(other)), 10)
    assert (take(store).hold, take(other).hold) == ("", "")


@pytest.mark.long
def test_a_snapshot_that_is_restored_under_a_living_worker_is_not_answered_again(
    tmp_path: Path,
) -> None:
    """By a real server's own file, and a worker that goes on while it is away."""
    with TemporaryDirectory(prefix="r") as folder, ExitStack() as stack:
        url, saved = f"unix://{folder}/s", tmp_path / "saved.rdb"

        def start() -> subprocess.Popen[bytes]:
            where = ["--port", "0", "--unixsocket", f"{folder}/s", "--dir", folder, "--save", ""]
            server = subprocess.Popen(
                [redis_server_executable(), *where], stdout=subprocess.DEVNULL
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until_ready(url, server)
            return server

        server = start()
        workers = ForkedWorkers(url, tmp_path)
        stack.callback(workers.redis.close)
        stack.callback(workers.close)
        process = workers.start(queues=("bulk",))
        client = workers.redis
        wait_until(lambda: client.llen("tokenmill:epochs") >= 5)
        client.set("rq:suspended", "1")
        job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
        client.save()
        shutil.copy(Path(folder) / "dump.rdb", saved)
        client.delete("rq:suspended")
        assert workers.result(job)
        latest = client.lindex("tokenmill:epochs", 0)
        wait_until(lambda: client.lpos("tokenmill:epochs", latest) >= 4)
        server.kill()
        server.wait()
        shutil.copy(saved, Path(folder) / "dump.rdb")
        start()
        wait_until(lambda: client.exists("tokenmill:restored"))
        client.delete("rq:suspended")
        wait_until(lambda: client.hget(client.smembers("rq:workers").pop(), "state") == b"restored")
        assert job.get_status() == "queued"
        assert "claiming nothing: Redis came back with older data" in workers.log(process)
        assert run(url, "restore-check", "--confirm").exit_code == 0
        assert workers.result(job)


@pytest.mark.processes
def test_a_redis_with_an_append_only_file_starts_from_a_snapshot_as_the_page_says() -> None:
    """docs/backup.md: an ordinary start reads no snapshot, and loses all that the snapshot holds."""
    with TemporaryDirectory(prefix="r") as folder, ExitStack() as stack:
        url = f"unix://{folder}/s"
        client = stack.enter_context(Redis.from_url(url))

        def start(appendonly: str) -> subprocess.Popen[bytes]:
            where = ["--port", "0", "--unixsocket", f"{folder}/s", "--dir", folder, "--save", ""]
            server = subprocess.Popen(
                [redis_server_executable(), *where, "--appendonly", appendonly],
                stdout=subprocess.DEVNULL,
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until_ready(url, server)
            return server

        def stop(server: subprocess.Popen[bytes]) -> None:
            server.terminate()
            server.wait()

        def remove_append_only_files() -> None:
            for path in Path(folder).glob("appendonly*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        server = start("yes")
        client.set("saved", "1")
        client.save()
        stop(server)
        remove_append_only_files()
        server = start("yes")
        assert client.dbsize() == 0
        stop(server)

        remove_append_only_files()
        server = start("no")
        client.config_set("appendonly", "yes")
        wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
        assert client.info("persistence")["aof_last_bgrewrite_status"] == "ok"
        stop(server)
        start("yes")
        assert client.get("saved") == b"1"


def turn_until(whole: WholeWorker, condition: Callable[[], bool]) -> None:
    for _ in range(400):
        assert whole.turn()
        if condition():
            return
    raise AssertionError("it did not happen in 400 turns")


def test_a_held_worker_says_so_where_people_look(
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_loop, "POLL_S", 0.0)  # its clock jumps with each turn
    whole = WholeWorker(redis, str(tmp_path))
    try:
        assert whole.turn()
        redis.set("tokenmill:restored", "2026-01-01T00:00:00Z")
        turn_until(whole, lambda: whole.io.why_not_claiming is not None)
        assert "restore-check" in str(whole.io.why_not_claiming)
        for _ in range(20):
            assert whole.turn()
        assert caplog.text.count("claiming nothing: Redis came back with older data") == 1
        redis.sadd("rq:workers", "rq:worker:w")
        redis.hset("rq:worker:w", mapping={"state": "restored", "queues": "bulk"})
        assert "worker w: restored" in run(redis_url, "info").output
        assert (
            "no worker claims anything: Redis came back with older data"
            in run(redis_url, "info").output
        )
        assert "restored" in run(redis_url, "workers").output
        run(redis_url, "restore-check", "--confirm")
        turn_until(whole, lambda: whole.io.why_not_claiming is None)
    finally:
        whole.close()
