"""The prompts of a shard while they are held: equal ones once, and no more than may be."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from jobs.context.shard_bytes import ShardBytes
from jobs.errors import ShardTooLarge
from jobs.parquet.tables.row_values import RowProblem

#: What a row takes besides its prompt, at least: its places in lists, or the reason why it has none.
ROW_BYTES = 200

#: Bytes that are counted together: the count is shared by threads.
GRAIN_BYTES = 1 << 20


class ShardTexts:
    """Gathers a shard's rendered rows. held: where their bytes are counted, until `let_go` or `close`."""

    def __init__(
        self,
        path: str,
        columns: tuple[str, ...],
        held: ShardBytes,
        remedy: str = "submit with a smaller rows_per_shard",
    ) -> None:
        """path, columns, remedy: where the rows come from and what helps, for the error."""
        self._path, self._columns, self._held, self._remedy = path, columns, held, remedy
        self._texts: dict[str, str] = {}
        self._bytes = self._gone = 0
        self.rows: list[str | RowProblem] = []

    def add(self, rows: Iterable[str | RowProblem]) -> None:
        """Take more rows.

        Raises ShardTooLarge when their prompts take more than a shard may, NoRoomYet with those of others.
        """
        texts, new = self._texts, 0
        for row in rows:
            if isinstance(row, str):
                known = texts.setdefault(row, row)
                if known is row:
                    new += sys.getsizeof(row)
                row = known
            self.rows.append(row)
            new += ROW_BYTES
            if new > GRAIN_BYTES:
                self._count(new)
                new = 0
        self._count(new)

    def _count(self, num_bytes: int) -> None:
        if self._bytes + num_bytes > self._held.limit:
            columns = ", ".join(map(repr, self._columns))
            found = f"the prompts of column {columns} in the first {len(self.rows)} rows of a shard"
            found = f"{found} take {self._bytes + num_bytes} bytes"
            raise ShardTooLarge(self._path, found, self._held.limit, "", self._remedy)
        self._held.hold(num_bytes, self._bytes)
        self._bytes += num_bytes

    def gathered(self) -> list[str | RowProblem]:
        """Return the rows, once all are there: they are the caller's from here on."""
        rows, self.rows, self._texts = self.rows, [], {}
        return rows

    def let_go(self, text: str) -> None:
        """One of the texts was handed out."""
        self._gone += len(text)
        if self._gone > GRAIN_BYTES:
            self._release(self._gone)
            self._gone = 0

    def close(self) -> None:
        """Count nothing any more; may be called more than once."""
        self._release(self._bytes)

    def _release(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, self._bytes)
        self._bytes -= num_bytes
        self._held.let_go(num_bytes)
