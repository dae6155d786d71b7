"""Calls in pools that cannot be made now are made again, each by its own pause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from jobs.context.shard_bytes import NoRoomYet, ShardBytes
from worker.io_thread.held.held_job import HeldJob
from worker.io_thread.pool.pool_calls import PoolCalls
from worker.io_thread.pool.room_line import Place


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
    calls.submit(pool, open_shard, job, lambda *end: ends.append(end), is_ours=True, place=Place(True, 1))
    for left in (2, 2, 2, 1, 1, 0):
        assert len(rooms) == left
        assert ends == ([] if left else [(job, "open", None)])
        calls.try_again()
        moment += 0.4


class TogetherPool:
    """Runs the calls that it has been given at one moment in threads, each step of them at the same time."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []
        self.step = threading.Barrier(1)

    def submit(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        raises: bool = True,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        self._calls.append((function, done))

    def run(self) -> int:
        """Return how many calls there were."""
        calls, self._calls = self._calls, []
        self.step = threading.Barrier(len(calls) or 1)
        threads = [threading.Thread(target=self._run, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(calls)

    def _run(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            value = function()
        except NoRoomYet as error:
            done(None, error)
        else:
            done(value, None)


class Memory:
    """Jobs whose calls take memory in two steps, and let go only after a look that takes as long as any."""

    def __init__(self) -> None:
        self.now, self.shard_bytes, self.pool = 0.0, ShardBytes(10), TogetherPool()
        self._lock = threading.Lock()
        self._calls = PoolCalls(self._post, lambda job: None, logging.getLogger(), lambda: self.now)
        self.ends: list[int] = []
        self.jobs: dict[int, HeldJob] = {}

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            call()

    def submit(self, number: int, opens: bool = True) -> None:
        self.jobs[number] = job = HeldJob(number, None, 0)  # type: ignore[arg-type]
        pool: Any = self.pool
        place = Place(opens, number)
        take = self._open if opens else self._read
        self._calls.submit(pool, take, job, lambda *end: self.ends.append(number), is_ours=True, place=place)

    def pass_time(self) -> int:
        """Return how many calls are made in the next half a second."""
        self.now += 0.5
        self._calls.try_again()
        return self.pool.run()

    def _open(self) -> None:
        self._take(self._hold, self.shard_bytes.let_go)

    def _hold(self, num_bytes: int, own: int) -> bool:
        try:
            self.shard_bytes.hold(num_bytes, own)
        except NoRoomYet:
            return False
        return True

    def _read(self) -> None:
        give_back = lambda held: self.shard_bytes.reserve_reading(-held, held)  # noqa: E731
        give_back(self._take(self.shard_bytes.reserve_reading, give_back))

    def _take(self, take: Callable[[int, int], bool], give_back: Callable[[int], Any]) -> int:
        """Take half of the memory twice; return how much that is. Raises NoRoomYet, and holds nothing."""
        held, found = 0, True
        for _ in range(2):
            found = found and take(5, held)
            held += 5 * found
            self.pool.step.wait()
        if not found:
            give_back(held)
            raise NoRoomYet
        return held


def test_shards_that_hold_what_the_other_waits_for_are_opened_one_after_the_other() -> None:
    memory = Memory()
    for number in (1, 2):
        memory.submit(number)
    assert memory.pool.run() == 2
    assert memory.ends == []  # neither had room
    memory.submit(3)
    assert memory.pass_time() == 1
    assert memory.ends == [1]
    memory.shard_bytes.let_go(10)  # its prompts were sent
    assert [memory.pass_time(), memory.ends] == [1, [1, 2]]
    memory.shard_bytes.let_go(10)
    assert [memory.pass_time(), memory.ends] == [1, [1, 2, 3]]
    memory.submit(4)  # memory is not short any more
    memory.submit(5)
    assert memory.pool.run() == 2


def test_a_part_is_written_before_a_file_is_opened_that_waits_for_memory() -> None:
    memory = Memory()
    memory.submit(2)
    assert memory.pool.run() == 1
    memory.submit(3)
    memory.submit(1, opens=False)
    memory.submit(2, opens=False)
    assert memory.pool.run() == 3
    assert memory.ends == [2]  # is open; of the others none had room
    memory.submit(0)
    assert [memory.pass_time(), memory.ends] == [1, [2, 1]]
    assert [memory.pass_time(), memory.ends] == [1, [2, 1, 2]]


def test_a_job_that_was_withdrawn_while_it_waits_for_memory_leaves_the_line() -> None:
    memory = Memory()
    for number in (1, 2, 3):
        memory.submit(number)
    assert memory.pool.run() == 3
    for number in (1, 3):
        memory.jobs[number].withdraw(InterruptedError)
    assert [memory.pass_time(), memory.ends] == [1, [2]]
    assert memory.pass_time() == 0
