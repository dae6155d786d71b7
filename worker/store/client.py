"""Makes Redis clients, and says which errors are the fault of the Redis server."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    DataError,
    ExecAbortError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from rq.connections import get_connection_kwargs

MIN_REDIS_VERSION = (6, 2, 0)

OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError, ExecAbortError)
"""Errors for which the server is to blame, not the command. The command may be sent again later."""


def is_server_fault(error: BaseException) -> bool:
    """Whether the Redis server is to blame for an error, and not the values or keys of one job."""
    if isinstance(error, DataError):
        return False  # redis-py cannot encode a value
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return False  # somebody has put another kind of value at a job's key
    return isinstance(error, RedisError)


@dataclass(frozen=True)
class Clients:
    """The Redis clients of a worker: for the I/O thread, for our own code in pools, and for user code."""

    io: Redis
    pool: Redis
    user: Redis


def new_client(
    connection: Redis,
    socket_timeout_s: float,
    resend: bool = False,
    on_sent: Callable[[], None] | None = None,
    on_reply: Callable[[float], None] = lambda seconds: None,
) -> Redis:
    """Return a client for the server of `connection`, with its own connection pool.

    resend: whether redis-py sends a command again if its reply was lost. True for the client that user code gets,
    because RQ's own worker gives user code such a client. False for the clients of our own code, because our code
    decides for each command whether to send it again.
    on_sent: called for each command or pipeline that is sent. on_reply: called with the seconds until the reply began.
    """
    retry = Retry(NoBackoff(), 0)
    if resend:
        retry = Retry(ExponentialBackoff(cap=2.0, base=0.1), 10)
    kwargs = get_connection_kwargs(connection)
    kwargs.pop("retry", None)
    kwargs.update(socket_timeout=socket_timeout_s, retry=retry, retry_on_error=[])

    connection_class = connection.connection_pool.connection_class
    if on_sent is not None:
        connection_class = _counted(connection_class, on_sent, on_reply)
    return Redis(connection_pool=ConnectionPool(connection_class=connection_class, **kwargs))


def _counted(
    connection_class: type[Any], on_sent: Callable[[], None], on_reply: Callable[[float], None]
) -> type[Any]:
    """Return a subclass of a connection class that calls `on_sent` and `on_reply` for each command or pipeline."""

    class Counted(connection_class):  # type: ignore[misc]  # the base is one of redis-py's classes
        """A connection that counts its commands and times its replies."""

        sent_at: float | None = None

        def send_packed_command(self, *args: Any, **options: Any) -> Any:
            """Count the command, then send it."""
            on_sent()
            self.sent_at = time.monotonic()
            return super().send_packed_command(*args, **options)

        def read_response(self, *args: Any, **options: Any) -> Any:
            """Read a reply. After the first reply to a command or pipeline, report how long it took."""
            try:
                return super().read_response(*args, **options)
            finally:
                if self.sent_at is not None:
                    on_reply(time.monotonic() - self.sent_at)
                    self.sent_at = None

    return Counted
