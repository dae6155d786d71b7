"""Token embedding and LM head, the vocabulary split over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.base import WeightedModule, fill
from engine.layers.parallel import TensorParallel


class VocabParallelEmbedding(WeightedModule):
    """weight: [this rank's vocabulary, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        rows = tp.share(vocab_size, "vocabulary entries")
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] int64 -> [tokens, hidden]."""
        return self.tp.all_reduce(F.embedding(token_ids, self.weight))

    def load(self, name: str, tensor: Tensor, shard: str | None) -> None:
        """Copy this rank's rows of `tensor` into parameter `name`."""
        fill(self.get_parameter(name), self.tp.own(tensor, 0))


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits. Tied to the embedding by sharing its weight parameter."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [samples, hidden] -> logits [samples, vocabulary]."""
        return self.tp.all_gather(F.linear(hidden, self.weight))
