"""Names keys that jobs share and that are of another type than is kept there: any producer may write them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import ResponseError

from jobs.common.display import safe_name
from jobs.common.keys import RUNS_KEY
from jobs.common.shared_keys import OF_A_QUEUE, SHARED

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")


@dataclass(frozen=True)
class StrangeKey:
    """A key as it may be shown, the type that it is of, and the expected one."""

    key: str
    found: str
    expected: str

    @property
    def problem(self) -> str:
        return f"the key {self.key} is of type {self.found}, expected {self.expected}"

    @property
    def mend(self) -> str:
        """What to do: workers look after all of these keys but the list of runs, which producers write."""
        by_hand = f"`redis-cli DEL {shlex.quote(self.key)}`"
        if self.key == RUNS_KEY:
            return f"{by_hand}; a run is listed again once it is submitted again"
        return f"{by_hand}, or start a worker of its queue, which sets it aside"


def strange_keys(connection: Redis, queues: Iterable[bytes] = ()) -> list[StrangeKey]:
    """Look at the keys that all jobs share and at those of these queues, in one round trip.

    A key that this user may not look at is passed over.
    """
    keys = [(key.encode(), kind) for kind, key in (*SHARED, ("zset", RUNS_KEY))]
    keys += [(key.encode() % name, kind) for name in queues for kind, key in OF_A_QUEUE]
    with connection.pipeline(transaction=False) as pipe:
        for key, _ in keys:
            pipe.type(key)
        types = pipe.execute(raise_on_error=False)
    found = []
    for (key, kind), reply in zip(keys, types, strict=True):
        expected = "string" if kind == "lock" else kind
        if isinstance(reply, bytes) and reply not in (b"none", expected.encode()):
            found.append(StrangeKey(safe_name(key), reply.decode(), expected))
    return found


def is_wrong_type(error: Exception) -> bool:
    """Whether Redis refused because a key is of another type."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def listed(read: Callable[[Redis], list[T]], connection: Redis) -> list[T]:
    """Return what `read` returns, [] where its key is of another type: strange_keys names it."""
    try:
        return read(connection)
    except ResponseError as error:
        if is_wrong_type(error):
            return []
        raise
