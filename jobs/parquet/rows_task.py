"""A task that asks rows of a run again: its requests, and their deliveries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..tasks import Completion, OpenTask, Request
from .shard_requests import ShardRequests
from .shard_texts import ShardTexts


class RowsTask(OpenTask):
    """What a subclass makes of the answers is its own; it sets both fields when it is made."""

    _requests: ShardRequests
    _texts: ShardTexts

    def requests(self) -> Iterator[Request]:
        return self._requests.requests()

    @property
    def num_requests(self) -> int | None:
        return self._requests.num_requests

    @property
    def has_more(self) -> bool:
        return self._requests.has_more

    @property
    def inspects(self) -> bool:
        return self._requests.inspects

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        self._requests.inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        self._requests.deliver(index, completions)

    def close(self) -> None:
        self._requests.close()
        self._texts.close()
