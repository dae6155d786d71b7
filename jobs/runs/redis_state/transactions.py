"""Transactions in Redis that need no scripts: producers make them too, and may run none (`ops/redis-users.acl`)."""

from collections.abc import Callable
from typing import TypeVar

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import WatchError

T = TypeVar("T")


def transact(client: Redis, change: Callable[[Pipeline], T], *watched: str) -> T:
    """Return what `change` returns of a pipeline that watches these keys, once none changed under its hands.

    change: reads, calls `multi`, queues commands and executes them; is called again where a key has changed.
    """
    with client.pipeline() as pipe:
        while True:
            try:
                if watched:
                    pipe.watch(*watched)  # type: ignore[no-untyped-call]
                return change(pipe)
            except WatchError:  # changed meanwhile, or the connection broke: look again
                continue
            finally:
                pipe.reset()
