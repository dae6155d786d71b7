"""Transactions in Redis that need no scripts: producers make them too, and may run none (`ops/redis-users.acl`)."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

T = TypeVar("T")


def transact(client: Redis, change: Callable[[Pipeline], T], *watched: str) -> T:
    """Return what `change` returns of a pipeline that watches these keys; it is called again where one has changed.

    change: reads, calls `multi`, and queues commands, or executes them where it wants their replies.
    """
    found: Any = client.transaction(change, *watched, value_from_callable=True)  # type: ignore[arg-type]
    return cast("T", found)
