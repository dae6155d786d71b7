"""The pictures of a prompt, and those of a step. This module passes their features on and never computes with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False, slots=True, weakref_slot=True)
class SeenPicture:
    """A picture. Equal pictures share one object, as long as a prompt needs it.

    digest: of its pixels and size.
    key_id: a negative number that no other picture has; block keys hold it in place of the picture's placeholders.
    text: stands for the picture in a prompt, with `num_rows` placeholders.
    sizes: from these the positions of its tokens are made.
    inputs: what the vision tower reads; None once there are features.
    features: tensors [num_rows, hidden] on the host; those for single layers come last.
    """

    digest: bytes
    key_id: int
    text: str
    num_rows: int
    sizes: dict[str, Any]
    inputs: dict[str, Any] | None
    features: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures of a prompt, in order.

    rows: [placeholders] int64, the index of each placeholder among the prompt's tokens.
    key_ids: the prompt's tokens as block keys have them.
    positions: [3, tokens] int64 for a model whose tokens have three positions each; else None.
    blocks: [blocks, 2] int64, the start and end of each run of tokens that all see each other. No prefill chunk ends
    inside a run.
    """

    seen: tuple[SeenPicture, ...]
    rows: NDArray[np.int64]
    key_ids: list[int]
    positions: NDArray[np.int64] | None = None
    blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def whole_until(self, end: int) -> int:
        """Return the last place up to `end` that is inside no block."""
        cut_blocks = self.blocks[(self.blocks[:, 0] < end) & (end < self.blocks[:, 1])]
        return int(cut_blocks[0, 0]) if len(cut_blocks) else end  # blocks do not overlap

    @property
    def shift(self) -> int:
        """What to add to the index of a token behind the prompt to get its position."""
        if self.positions is None:
            return 0
        next_position = int(self.positions.max()) + 1
        next_index = int(self.positions.shape[1])
        return next_position - next_index

    def within(
        self, start: int, end: int
    ) -> tuple[NDArray[np.int64], list[Part], NDArray[np.int64]]:
        """Return what lies among the tokens from start to end: placeholders, their parts of pictures, and blocks."""
        low, high = np.searchsorted(self.rows, (start, end)).tolist()
        parts = []
        first = 0  # placeholders of earlier pictures
        for picture in self.seen:
            part_start = max(low - first, 0)
            part_end = min(high - first, picture.num_rows)
            if part_start < part_end:
                parts.append((picture, part_start, part_end))
            first += picture.num_rows
        blocks = self.blocks[(self.blocks[:, 0] >= start) & (self.blocks[:, 1] <= end)]
        return self.rows[low:high], parts, blocks


Part = tuple[SeenPicture, int, int]
"""A picture, and the start and end of some of its rows."""


@dataclass(frozen=True)
class StepPictures:
    """The pictures of a step's tokens.

    rows: [rows] int64, the rows of the step's placeholders, in order.  parts: where their features are.
    positions: [3, tokens] int64; None if every token's position is its index in its sequence.
    blocks: [blocks, 2] int64, the start and end of each run of rows that all see each other.
    """

    rows: NDArray[np.int64]
    parts: list[Part]
    positions: NDArray[np.int64] | None
    blocks: NDArray[np.int64]
