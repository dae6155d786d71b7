"""A task whose requests come from a runner of items."""

from collections.abc import Iterator
from typing import Any

from jobs.items.item import Samples
from jobs.items.runner import ItemRunner
from jobs.tasks import OpenTask, Request


class ItemsTask(OpenTask):
    """Asks what the runner's items ask. A subclass sets `runner`, or leaves it None if nothing is asked."""

    runner: ItemRunner[Any] | None = None

    def requests(self) -> Iterator[Request]:
        """Yield the runner's requests."""
        return iter(()) if self.runner is None else self.runner.requests()

    @property
    def num_requests(self) -> int | None:
        """Return the runner's number of requests, 0 without one."""
        return 0 if self.runner is None else self.runner.num_requests

    @property
    def has_more(self) -> bool:
        """Whether the runner has requests now."""
        return self.runner is not None and self.runner.has_more

    @property
    def inspects(self) -> bool:
        """Whether the runner's items are checked."""
        return self.runner is not None and self.runner.inspects

    def inspect(self, index: int, completions: Samples) -> None:
        """Have the runner make checks."""
        assert self.runner is not None, "nothing was asked"
        self.runner.inspect(index, completions)

    def deliver(self, index: int, completions: Samples) -> None:
        """Give the runner completions."""
        assert self.runner is not None, "nothing was asked"
        self.runner.deliver(index, completions)

    def close(self) -> None:
        """Leave what is not answered to other jobs."""
        if self.runner is not None:
            self.runner.close()
