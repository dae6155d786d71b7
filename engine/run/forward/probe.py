"""The probe: checks that a model keeps a batch's sequences apart and remembers a sequence's earlier chunks.

A convolution, a recurrence or a state beside the cache gives other answers in an engine, and a configuration need
not mention it. So two sequences are computed alone, both in one batch, and one of them in two chunks; the logits must
agree. A model of transformers is also compared with transformers' own code. All of it is repeated for an FP8 cache.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.kv_cache import FP8
from engine.run.forward.warm_up import whole_parts
from engine.schedule.step_batch import StepBatch

# Places in the pool, each with its own blocks and state. Each sequence of each run has another, so none finds what
# another has stored.
NUM_PLACES = 5

#: Rows differ when their differences (root mean square, over the spread of its logits) are above this.
#: Measured on 80 tiny models: rounding up to 4e-5 in float32 and 0.2 in bfloat16, the first rows after a
#: boundary that a state has crossed 0.4 to 1.8. Keys and values of FP8 alone move logits by up to 0.9 in
#: those models; unrelated rows differ by 1.4.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3, FP8: 1.2}
FIRST_ROWS = 3  # after a boundary, where what crosses it is strongest
# Successive rows that are compared together: of all rows, a late difference changes few.
NUM_ROWS = 8

Run = Callable[[StepBatch], Tensor]


class Probe:
    """The steps of a probe over a pool of `num_blocks` blocks that nobody else uses, and their comparison."""

    def __init__(self, vocab_size: int, block_size: int, lengths: Sequence[int]) -> None:
        # multiples of a prime spread over the vocabulary
        token_ids = np.arange(1, sum(lengths) + 1, dtype=np.int64) * 7919 % vocab_size
        self._first = token_ids[: lengths[0]]
        self._second = token_ids[lengths[0] :]
        self._block_size = block_size
        self._blocks_per_place = -(-max(lengths) // block_size)
        self.num_blocks = NUM_PLACES * self._blocks_per_place

    def find(
        self, run: Run, dtype: torch.dtype, reference: Callable[[Tensor], Tensor | None]
    ) -> str | None:
        """Return what the model does wrong, as the end of a sentence about it; None if nothing.

        run: computes a step; logits [samples, vocabulary].  dtype: of the cache's numbers.
        reference: token ids [tokens] -> logits of all rows by other code, or None.
        """
        first = self._first
        second = self._second
        half = len(first) // 2
        # each part: its tokens, how many came before them, and its place in the pool
        alone = run(self.step([(first, 0, 0)]))
        other = run(self.step([(second, 0, 1)]))
        together = run(self.step([(first, 0, 2), (second, 0, 3)]))
        chunks = [
            run(self.step([part])) for part in ((first[:half], 0, 4), (first[half:], half, 4))
        ]
        expected = reference(torch.from_numpy(first).to(alone.device))
        if differ(alone, together[: len(first)], dtype) or differ(
            other, together[len(first) :], dtype
        ):
            return "mixes the sequences of one batch: a row reads other rows by more than attention"
        if differ(alone[half:], chunks[1], dtype):
            return "forgets what came before a chunk of a prompt: it keeps a state outside the KV cache"
        if expected is not None and differ(expected, alone, dtype):
            return "attends differently here than in transformers' own code: it needs something that is not built"
        return None

    def step(self, parts: Sequence[tuple[NDArray[np.int64], int, int]]) -> StepBatch:
        """Make a step of these parts, each (tokens, how many came before them, its place)."""
        width = self._blocks_per_place
        lens = np.array([len(tokens) for tokens, _, _ in parts], np.int64)
        positions = [np.arange(start, start + len(tokens)) for tokens, start, _ in parts]
        first_slots = [place * width * self._block_size for _, _, place in parts]
        context_lens = lens + np.array([start for _, start, _ in parts])
        return StepBatch(
            token_ids=np.concatenate([tokens for tokens, _, _ in parts]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(
                [p + slot for p, slot in zip(positions, first_slots, strict=True)]
            ),
            sample_rows=np.arange(lens.sum()),
            block_tables=np.array(
                [np.arange(width) + place * width for _, _, place in parts], np.int32
            ),
            context_lens=context_lens,
            query_lens=lens,
            state_parts=whole_parts(lens, context_lens, np.array([place for _, _, place in parts])),
        )


def differ(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> bool:
    """Return whether there is a group of successive rows of which most differ. A router's near tie moves a few."""
    expected = expected.float()
    actual = actual.float()
    spread = expected.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    error = (actual - expected).square().mean(-1).sqrt() / spread
    # Rows that overflow in `expected` too say nothing.
    error = error.nan_to_num(torch.inf)[expected.isfinite().all(-1)]
    if not len(error):
        return False
    groups = (error[:FIRST_ROWS], *error.tensor_split(max(1, len(error) // NUM_ROWS)))
    return any(float(group.median()) > TOLERANCE[dtype] for group in groups)
