"""Redis' own clock, which all workers and RQ's registries share."""

import time
from collections.abc import Callable
from typing import Any

from redis import Redis

SKEW_S = 3.0
"""A worker warns if its clock and Redis' clock differ by more seconds. With a time service they differ far less."""

_MAX_TRIP_S = 1.0
"""Seconds after which a reply is ignored, because nobody knows when Redis gave it."""


class RedisClock:
    """Returns Unix seconds by Redis' clock; before the first `sync`, by this machine's clock.

    Any thread may use it. A jump of this machine's clock does not change the result.
    ahead_s: the seconds by which this machine's clock was ahead of Redis' clock at the last `sync`.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._steady = steady
        #: Added to the time of `steady`, this gives the time of Redis' clock.
        self._redis_minus_steady_s = wall() - steady()
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._redis_minus_steady_s + self._steady()

    def sync(self, client: Redis) -> None:
        """Ask Redis for its time by the command INFO, because a user may lack the right to TIME. Raises RedisError."""
        asked_at = self._steady()
        info: Any = client.info("server")
        answered_at = self._steady()
        redis_time_us = info.get("server_time_usec")
        if redis_time_us is not None and answered_at - asked_at <= _MAX_TRIP_S:
            # Redis has read its clock about halfway between these moments.
            read_at = (asked_at + answered_at) / 2
            self._redis_minus_steady_s = redis_time_us / 1e6 - read_at
            redis_time = self()
            self.ahead_s = self._wall() - redis_time

    @property
    def warning(self) -> str:
        """What is wrong with this machine's clock; empty while it differs by at most SKEW_S."""
        if abs(self.ahead_s) <= SKEW_S:
            return ""
        side = "ahead of" if self.ahead_s > 0 else "behind"
        return (
            f"this machine's clock is {abs(self.ahead_s):.0f} s {side} Redis': run a time service on both machines "
            "(timedatectl set-ntp true)"
        )
