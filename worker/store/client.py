"""Connections to Redis, and its errors that speak of the server alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, ExecAbortError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from rq.connections import get_connection_kwargs

MIN_REDIS_VERSION = (6, 2, 0)

OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError, ExecAbortError)
"""Errors that say something of the server and nothing of the command: it may be tried again later."""


def is_servers(error: BaseException) -> bool:
    """Whether the Redis server is to blame for an error, and not the values or keys of one job."""
    if isinstance(error, DataError):
        return False  # redis-py could not write a value
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return False  # a producer has put another kind of value at a job's key
    return isinstance(error, RedisError)


@dataclass(frozen=True)
class Clients:
    """One worker's clients: for the I/O thread, for our own code in pools, and for user code."""

    io: Redis
    pool: Redis
    user: Redis


def own_client(
    connection: Redis, socket_timeout_s: float, resend: bool = False, sent: Callable[[], None] | None = None
) -> Redis:
    """Make a client with a pool of its own to the same server.

    resend: send a command again whose reply was lost, as redis-py does for user code with a stock worker; our own
    callers know which commands bear it. sent: called for each command, or pipeline of them.
    """
    pool = connection.connection_pool
    kwargs = get_connection_kwargs(connection)
    kwargs.pop("retry", None)
    retry = Retry(ExponentialBackoff(cap=2.0, base=0.1), 10) if resend else Retry(NoBackoff(), 0)
    kwargs.update(socket_timeout=socket_timeout_s, retry=retry, retry_on_error=[])
    kind = pool.connection_class if sent is None else _telling(pool.connection_class, sent)
    return Redis(connection_pool=ConnectionPool(connection_class=kind, **kwargs))


def _telling(kind: type[Any], sent: Callable[[], None]) -> type[Any]:
    """Return a class of connections like this one that calls `sent`."""

    class Telling(kind):  # type: ignore[misc]  # one of redis-py's
        def send_packed_command(self, *args: Any, **options: Any) -> Any:
            sent()
            return super().send_packed_command(*args, **options)

    return Telling
