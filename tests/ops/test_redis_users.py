"""The users that ship, on each kind of server: what they have written outlives a restart."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tests.redis_server import wait_until_ready
from tests.rq_workers import ROOT, wait_until

PASSWORD = "change-this-1"
USERS = ROOT / "ops" / "redis-users.acl"
SCRIPT = "for i = 1, 3 do redis.call('HSET', KEYS[1], i, i) redis.call('RPUSH', KEYS[2], i) end"

WRITER = "writer"

#: Of each writer, before the server is killed.
NUM_WRITES = 50


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a path that is short enough for a socket."""
    with TemporaryDirectory(prefix="r") as made:
        yield Path(made)


@contextmanager
def started(executable: str, folder: Path, *options: str) -> Iterator[Redis]:
    """Start a server with the users that ship, its writes kept; yield a worker; kill it at the end."""
    listen = ["--port", "0", "--unixsocket", str(folder / "s"), "--dir", str(folder)]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    process = subprocess.Popen(
        [executable, *listen, *durable, "--aclfile", str(USERS), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"unix://worker:{PASSWORD}@{folder / 's'}"
    worker = Redis.from_url(url, retry=Retry(NoBackoff(), 0))
    try:
        wait_until_ready(url, process)
        yield worker
    finally:
        process.kill()
        process.wait(timeout=10)
        for thread in threading.enumerate():
            if thread.name == WRITER:
                thread.join()
        worker.close()


class Writers:
    """Threads that write as a worker does, each in one way; `acknowledged` counts what the server has taken."""

    def __init__(self, worker: Redis) -> None:
        self._worker, self._script = worker, worker.register_script(SCRIPT)
        ways = (self.plain, self.transaction, self.script)
        self.acknowledged = {write.__name__: 0 for write in ways}
        for write in ways:
            threading.Thread(target=self._write, name=WRITER, args=(write.__name__, write)).start()

    def plain(self, key: str, log: str) -> None:
        self._worker.hset(key, "1", "1")
        self._worker.rpush(log, "1")

    def transaction(self, key: str, log: str) -> None:
        with self._worker.pipeline() as pipe:
            pipe.hset(key, "1", "1").rpush(log, "1").execute()

    def script(self, key: str, log: str) -> None:
        self._script(keys=[key, log])

    def _write(self, name: str, write: Callable[[str, str], None]) -> None:
        number = 0
        try:
            while True:
                write(f"rq:job:{name}-{number}", f"rq:queue:{name}")
                number += 1
                self.acknowledged[name] = number
        except RedisError:
            pass

    def lost(self, redis: Redis) -> dict[str, list[int]]:
        """Return the numbers of what was acknowledged and is not there."""
        return {
            name: [number for number in range(count) if not redis.exists(f"rq:job:{name}-{number}")]
            for name, count in self.acknowledged.items()
        }


def test_a_restart_keeps_what_was_acknowledged(redis_executable: str, folder: Path) -> None:
    with started(redis_executable, folder) as worker:
        writers = Writers(worker)
        wait_until(lambda: min(writers.acknowledged.values()) >= NUM_WRITES)
    with started(redis_executable, folder) as worker:
        assert writers.lost(worker) == {"plain": [], "transaction": [], "script": []}


@pytest.mark.parametrize("user", ["", "default:@", "default:change-this-1@"])
def test_nobody_comes_in_as_the_default_user(
    redis_executable: str, folder: Path, user: str
) -> None:
    with started(redis_executable, folder):
        stranger = Redis.from_url(f"unix://{user}{folder / 's'}")
        with pytest.raises(RedisError):
            stranger.ping()
