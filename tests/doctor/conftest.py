from collections.abc import Iterator

import pytest
from redis import Redis

from jobs.doctor import redis_server
from tests.redis_server import running_redis_server

#: How a server is set up where nothing is wrong; and what of it tests change besides.
WELL = {"appendonly": "yes", "appendfsync": "always"}
OTHERS = {"save": "", "maxmemory": "0", "maxmemory-policy": "noeviction"}


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """A machine that is busy is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_server, "TIMEOUT_S", 60.0)
        yield


@pytest.fixture(scope="session")
def redis_url(redis_executable: str) -> Iterator[str]:
    with running_redis_server(executable=redis_executable) as url, Redis.from_url(url) as client:
        set_up(client, WELL)
        yield url


@pytest.fixture
def redis(redis: Redis) -> Iterator[Redis]:
    """Set up well, and again so afterwards."""
    yield redis
    set_up(redis, {**OTHERS, **WELL})
    redis.execute_command("ACL", "DELUSER", "worker", "producer", "dashboard")


def set_up(client: Redis, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        client.config_set(name, value)
