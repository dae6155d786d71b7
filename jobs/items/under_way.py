"""One item of a runner: the prompts or rows that it answers, the step that it waits for, and its answer.

A place is the number of a prompt or row within the job.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from jobs.context.checks import Checks
from jobs.errors import JobsError
from jobs.items.item import Check, Item, Samples, Step, T
from jobs.items.records import NOTHING, Progress, Reply
from jobs.tasks import Request


class ItemUnderWay(Generic[T]):
    """Drives one item from step to step.

    `receive` may be called in any thread, and runs the item's checks there. All other methods belong to the thread that
    sends requests and delivers completions.

    replies: what the item was sent so far. num_steps: how many lists of requests the item has yielded.
    is_done: whether the item has returned. answer: what it has returned.
    """

    def __init__(self, item: Item[T], checks: Checks) -> None:
        self._item = item
        self._checks = checks
        self._lock = threading.Lock()
        # The requests of the present step, until they are taken.
        self._requests: list[Request] = []
        # How many requests the present step has.
        self._num_awaited = 0
        # The completions of the present step that have come, by the number of their request.
        self._received: dict[int, Samples] = {}
        self.replies: list[Reply] = []
        self.num_steps = 0
        self.is_done = False
        self.answer: T | None = None

    def begin(self, replies: list[Reply]) -> None:
        """Go to the first step that has no reply. replies: the replies that an earlier execution has written.

        Raises the errors of the item.
        """
        step = self._next(None)  # starts the generator
        for reply in replies:
            if step is None:
                return
            self.replies.append(reply)
            step = self._next(reply)
        self._make_checks(step)

    def take_requests(self) -> list[Request]:
        """Return the requests of the present step. A second call returns none."""
        requests = self._requests
        self._requests = []
        return requests

    def receive(self, step: int, number: int, samples: Samples) -> None:
        """Take the completions of one request. Raises the errors of the item and of its checks.

        Once all completions of the step have come, the item goes on to its next requests or its answer. Completions
        that come a second time change nothing.
        step: the number of the request's step, see `num_steps`. number: the request's number in its step, from 0.
        """
        with self._lock:
            if step != self.num_steps or self.is_done or number in self._received:
                return
            if len(samples) > 1:
                samples = sorted(samples, key=lambda sample: sample.index)
            self._received[number] = samples
            if len(self._received) < self._num_awaited:
                return
            reply = [self._received[position] for position in range(self._num_awaited)]
            self.replies.append(reply)
            self._make_checks(self._next(reply))

    def _make_checks(self, step: Step | None) -> None:
        """Have answers checked until the item yields requests or returns. step: the item's present step."""
        while isinstance(step, Check):
            try:
                outcome = self._checks.outcome(step.options, step.row, step.text)
            except JobsError as error:
                step = self._next(error)
            else:
                self.replies.append(outcome)
                step = self._next(outcome)

    def _next(self, reply: Any) -> Step | None:
        """Send the item a reply. Return the item's next step; None once the item has returned.

        A reply that is a JobsError is raised in the item.
        """
        self._received = {}
        try:
            is_error = isinstance(reply, JobsError)
            step = self._item.throw(reply) if is_error else self._item.send(reply)
        except StopIteration as end:
            self.answer = end.value
            self.is_done = True
            self._requests = []
            return None
        if not isinstance(step, Check):
            self._requests = step
            self._num_awaited = len(step)
            self.num_steps += 1
        return step


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """An item of a runner. It answers one prompt or row, or several equal ones.

    places: the numbers of its prompts or rows within the job. The first number names the item in a journal.
    make: returns the item. It is called once, to begin or to drop the item, and is None afterwards.
    memo_key: names the answer in the memo; None if no other job may use the answer.
    item: the item once it is begun, until it has returned.
    num_awaited: how many requests of the present step are not delivered yet.
    resumed: the progress at which another execution left the item; NOTHING once the item has come that far.
    replies: what was delivered for the steps that are over.
    received: what was delivered for the present step; see Progress.
    num_tokens: the tokens that were generated for the item, by any execution.
    """

    places: list[int]
    make: Callable[[], Item[T]] | None
    memo_key: bytes | None = None
    item: ItemUnderWay[T] | None = None
    num_awaited: int = 0
    resumed: Progress = NOTHING
    replies: tuple[Reply, ...] = ()
    received: Mapping[int, Samples] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def first_place(self) -> int:
        """The number of the item's first prompt or row, which names the item in a journal.

        The opening item (see `is_opening`) has no such number.
        """
        return self.places[0]

    @property
    def is_opening(self) -> bool:
        """Whether this is the opening item, which is asked before all other items and belongs to no prompt or row."""
        return not self.places

    def add_received(self, number: int, samples: Samples) -> None:
        """Note the completions of a request of the present step."""
        # A new mapping, because a journal may be reading the old one.
        self.received = {**self.received, number: samples}


class Sent(NamedTuple, Generic[T]):
    """A request that was sent, or waits to be sent.

    step: the number of the item's step. number: the request's number in this step. num_continued: how many tokens of an
    earlier answer the request continues.
    """

    entry: Entry[T]
    step: int
    number: int
    num_continued: int


class Answered(NamedTuple, Generic[T]):
    """The answer to one prompt or row.

    place: the number of the prompt or row within the job.
    num_tokens: how many tokens were generated for the answer. If several prompts share an answer, all but one have 0.
    replies: the replies that the item was sent, if the runner keeps replies.
    """

    place: int
    num_tokens: int
    answer: T
    replies: tuple[Reply, ...]
