"""PageMeter: an open file that ends the reading of a batch which takes too much memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from jobs.errors import ShardTooLarge
from jobs.parquet.pages import ChunkSize


class PageMeter:
    """What Python calls a file, over a pyarrow one; counts what the pages of a batch take as they are read.

    Rows of repeated columns may go over any number of pages, and only the pages tell where: so reading raises
    ShardTooLarge once the pages that a batch has begun take more than `limit` bytes. reserve: told, before
    more pages are read, how much they will take; what it raises ends the reading, too.
    """

    closed = False

    def __init__(
        self, path: str, source: Any, limit: int, chunks: Sequence[ChunkSize], reserve: Callable[[int], None]
    ) -> None:
        self._path, self._source, self._limit, self._reserve = path, source, limit, reserve
        pages = sorted((start, cost, chunk.leaf.path) for chunk in chunks for start, cost in chunk.pages)
        self._starts = [start for start, _, _ in pages]
        self._columns = [column for _, _, column in pages]
        self._costs = [0.0, *accumulate(cost for _, cost, _ in pages)]
        self._at, self._begun = 0, 0.0

    def begin_batch(self) -> None:
        """Count from nothing: what was begun before has been handed out."""
        self._begun = 0.0

    def read(self, size: int | None = None) -> bytes:
        """Read on. Raises ShardTooLarge."""
        size = self._source.size() - self._at if size is None or size < 0 else size
        first, last = (bisect_left(self._starts, place) for place in (self._at, self._at + size))
        self._begun += self._costs[last] - self._costs[first]
        if self._begun > self._limit:
            what = f"one row of column {self._columns[first]!r} may take {int(self._begun)} bytes"
            raise ShardTooLarge(self._path, what, self._limit, "", "shorten it, or leave it out")
        if last > first:
            self._reserve(int(self._begun))
        data: bytes = self._source.read_at(size, self._at)
        self._at += len(data)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        self._at = place + (0, self._at, self._source.size())[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        """Leave the file itself to who opened it."""
