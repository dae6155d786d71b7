"""Reads what INFO of Redis says about memory and disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError


def is_full(error: BaseException) -> bool:
    """Whether Redis refused a command or a script because its memory is full."""
    if isinstance(error, OutOfMemoryError):
        return True
    # For scripts, redis-py raises a plain ResponseError.
    return isinstance(error, ResponseError) and str(error).startswith("OOM ")


#: The fields of INFO that say "ok" while Redis can write to its disk.
WRITES = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")


@dataclass(frozen=True)
class RedisHealth:
    """How full Redis is, and which files it could not write to its disk.

    limit_bytes: `maxmemory` if it is set; otherwise, all memory of the machine; 0 if neither is known.
    failed_writes: the fields of WRITES whose last write failed.
    """

    used_bytes: int
    limit_bytes: int
    failed_writes: tuple[str, ...]


def redis_health(info: Mapping[str, Any]) -> RedisHealth:
    """Return the state of a server's memory and disk. info: the server's reply to INFO."""
    limit_bytes = info.get("maxmemory", 0)
    if not limit_bytes:  # no limit is set
        limit_bytes = info.get("total_system_memory", 0)
    failed_writes = [name for name in WRITES if info.get(name, "ok") != "ok"]
    return RedisHealth(
        used_bytes=info.get("used_memory", 0),
        limit_bytes=limit_bytes,
        failed_writes=tuple(failed_writes),
    )
