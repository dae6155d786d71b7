"""Calls in pools that cannot be made now are made again, each by its own pause."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jobs.context.shard_bytes import NoRoomYet
from worker.io_thread.held_job import HeldJob
from worker.io_thread.pool_calls import PoolCalls


class Pool:
    """Runs each call at once, in the caller's thread."""

    def submit(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        raises: bool = True,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        try:
            value = function()
        except NoRoomYet as error:
            done(None, error)
        else:
            done(value, None)


def test_opening_a_shard_that_finds_no_memory_is_tried_again_and_nothing_has_ended_before() -> None:
    moment = 0.0
    calls = PoolCalls(lambda call: call(), lambda job: None, logging.getLogger(), lambda: moment)
    rooms, ends = [False, False, True], []

    def open_shard() -> str:
        if not rooms.pop(0):
            raise NoRoomYet
        return "open"

    job: Any = HeldJob(1, None, 0)  # type: ignore[arg-type]
    pool: Any = Pool()
    calls.submit(pool, open_shard, job, lambda *end: ends.append(end), is_ours=True)
    for left in (2, 2, 2, 1, 1, 0):
        assert len(rooms) == left
        assert ends == ([] if left else [(job, "open", None)])
        calls.try_again()
        moment += 0.4
