"""Which blocks and tokens the rows of a step see, found once for all layers that see alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.features import AttentionFeatures

# Of a sequence whose rows see less than their whole context, or whose scores are written out: more rows go
# through more tokens that they cannot see, and their scores leave the caches (measured: 2 times slower).
ROWS_AT_ONCE = 128
SCORES_AT_ONCE = 1 << 22  # written out: 16 MiB


@dataclass(frozen=True)
class Span:
    """Rows start:end of a step, the last of a context whose tokens are in these blocks."""

    start: int
    end: int
    block_ids: Tensor
    context_len: int

    def pieces(self, num_rows: int) -> list[Span]:
        """Cut the rows into spans of so many, each the end of its own, shorter context."""
        ends = range(self.end, self.start, -num_rows)
        return [
            Span(max(self.start, end - num_rows), end, self.block_ids, self.context_len - self.end + end)
            for end in ends
        ]


@dataclass(frozen=True)
class View:
    """Rows start:end of a step and what they see: tokens first:last of those that these blocks hold.

    mask: [rows, last - first] bool, True where a row sees a token. None if there is one row, or if each sees
    the tokens up to itself and the first row is the first of the tokens.
    """

    start: int
    end: int
    block_ids: Tensor
    first: int
    last: int
    mask: Tensor | None


class Spans:
    """Some of a step's sequences. What they see depends on a layer's window and chunk: each is kept."""

    def __init__(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        starts: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        """starts: [seqs], the first row of each; the rest as in KernelBackend.build_metadata."""
        tables = torch.from_numpy(block_tables).to(device)
        self._spans = [
            Span(start, start + query_len, table, context_len)
            for table, context_len, query_len, start in zip(
                tables, context_lens.tolist(), query_lens.tolist(), starts.tolist(), strict=True
            )
        ]
        self._views: dict[tuple[int | None, int | None, int | None], list[View]] = {}

    def views(self, features: AttentionFeatures, block_size: int, *, scores_written: bool) -> list[View]:
        """What the rows see in such a layer.

        scores_written: all of them are in memory at a time, so a view has few rows, and a mask unless it has
        one row.
        """
        key = (features.window, features.chunk, features.num_heads if scores_written else None)
        if key not in self._views:
            self._views[key] = [
                _view(piece, features, block_size, always_mask=scores_written)
                for span in self._spans
                for piece in _cut(span, features, scores_written=scores_written)
            ]
        return self._views[key]


def _cut(span: Span, features: AttentionFeatures, *, scores_written: bool) -> list[Span]:
    if scores_written:
        num_rows = SCORES_AT_ONCE // (features.num_heads * span.context_len)
        return span.pieces(max(1, min(ROWS_AT_ONCE, num_rows)))
    return span.pieces(ROWS_AT_ONCE) if _first_visible(span.context_len - 1, features) else [span]


def _view(span: Span, features: AttentionFeatures, block_size: int, *, always_mask: bool) -> View:
    num_rows, context_len = span.end - span.start, span.context_len
    first = _first_visible(context_len - num_rows, features)
    mask = None
    if num_rows > 1 and (always_mask or num_rows < context_len or _first_visible(context_len - 1, features)):
        mask = _mask(context_len - num_rows, first, context_len, features, span.block_ids.device)
    skipped = first // block_size
    block_ids = span.block_ids[skipped : -(-context_len // block_size)]
    before = skipped * block_size
    return View(span.start, span.end, block_ids, first - before, context_len - before, mask)


def _first_visible(token: int, features: AttentionFeatures) -> int:
    """The first token of its sequence that this one sees."""
    first = 0 if features.window is None else max(0, token - features.window + 1)
    return first if features.chunk is None else max(first, token // features.chunk * features.chunk)


def _mask(
    first_row: int, first: int, context_len: int, features: AttentionFeatures, device: torch.device
) -> Tensor:
    """Return the mask [rows, tokens], bool: rows from first_row on, columns from `first` on."""
    tokens = torch.arange(first, context_len, device=device)
    rows = torch.arange(first_row, context_len, device=device).unsqueeze(1)
    mask = tokens <= rows
    if features.window is not None:
        mask &= tokens > rows - features.window
    if features.chunk is not None:
        mask &= tokens >= rows // features.chunk * features.chunk
    return mask
