"""A decode step's host work as nano-vLLM does it, written for comparison: Python lists, rebuilt in each step.

Scheduling walks the running sequences through a deque; the batch is lists with one entry for each sequence,
and a list of block tables, each padded to the longest; all become tensors. No model, no preemption, no ends.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

TOKEN = 7


@dataclass
class ListSequence:
    """A running sequence: all its tokens and the blocks they are in."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    last_hash: int = 0


@dataclass(frozen=True)
class DecodeInputs:
    """Tensors of one step, as nano-vLLM's prepare_decode makes them."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_tables: Tensor
    temperatures: Tensor


class ListEngine:
    """Decode steps over sequences whose prompts count as computed."""

    def __init__(self, prompts: list[list[int]], *, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = 0
        self._running = deque(ListSequence(list(prompt)) for prompt in prompts)
        self._by_hash: dict[int, int] = {}
        for seq in self._running:
            while len(seq.block_table) * block_size < len(seq.token_ids):
                self._grow(seq)

    def step(self) -> DecodeInputs:
        """Schedule, build the batch, append a token to each sequence; return the batch."""
        seqs = self._schedule()
        inputs = self._prepare_decode(seqs)
        self._postprocess(seqs, [TOKEN] * len(seqs))
        return inputs

    def _schedule(self) -> list[ListSequence]:
        scheduled = []
        while self._running:
            seq = self._running.popleft()
            length = len(seq.token_ids)
            if length % self._block_size == 1 and len(seq.block_table) * self._block_size < length:
                self._grow(seq)
            elif length % self._block_size == 0:
                self._publish(seq)
            scheduled.append(seq)
        self._running.extendleft(reversed(scheduled))
        return scheduled

    def _prepare_decode(self, seqs: list[ListSequence]) -> DecodeInputs:
        token_ids, positions, slot_mapping, context_lens, temperatures = [], [], [], [], []
        for seq in seqs:
            length = len(seq.token_ids)
            token_ids.append(seq.token_ids[-1])
            positions.append(length - 1)
            context_lens.append(length)
            slot_mapping.append(seq.block_table[-1] * self._block_size + (length - 1) % self._block_size)
            temperatures.append(0.0)
        widest = max(len(seq.block_table) for seq in seqs)
        tables = [seq.block_table + [-1] * (widest - len(seq.block_table)) for seq in seqs]
        return DecodeInputs(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slot_mapping, dtype=torch.int32),
            torch.tensor(context_lens, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor(temperatures, dtype=torch.float32),
        )

    def _postprocess(self, seqs: list[ListSequence], token_ids: list[int]) -> None:
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)

    def _grow(self, seq: ListSequence) -> None:
        seq.block_table.append(self._num_blocks)
        self._num_blocks += 1

    def _publish(self, seq: ListSequence) -> None:
        tokens = array("i", seq.token_ids[-self._block_size :]).tobytes()
        seq.last_hash = xxhash.xxh64_intdigest(seq.last_hash.to_bytes(8, "little") + tokens)
        self._by_hash[seq.last_hash] = seq.block_table[-1]
