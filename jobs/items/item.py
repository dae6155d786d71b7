"""Defines items and Ask. An item is a generator that yields requests and checks, and returns an answer.

Ask tells the runner how to run a job's items.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jobs.context.checks import RepairOptions
from jobs.tasks import Completion, Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """Asks a child process whether an answer's text is valid.

    The item is sent what Checks.outcome returns. For most checks, this is None if the text is valid, and otherwise the
    reason why it is not. If the check can never work, InvalidJob is raised in the item.
    row: what a check function gets in addition to the text.
    """

    options: RepairOptions
    text: str
    row: Any = None


Step = list[Request] | Check
"""What an item yields.

The requests of a list run side by side. The item is then sent a list with the completions of each request, in the order
of the requests. The completions of one request are ordered by their index. The runner empties the list that the item
has yielded, so that the item does not keep the prompts in memory while it waits."""

Samples = Sequence[Completion]
"""The completions of one request, ordered by their index."""

Item = Generator[Step, Any, T]
"""A generator of steps that returns a `T`.

An item depends only on its prompt, its seed and the replies that it was sent. So an interrupted item resumes by
replay: a new generator is sent the same replies again. If you change the steps of an item, raise FORMAT
(jobs/common/keys.py), because journals hold replies to the old steps."""


class Ask(Generic[T]):
    """Tells the runner how to run the items of a job's prompts or rows.

    has_checks: whether items yield checks. If so, completions go through another thread before they are delivered.
    is_single: whether each item begins with exactly one request.
    """

    has_checks = False
    is_single = True

    def opening(self) -> Item[Any] | None:
        """Return an item that must end before all others begin; None if the job needs no such item."""
        return None

    def prepared(self, request: Request) -> Request:
        """Return a request in the form in which it is sent."""
        return request

    def is_remembered(self, answer: T) -> bool:
        """Whether equal prompts of other jobs get this answer as well."""
        return True


def asked_once(request: Request) -> Item[Samples]:
    """Send one request; return its completions."""
    requests = [request]
    del request  # the runner empties the list, so that nothing here holds the prompt
    [samples] = yield requests
    return samples  # type: ignore[no-any-return]


def side_by_side(items: Sequence[Item[T]]) -> Item[list[T]]:
    """Run several items as one; return their answers in order.

    Each round sends the requests of all items that have not returned. The next round begins when all completions of
    this round have come.
    """
    answers: dict[int, T] = {}  # by the item's number
    # The present steps of the items that have not returned, by the item's number.
    steps: dict[int, Step] = {}

    def advance(number: int, reply: Any) -> None:
        """Give an item a reply. Put its next step into `steps`, or its answer into `answers`."""
        try:
            steps[number] = items[number].send(reply)
        except StopIteration as end:
            steps.pop(number, None)
            answers[number] = end.value

    for number in range(len(items)):
        advance(number, None)  # starts the generator

    while steps:
        for number in sorted(steps):
            step = steps.get(number)
            while isinstance(step, Check):
                outcome = yield step
                advance(number, outcome)
                step = steps.get(number)  # None once the item has returned

        requests: list[Request] = []
        num_requests: dict[int, int] = {}  # by the item's number
        for number in sorted(steps):
            step = steps[number]
            assert isinstance(step, list)
            num_requests[number] = len(step)
            requests += step
            step.clear()  # the item may hold this list, and with it the prompts
        if not num_requests:  # all items have returned after their checks
            break
        replies = yield requests

        start = 0
        for number, count in num_requests.items():
            advance(number, replies[start : start + count])
            start += count
    return [answers[number] for number in range(len(items))]
