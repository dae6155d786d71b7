"""What several calls write goes in one transaction, and each call hears of its own fault alone."""

import asyncio
import threading

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError

from tokenmill.server.answers.shared_writes import SharedWrites


def test_calls_that_come_together_share_a_transaction(redis: Redis) -> None:
    before = redis.info("commandstats").get("cmdstat_exec", {}).get("calls", 0)

    async def ask() -> None:
        writes = SharedWrites(redis)
        await asyncio.gather(*(writes.send(lambda pipe: pipe.incr("count")) for _ in range(20)))

    asyncio.run(ask())
    assert redis.get("count") == b"20"
    assert redis.info("commandstats")["cmdstat_exec"]["calls"] - before <= 2


def test_a_call_that_cannot_be_written_costs_no_other(redis: Redis) -> None:
    def fail(pipe: Pipeline) -> None:
        raise ValueError("no job")

    async def ask() -> list[object]:
        writes = SharedWrites(redis)
        good = writes.send(lambda pipe: pipe.set("good", "1"))
        return list(await asyncio.gather(good, writes.send(fail), return_exceptions=True))

    done, failed = asyncio.run(ask())
    assert done is None
    assert isinstance(failed, ValueError)
    assert redis.get("good") == b"1"


def test_while_redis_is_away_each_call_hears_of_it() -> None:
    async def ask() -> None:
        writes = SharedWrites(Redis.from_url("unix:///nowhere/s"))
        with pytest.raises(RedisError):
            await writes.send(lambda pipe: pipe.set("x", "1"))

    asyncio.run(ask())


def test_a_call_that_is_cancelled_goes_on_once_its_job_is_there(redis: Redis) -> None:
    may_write = threading.Event()

    def write(pipe: Pipeline) -> None:
        may_write.wait(timeout=30)
        pipe.set("job", "1")

    async def ask() -> None:
        asking = asyncio.create_task(SharedWrites(redis).send(write))
        await asyncio.sleep(0)
        asking.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asking.done()
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert redis.get("job") == b"1"

    asyncio.run(ask())


def test_at_the_servers_end_no_call_waits_for_ever(redis: Redis) -> None:
    has_begun = threading.Event()
    may_write = threading.Event()

    def write(pipe: Pipeline) -> None:
        has_begun.set()
        may_write.wait(timeout=30)

    async def ask() -> None:
        writes = SharedWrites(redis)
        asking = asyncio.create_task(writes.send(write))
        while not has_begun.is_set():
            await asyncio.sleep(0)
        sending = writes._sending
        assert sending is not None
        sending.cancel()
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(ask())
