"""The clock that all workers and RQ's registries share: Redis' own."""

import time
from collections.abc import Callable
from typing import Any

from redis import Redis

SKEW_S = 3.0
"""A worker warns if its machine's clock is off Redis' by more seconds. Time services keep within far less."""

_MAX_TRIP_S = 1.0
"""A reply that took more seconds is ignored: nobody knows when in between Redis gave it."""


class RedisClock:
    """Tells Unix seconds by Redis' clock, or by this machine's until `look` has asked. Any thread may read it.

    A jump of this machine's clock does not change what it tells. ahead_s: this machine's clock less Redis', as of the
    last look.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._began_at = wall() - steady()  # by Redis' clock, when `steady` stood at 0
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._began_at + self._steady()

    def look(self, client: Redis) -> None:
        """Ask Redis for its time, through INFO, as users may lack the right to TIME. Raises RedisError."""
        asked_at = self._steady()
        info: Any = client.info("server")
        answered_at = self._steady()
        told_us = info.get("server_time_usec")
        if told_us is not None and answered_at - asked_at <= _MAX_TRIP_S:
            self._began_at = told_us / 1e6 - (asked_at + answered_at) / 2
            self.ahead_s = self._wall() - self()

    @property
    def warning(self) -> str:
        """What is wrong with this machine's clock; empty within SKEW_S."""
        if abs(self.ahead_s) <= SKEW_S:
            return ""
        side = "ahead of" if self.ahead_s > 0 else "behind"
        return (
            f"this machine's clock is {abs(self.ahead_s):.0f} s {side} Redis': run a time service on both machines "
            "(timedatectl set-ntp true)"
        )
