"""What the functions of all pages share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis import Redis
from redis.exceptions import NoPermissionError
from starlette.requests import Request

from jobs.queues import QueueCounts
from tokenmill.dashboard.failures.index import FailureIndex
from tokenmill.dashboard.failures.rows import FailedRows
from tokenmill.dashboard.seen.runs_seen import RunsSeen
from tokenmill.dashboard.seen.watcher import Watcher

#: The rows of a table on one page.
PAGE_ROWS = 50

T = TypeVar("T")


class Missing(Exception):
    """Raised if what a page should show does not exist. The text says so to a person."""


class Moved(Exception):
    """Raised if the browser should go to another page. The text is that page's path."""


def if_allowed(read: Callable[[], T], otherwise: T) -> T:
    """Return the result of `read`, or `otherwise` if Redis does not let this user read it."""
    try:
        return read()
    except NoPermissionError:
        return otherwise


@dataclass(frozen=True)
class Site:
    """The sources of what pages show. show_prompts: whether the arguments of jobs are shown."""

    watcher: Watcher
    failures: FailureIndex
    failed_rows: FailedRows
    runs: RunsSeen
    show_prompts: bool = False

    @property
    def connection(self) -> Redis:
        """Return the Redis client."""
        return self.watcher.connection


@dataclass(frozen=True)
class Page:
    """One page of a long table.

    first: the index of the page's first row. number: the page's number, from 1 on. count: the number of pages.
    """

    first: int
    number: int
    count: int

    @classmethod
    def requested(
        cls, request: Request, parameter: str, num_rows: int, page_rows: int = PAGE_ROWS
    ) -> "Page":
        """Return the page that a request asks for. parameter: the parameter of the request with the page's number.

        A number beyond the last page stands for the last page. A text that is not a number stands for the first page.
        num_rows: how many rows the whole table has.
        """
        count = max(1, math.ceil(num_rows / page_rows))
        number = 1
        text = request.query_params.get(parameter, "1")
        if text.isascii() and text.isdigit() and len(text) < 9:
            number = int(text)
        number = max(1, min(number, count))
        return cls(first=(number - 1) * page_rows, number=number, count=count)


def with_failed(queues: Sequence[QueueCounts]) -> list[str]:
    """Return the names of the queues that have failed jobs."""
    return [queue.name for queue in queues if queue.counts["failed"]]
