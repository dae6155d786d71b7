"""What the functions of pages work with, and how long tables are cut into pages."""

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

#: Rows of a table on one page.
PAGE_ROWS = 50


class Missing(Exception):
    """There is no such thing to be shown; its text says what."""


T = TypeVar("T")


def if_allowed(read: Callable[[], T], otherwise: T) -> T:
    """Return what is read, or something else if Redis' rules keep it from this user, such as a producer's."""
    try:
        return read()
    except NoPermissionError:
        return otherwise


class Moved(Exception):
    """What was asked for stands at another path, which is its text."""


@dataclass(frozen=True)
class Site:
    """What pages are made of. show_prompts: whether jobs' arguments are shown."""

    watcher: Watcher
    failures: FailureIndex
    failed_rows: FailedRows
    runs: RunsSeen
    show_prompts: bool = False

    @property
    def connection(self) -> Redis:
        """Return the client of Redis."""
        return self.watcher.connection


@dataclass(frozen=True)
class Page:
    """One page of a long table. first: the place of its first row. number: from 1 on. count: how many there are."""

    first: int
    number: int
    count: int

    @classmethod
    def asked(cls, request: Request, name: str, num_rows: int, rows: int = PAGE_ROWS) -> "Page":
        """Return the page that a parameter asks for, within what there is. name: the parameter's."""
        count = max(1, -(-num_rows // rows))
        text = request.query_params.get(name, "1")
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1
        number = max(1, min(number, count))
        return cls((number - 1) * rows, number, count)


def with_failed(queues: Sequence[QueueCounts]) -> list[str]:
    """Return the names of the queues that have failed jobs."""
    return [queue.name for queue in queues if queue.counts["failed"]]
