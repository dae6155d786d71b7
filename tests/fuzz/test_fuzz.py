"""Hostile input of every kind ends in a result or a named error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from redis import Redis

from engine.text.tokenizer import Tokenizer
from tests.forking import ForkedWorkers
from tests.fuzz.payloads import CASES, Hash, check_hashes
from tests.fuzz.requests import CHATS, check_chat
from tests.redis_server import running_redis_server
from tests.rq_workers import ROOT

pytestmark = pytest.mark.long


def cases(number: int) -> settings:
    """As many cases, the same ones in every run."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ROOT / "ops" / "demo" / "model")


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with running_redis_server() as url, Redis.from_url(url) as client:
        yield client


@cases(300)
@given(CHATS)
def test_chats(tokenizer: Tokenizer, case: tuple[object, dict[str, object]]) -> None:
    check_chat(tokenizer, case)


def test_payloads(redis: Redis, tmp_path: Path) -> None:
    hashes: list[Hash] = []

    @cases(300)
    @given(CASES)
    def collect(case: Hash) -> None:
        hashes.append(case)

    collect()
    socket = redis.connection_pool.connection_kwargs["path"]
    workers = ForkedWorkers(f"unix://{socket}", tmp_path)
    workers.redis.flushall()
    try:
        check_hashes(workers, hashes, timeout_s=60)
    finally:
        workers.close()
        workers.redis.close()
