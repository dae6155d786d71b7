"""The Procfile's Redis: for its owner alone, on a socket that every other command of the Procfile finds."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import psutil
import pytest
from redis import Redis
from rq import Queue
from rq.job import JobStatus
from rq.worker_registration import REDIS_WORKER_KEYS

from ops.redis_server import FOLDER, redis_executable, socket_in, socket_url, wait_until_ready
from tests.rq_workers import ROOT, wait_until

pytestmark = pytest.mark.processes

SERVER = (sys.executable, "-m", "ops.redis_server")
KNOCK = (
    "import os, socket, sys; os.setuid({user}); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder that everybody may enter, with a path that is short enough for a socket."""
    with TemporaryDirectory(prefix="r") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def running_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the server as the Procfile does."""
    process = subprocess.Popen(
        [*SERVER, "--dir", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until_ready(socket_url(socket_in(folder)))
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=10)


def refusal(folder: Path) -> str:
    """Return with what message the server refuses to start."""
    done = subprocess.run(
        [*SERVER, "--dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def knock(user: int, folder: Path) -> str:
    """Connect as this user; return what went wrong."""
    command = [sys.executable, "-c", KNOCK.format(user=user), str(socket_in(folder))]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_machines_server_comes_before_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("environment", "system"):
        program = tmp_path / folder / "bin" / "redis-server"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("PATH", f"{tmp_path}/environment/bin:{tmp_path}/system/bin")
    assert redis_executable() == f"{tmp_path}/system/bin/redis-server"


def test_no_other_user_of_the_machine_reaches_the_server(short_folder: Path) -> None:
    folder = short_folder / "redis"
    folder.mkdir(mode=0o777)
    with running_server(folder) as process:
        server = psutil.Process(process.pid)
        for each in (server, *server.children(recursive=True)):
            assert each.net_connections("inet") == []
        assert folder.stat().st_mode & 0o777 == 0o700
        assert "PermissionError" not in knock(os.getuid(), folder)
        if os.getuid() == 0:  # only root can try another user
            assert "PermissionError" in knock(65534, folder)


def test_the_server_says_how_it_is_reached(short_folder: Path) -> None:
    with running_server(short_folder / "a redis") as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        url = line.partition("export RQ_REDIS_URL=")[2]
        with Redis.from_url(url) as client:
            assert client.ping()


def test_the_procfile_sends_its_commands_to_its_own_server_unless_told_otherwise() -> None:
    lines = [
        line
        for line in (ROOT / "Procfile").read_text().splitlines()
        if "redis_server --wait" in line
    ]
    assert len(lines) == 3
    for line in lines:
        export = line.partition(": ")[2].partition(" && ")[0]
        for given, expected in ((None, socket_url(socket_in(FOLDER))), ("redis://x", "redis://x")):
            environment = {k: v for k, v in os.environ.items() if k != "RQ_REDIS_URL"}
            environment |= {"RQ_REDIS_URL": given} if given else {}
            shown = subprocess.run(
                ["sh", "-c", f"{export} && printenv RQ_REDIS_URL"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            assert urlsplit(shown) == urlsplit(expected)


def test_a_server_that_is_told_to_stop_stays_until_its_workers_have_left(
    short_folder: Path,
) -> None:
    with (
        running_server(short_folder) as process,
        Redis.from_url(socket_url(socket_in(short_folder))) as worker,
    ):
        worker.sadd(REDIS_WORKER_KEYS, "rq:worker:w")
        process.terminate()
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("stopping when the workers have left" in line for line in lines)
        worker.set("drained", "1")
        worker.srem(REDIS_WORKER_KEYS, "rq:worker:w")
        worker.close()
        assert process.wait(timeout=30) == 0
    with (
        running_server(short_folder),
        Redis.from_url(socket_url(socket_in(short_folder))) as client,
    ):
        assert client.get("drained") == b"1"


def workers(client: Redis) -> list[bytes]:
    return list(client.smembers(REDIS_WORKER_KEYS))


@contextmanager
def running_honcho(folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the Procfile with a worker that has no model and a Redis of its own; its log is in the folder."""
    procfile = (ROOT / "Procfile").read_text()
    procfile = procfile.replace("worker.BatchWorker", "tests.worker.fake_engine.FakeEngineWorker")
    procfile = procfile.replace("ops.redis_server\n", f"ops.redis_server --dir {folder}\n")
    (folder / "Procfile").write_text(procfile)
    url = socket_url(socket_in(folder))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENMILL_", "RQ_"))}
    environment |= {"RQ_REDIS_URL": url, "TOKENMILL_DRAIN_S": "0.5", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "honcho",
        "-d",
        str(ROOT),
        "-f",
        str(folder / "Procfile"),
        "start",
    ]
    with (folder / "log").open("w") as out:
        honcho = subprocess.Popen(
            command, cwd=ROOT, env=environment | variables, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_until_ready(url)
        yield honcho
    finally:
        honcho.terminate()
        honcho.wait(timeout=30)


@pytest.mark.long
def test_under_honcho_a_worker_that_drains_finds_its_redis_until_it_has_left(
    short_folder: Path,
) -> None:
    """honcho tells every process to stop at the same moment."""
    url, log = socket_url(socket_in(short_folder)), short_folder / "log"
    with running_honcho(short_folder, DASHBOARD_PORT="0", API_PORT="0") as honcho:
        with Redis.from_url(url) as client:
            job = Queue("prompts", connection=client, serializer="json").enqueue(
                "jobs.complete", "hang"
            )
            wait_until(lambda: job.get_status() == JobStatus.STARTED)
        honcho.send_signal(signal.SIGTERM)
        honcho.wait(timeout=30)
    assert "TOKENMILL_DRAIN_S is over: giving back the 1 jobs that still run" in log.read_text()
    assert "Redis did not answer" not in log.read_text()
    assert "SIGKILL" not in log.read_text()
    with running_server(short_folder), Redis.from_url(url) as client:
        assert client.lrange("rq:queue:prompts", 0, -1) == [job.id.encode()]
        assert list(client.scan_iter("rq:wip:*")) == []
        assert not client.exists(REDIS_WORKER_KEYS)


@pytest.mark.long
def test_under_honcho_redis_outlives_a_worker_that_is_killed_and_a_port_that_is_taken(
    short_folder: Path,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running_honcho(short_folder, DASHBOARD_PORT=str(taken.getsockname()[1])) as honcho,
        Redis.from_url(socket_url(socket_in(short_folder))) as client,
    ):
        wait_until(lambda: client.scard(REDIS_WORKER_KEYS) == 1 and client.exists(*workers(client)))
        [killed] = workers(client)
        os.kill(int(client.hget(killed, "pid")), signal.SIGKILL)
        wait_until(lambda: [key for key in workers(client) if key != killed and client.exists(key)])
        wait_until(lambda: "cannot be listened on" in (short_folder / "log").read_text())
        assert honcho.poll() is None
        client.srem(REDIS_WORKER_KEYS, killed)  # else Redis waits for it
