"""Computes a step's log probabilities, in pieces: the logits of a whole chunk would not fit into memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import KernelBackend
from engine.kernels.upload import upload
from engine.layers.parallel import TensorParallel
from engine.models.base import CausalModel
from engine.schedule.logprobs import NOT_WANTED, RowLogprobs
from engine.schedule.step_batch import StepBatch

#: Logits looked at together: 32 MiB in float32. Each piece reads the whole LM head once.
PIECE_NUMBERS = 2**23
#: A GPU takes larger pieces: one logit for this many bytes of its memory. With their copies they take about 1 % of it.
GPU_BYTES_OF_LOGIT = 2**10


@dataclass(frozen=True)
class DeviceLogprobs:
    """The log probabilities of a step's rows: RowLogprobs with tensors on the device, except for `starts`."""

    tensors: list[Tensor]
    starts: NDArray[np.int64]

    def on_host(self, tensors: list[Tensor]) -> RowLogprobs:
        """Make RowLogprobs. tensors: copies of `self.tensors` on the CPU."""
        logprobs, ranks, top_ids, top_logprobs = (tensor.numpy() for tensor in tensors)
        return RowLogprobs(logprobs, ranks, self.starts, top_ids, top_logprobs)


def top_of_each(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the highest logits of each row, float32, and their ids; the first ids among equal logits.

    topk's order of equal numbers depends on the width. So it is given integers that all differ: a float's bits, then
    its id.
    """
    bits = logits.view(torch.int32)
    # integers in the order of the floats: those of negative floats have all bits but the sign's flipped
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = keys.topk(width, dim=-1).indices
    return logits.gather(1, ids), ids


def piece_rows(vocab_size: int, device: torch.device) -> int:
    """Return how many rows of logits are scored at a time."""
    numbers = PIECE_NUMBERS
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        numbers = max(numbers, total_bytes // GPU_BYTES_OF_LOGIT)
    return max(1, numbers // vocab_size)


def cut(tops: NDArray[np.int64], rows: NDArray[np.int64], most: int) -> Iterator[tuple[slice, int]]:
    """Cut tokens into pieces of at most `most` rows; yield each piece with the largest of its `tops`.

    tops: [tokens] int64, how many likely tokens each wants.  rows: [tokens] int64, ascending, the row of each.
    """
    start = 0
    while start < len(tops):
        piece = slice(start, int(np.searchsorted(rows, rows[start] + most)))
        yield piece, int(tops[piece].max())
        start = piece.stop


class StepLogprobs:
    """The log probabilities of one step, on rank 0; other ranks take part. scored_rows: [rows] int64, on the device.

    by_row: a row's result has the same bits in a piece of any size and width.
    """

    def __init__(
        self, step: StepBatch, model: CausalModel, tp: TensorParallel, backend: KernelBackend, device: torch.device,
        *, by_row: bool = False,
    ) -> None:  # fmt: skip
        self._model = model
        self._tp = tp
        self._by_row = by_row
        self._backend = backend
        self._wanted = np.flatnonzero(step.sample_tops != NOT_WANTED)
        self._device = device
        self._most_rows = piece_rows(model.vocab_size, device)
        self._sample_tops = step.sample_tops[self._wanted]
        self._scored_tops = step.scored_tops
        # Several tokens may be scored by one row: each row is kept once, with the place of each token's row among them.
        is_new = np.diff(step.scored_rows, prepend=-1) != 0
        self._places = np.cumsum(is_new) - 1
        self.scored_rows, self._scored_token_ids, self._place_of = upload(
            [step.scored_rows[is_new], step.scored_token_ids, self._places], device
        )
        self._raw = torch.zeros((0, 1), device=device)
        self._raw_rows = torch.zeros(0, dtype=torch.int64, device=device)

    def keep(self, logits: Tensor, rows: NDArray[np.int64]) -> None:
        """Keep the wanted logits before they are changed.

        logits: [any, vocabulary].  rows: [samples] int64, the row of each sample in logits and in sampled tokens.
        """
        if self._tp.rank == 0 and len(self._wanted):
            (self._raw_rows,) = upload([rows[self._wanted]], self._device)
            self._raw = logits[self._raw_rows]

    def compute(self, sampled: Tensor, hidden: Tensor) -> DeviceLogprobs | None:
        """Compute all log probabilities, the samples' first; None on ranks other than 0.

        sampled: [any] int64, a token in each of the rows that `keep` was given.
        hidden: [rows, hidden_size], of the rows that score.
        """
        parts = []
        if self._tp.rank == 0 and len(self._wanted):
            token_ids = sampled[self._raw_rows]
            rows = torch.arange(len(token_ids), device=token_ids.device)
            for piece, width in cut(self._sample_tops, np.arange(len(rows)), self._most_rows):
                rows_in_piece = rows[piece] - piece.start
                parts.append(
                    self._of_piece(self._raw[piece], token_ids[piece], rows_in_piece, width)
                )
        for piece, width in cut(self._scored_tops, self._places, self._most_rows):
            first = self._places[piece.start]
            last = self._places[piece.stop - 1]
            logits = self._model.logits(hidden[first : last + 1])
            if self._tp.rank == 0:
                rows = self._place_of[piece] - int(first)
                parts.append(self._of_piece(logits, self._scored_token_ids[piece], rows, width))
        if self._tp.rank != 0:
            return None
        widths, *tensors = zip(*parts, strict=True)
        starts = np.concatenate(([0], np.cumsum(np.concatenate(widths))))
        return DeviceLogprobs([torch.cat(pieces) for pieces in tensors], starts)

    def _of_piece(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, width: int
    ) -> tuple[NDArray[np.int64], Tensor, Tensor, Tensor, Tensor]:
        """Return the number of likely tokens of each token, and RowLogprobs' other arrays.

        logits, token_ids, rows: as KernelBackend.score takes them, but a negative token id stands for any token.
        width: how many likely tokens each token gets.
        """
        logprobs, ranks, totals = self._backend.score(logits, token_ids.clamp(min=0), rows)
        width = min(width, logits.shape[1])
        # empty unless likely tokens are wanted
        highest = logits[:, :0].float()
        ids = token_ids.new_empty((len(logits), 0))
        if width:
            numbers = logits.float()
            highest, ids = (
                top_of_each(numbers, width) if self._by_row else numbers.topk(width, dim=-1)
            )
        top_logprobs = (highest - totals[:, None])[rows]
        return (
            np.full(len(rows), width),
            logprobs,
            ranks,
            ids.int()[rows].flatten(),
            top_logprobs.flatten(),
        )
