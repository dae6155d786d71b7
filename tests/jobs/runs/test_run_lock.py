"""The lock on a run, on a real server: what its holder may still do when it has run out or changed hands."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import LockNotOwnedError

from jobs.runs.redis_state.lock import RunLock

NAME = "tokenmill:run:r:lock"

#: What only the holder of a lock may do to it.
CALLS = [RunLock.release, RunLock.reacquire]


def held(client: Redis, timeout_s: float = 10) -> RunLock:
    lock = RunLock(client, NAME, timeout=timeout_s)
    assert lock.acquire(blocking=False)
    return lock


def test_a_lock_is_held_by_one_kept_on_and_let_go_without_a_script(redis: Redis) -> None:
    redis.config_resetstat()
    lock = held(redis)
    assert not RunLock(redis, NAME, timeout=10).acquire(blocking=False)
    redis.pexpire(NAME, 60)
    assert lock.reacquire()
    assert redis.pttl(NAME) > 9000
    lock.release()
    assert redis.exists(NAME) == 0
    assert not [name for name in redis.info("commandstats") if "script" in name or "eval" in name]


@pytest.mark.parametrize("call", CALLS)
def test_a_lock_that_another_has_taken_over_stays_the_others(redis: Redis, call: Callable[[RunLock], object]) -> None:
    lock = held(redis)
    redis.delete(NAME)
    other = held(redis)
    before = redis.get(NAME)
    with pytest.raises(LockNotOwnedError):
        call(lock)
    assert redis.get(NAME) == before
    other.release()


class SlowClient(Redis):
    """Loses the lock to another right after it has read whose it is."""

    def pipeline(self, *args: Any, **kwargs: Any) -> Pipeline:
        pipe = super().pipeline(*args, **kwargs)
        read = pipe.get

        def get(name: str) -> Any:
            value = read(name)
            with Redis(connection_pool=self.connection_pool) as other:
                other.set(NAME, "another", px=5000)
            return value

        pipe.get = get  # type: ignore[method-assign]
        return pipe


@pytest.mark.parametrize("call", CALLS)
def test_a_lock_lost_between_the_look_and_the_change_stays_the_others(
    redis: Redis, call: Callable[[RunLock], object]
) -> None:
    lock = held(SlowClient(connection_pool=redis.connection_pool))
    with pytest.raises(LockNotOwnedError):
        call(lock)
    assert redis.get(NAME) == b"another"
    assert 0 < redis.pttl(NAME) <= 5000
