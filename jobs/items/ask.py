"""What is asked of all items of a runner."""

from typing import Any, Generic

from jobs.items.item import Item, T
from jobs.tasks import Request


class Ask(Generic[T]):
    """What a job asks of each of its prompts or rows, as far as the runner needs to know it.

    has_checks: whether items yield checks. Their completions go through another thread before they are delivered.
    is_single: each item begins with one request.
    """

    has_checks = False
    is_single = True

    def opening(self) -> Item[Any] | None:
        """Return an item that ends before all others begin, if there is one."""
        return None

    def prepared(self, request: Request) -> Request:
        """Return a request as it is sent."""
        return request

    def is_remembered(self, answer: T) -> bool:
        """Whether an answer is given to equal prompts of other jobs, too."""
        return True
