"""A task whose answers lead to further requests: its stream goes on, before those of later jobs."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

from engine import Completion
from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.tasks import OpenTask, Request
from tests.worker.guards import open_guard
from worker.engine_thread.orders import Add
from worker.io_thread.held.beginnings import Beginnings
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs, JobState
from worker.io_thread.held.packing import Packer
from worker.io_thread.held.streams import Inspections, Streams
from worker.metrics.tally import Tally

SLOTS, PREFETCH = 4, 1


class Counting(OpenTask):
    """Asks "a" and each of its further prompts; what is answered with n asks for n-1, down to 0."""

    def __init__(self, *prompts: str) -> None:
        self._unsent, self._following = deque(prompts), deque[str]()
        self.asked: list[str] = []
        self.answers: dict[str, str] = {}

    def requests(self) -> Iterator[Request]:
        while self._following or self._unsent:
            self.asked.append((self._following or self._unsent).popleft())
            yield Request(self.asked[-1], None, {})

    @property
    def has_more(self) -> bool:
        return bool(self._following)

    def deliver(self, index: int, completions: Sequence[Any]) -> None:
        prompt, number = self.asked[index], int(self.asked[index][-1])
        if completions[0].finish_reason == "error":
            self.answers[prompt] = completions[0].error
            return
        self.answers[prompt] = completions[0].text
        if number:
            self._following.append(f"{prompt[:-1]}{number - 1}")

    def result(self) -> dict[str, str]:
        return self.answers


class Served:
    """Streams without an engine: the test answers what was asked."""

    def __init__(self) -> None:
        self.jobs, self.orders = HeldJobs(None), SimpleQueue[Any]()
        self.packer = Packer(1, SLOTS, PREFETCH, 1, 1)
        self.events = SimpleQueue[Any]()
        self.checks = Checks()
        self.inspections = Inspections(self.events.put, self.checks)
        guard = open_guard()
        beginnings = Beginnings(guard)
        self.streams = Streams(
            self.jobs, guard, self.packer, beginnings, self.orders, self.inspections, Tally()
        )

    def hold(self, task: OpenTask) -> HeldJob:
        record = SimpleNamespace(limit_s=0, meta={}, is_followed=False)
        claimed = SimpleNamespace(record=record, execution_id="execution")
        job = self.jobs.add(cast(Any, claimed))
        job.open_task = task
        self.streams.open(job)
        return job

    def asked(self) -> list[Add]:
        """What the engine is sent in a turn of the I/O thread."""
        self.changed = list(self.streams.feed())
        return [self.orders.get_nowait() for _ in range(self.orders.qsize())]

    def answer(self, *adds: Add) -> None:
        completions = [
            Completion(add.request_id, 0, [1], f"{add.request.prompt}!", "stop", 1, 0)
            for add in adds
        ]
        self.streams.deliver(completions, 0.0)


def prompts(adds: list[Add]) -> list[Any]:
    return [add.request.prompt for add in adds]


def test_a_stream_that_had_ended_goes_on_before_those_of_later_jobs() -> None:
    served, first, second = Served(), Counting("a2", "b1"), Counting("w0", "x0", "y0", "z0", "v0")
    job = served.hold(first)
    adds = served.asked()
    assert (prompts(adds), job.state) == (["a2", "b1"], JobState.SENT)
    served.hold(second)
    later = served.asked()
    assert prompts(later) == ["w0", "x0", "y0"], "as many as the engine takes"
    served.answer(*adds)
    assert job.state is JobState.STREAMING
    assert not job.is_complete
    adds = served.asked()
    assert prompts(adds)[:2] == ["a1", "b0"]
    assert job.state is JobState.SENT
    served.answer(*adds, *later)
    adds = served.asked()
    assert prompts(adds)[0] == "a0"
    served.answer(*adds)
    served.asked()
    assert job.is_complete
    assert job in served.changed
    assert first.asked == ["a2", "b1", "a1", "b0", "a0"]
    assert first.answers == {prompt: f"{prompt}!" for prompt in first.asked}
    assert served.packer.in_engine == (0,)


class Inspected(Counting):
    """Looks at its answers before it takes them; "bad..." cannot be looked at."""

    inspects = True

    def __init__(self, *prompts: str) -> None:
        super().__init__(*prompts)
        self.seen: dict[int, str] = {}

    def inspect(self, index: int, completions: Sequence[Any]) -> None:
        if completions[0].text.startswith("bad"):
            raise InvalidJob("it cannot be looked at")
        self.seen[index] = threading.current_thread().name

    def deliver(self, index: int, completions: Sequence[Any]) -> None:
        assert self.seen[index].startswith("tokenmill-checks")
        super().deliver(index, completions)


def test_answers_are_looked_at_in_threads_and_their_job_is_not_complete_before() -> None:
    served, task = Served(), Inspected("a1")
    job = served.hold(task)
    try:
        for _ in range(2):
            adds = served.asked()
            assert len(adds) == 1
            served.answer(*adds)
            assert not job.is_complete
            assert served.packer.in_engine == (0,), "its place is free meanwhile"
            served.events.get(timeout=30)()
        assert served.asked() == []
        assert job.is_complete
        assert task.answers == {"a1": "a1!", "a0": "a0!"}
    finally:
        served.inspections.end()
