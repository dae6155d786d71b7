"""Snapshots: states that were kept behind full blocks, and where the states of a step come from and go.

A model with states continues a cached prefix only where the state behind it was kept. The first rows of the pool of
states belong to running sequences: a sequence's slot is its row. The rows behind those hold snapshots. Parts of a step
are computed in the order in which they were scheduled, so one part may read a row that a later part overwrites.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.schedule.sequence import Sequence

NO_ROW = -1
#: A sequence's state at a count of its tokens, saved in a row.
Save = tuple[int, int]


class Snapshots:
    """Hands out rows for snapshots. A snapshot is found by the content of the last block before it."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        self.rows = range(first_row, first_row + num_rows)
        self._free = list(reversed(self.rows))
        # By content id, least recently used first.
        self._rows: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, content_id: int) -> bool:
        return content_id in self._rows

    def use(self, content_id: int) -> int:
        """Return the row of a snapshot, and note that it is now the most recently used one."""
        self._rows.move_to_end(content_id)
        return self._rows[content_id]

    def take(self, content_id: int) -> int:
        """Return a row for a new snapshot, or NO_ROW if the pool has no rows for snapshots.

        If no row is free, the least recently used snapshot loses its row.
        """
        if self._free:
            row = self._free.pop()
        elif self._rows:
            _, row = self._rows.popitem(last=False)
        else:
            return NO_ROW
        self._rows[content_id] = row
        return row

    def drop(self, content_ids: Iterable[int]) -> None:
        """Forget the snapshots of these contents, if there are any."""
        self._free += [
            self._rows.pop(content_id) for content_id in content_ids if content_id in self._rows
        ]


@dataclass
class StateMoves:
    """Where the states of a step's sequences come from, and where they go.

    sources: for each sequence just admitted, the row of the state that it begins with; NO_ROW to begin with none.
    saves: the snapshots to make of each sequence.  kept: the content ids of all these snapshots.
    """

    sources: dict[Sequence, int] = field(default_factory=dict)
    saves: dict[Sequence, list[Save]] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)

    def parts(
        self, decode_slots: NDArray[np.int64], prefills: Iterable[tuple[Sequence, int, bool]]
    ) -> NDArray[np.int64]:
        """Return StepBatch.state_parts: a part for each sequence, or several if snapshots are made inside it."""
        first = len(decode_slots)
        rows = np.arange(first)
        none = np.full(first, NO_ROW)
        decodes = np.stack((rows, rows + 1, decode_slots, decode_slots, none), axis=1)
        prefill_parts = list(self._cut(first, prefills))
        return np.concatenate((decodes, np.array(prefill_parts, np.int64).reshape(-1, 5)))

    def _cut(
        self, row: int, prefills: Iterable[tuple[Sequence, int, bool]]
    ) -> Iterator[tuple[int, ...]]:
        """Yield the parts of prefills, cut where a snapshot is made. row: the first row of the first prefill."""
        for seq, num_new, _ in prefills:
            source = self.sources.get(seq, seq.slot)
            begin = seq.num_computed_tokens
            end = row + num_new
            for num_tokens, saved in self.saves.get(seq, ()):
                middle = row + num_tokens - begin
                yield row, middle, source, seq.slot, saved
                row = middle
                begin = num_tokens
                source = seq.slot
            if row < end:
                yield row, end, source, seq.slot, NO_ROW
            row = end
