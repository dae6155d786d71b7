"""One Redis for all cases of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.redis_server import running_redis_server


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with running_redis_server() as url, Redis.from_url(url) as client:
        yield client
