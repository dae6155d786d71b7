"""What a Redis server has done between two looks: its processor time, commands and bytes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from redis import Redis


@dataclass(frozen=True)
class Look:
    """A server's counters at one moment.

    cpu_s: of its main thread, which carries out every command. calls: by command, those that scripts make
    among them. num_bytes: in and out.
    """

    at: float
    cpu_s: float
    calls: Counter[str]
    num_bytes: int


@dataclass(frozen=True)
class Usage:
    """What lies between two looks. seconds: of the clock."""

    seconds: float
    cpu_s: float
    calls: Counter[str]
    num_bytes: int

    @property
    def commands(self) -> int:
        """All that were carried out."""
        return self.calls.total()

    @property
    def share(self) -> float:
        """Of one core, that the server's main thread had."""
        return self.cpu_s / self.seconds


def look(redis: Redis) -> Look:
    """Read the counters."""
    with redis.pipeline(transaction=False) as pipe:
        for section in ("cpu", "stats", "commandstats"):
            pipe.info(section)
        cpu, stats, commands = pipe.execute()
    return Look(
        at=time.monotonic(),
        cpu_s=cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"],
        calls=Counter({name: told["calls"] for name, told in commands.items()}),
        num_bytes=stats["total_net_input_bytes"] + stats["total_net_output_bytes"],
    )


def since(redis: Redis, before: Look) -> Usage:
    """What the server has done since an earlier look; looking is a few commands of it."""
    after = look(redis)
    return Usage(
        after.at - before.at,
        after.cpu_s - before.cpu_s,
        after.calls - before.calls,
        after.num_bytes - before.num_bytes,
    )


def memory_bytes(redis: Redis) -> int:
    """What the server's data takes."""
    info: Any = redis.info("memory")
    return int(info["used_memory"])
