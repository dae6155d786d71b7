"""Token embedding and LM head, the vocabulary split over the ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoint.weights import CheckpointTensor
from engine.layers.onednn import linear, pack_weight
from engine.layers.parallel import Share, TensorParallel
from engine.layers.row_tiles import TiledProduct
from engine.layers.weighted_module import WeightedModule, fill


class VocabParallelEmbedding(WeightedModule):
    """The token embedding, split over the ranks.

    weight: [rows of a rank, hidden]; zeros are at its end on a rank that has fewer rows than the others.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows = tp.share_padded(vocab_size)
        num_rows = tp.padded_length(vocab_size)
        self.weight = nn.Parameter(
            torch.empty(num_rows, hidden_size, dtype=dtype), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed token_ids: [tokens] int64 -> [tokens, hidden]; each row comes from the rank that holds its id."""
        return look_up(token_ids, self.weight, self.rows, self.tp)

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's rows of `tensor` into parameter `name`."""
        weight = self.get_parameter(name)
        fill(weight[: self.rows.length], self.rows.read(tensor, 0))
        weight[self.rows.length :].zero_()


def look_up(token_ids: Tensor, weight: Tensor, rows: Share, tp: TensorParallel) -> Tensor:
    """Look up rows of a table shared by the ranks. token_ids: [...] int64 -> [..., hidden]."""
    if tp.size == 1:
        return F.embedding(token_ids, weight)
    local_ids = token_ids - rows.start
    foreign = (local_ids < 0) | (local_ids >= rows.length)
    hidden = F.embedding(local_ids.masked_fill(foreign, 0), weight)
    return tp.all_reduce(hidden.masked_fill(foreign.unsqueeze(-1), 0.0))


class ParallelLMHead(VocabParallelEmbedding):
    """Turns hidden states into logits. If it is tied to the embedding, both have the same weight parameter.

    instead: multiplies in place of the weight in a deterministic engine.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, *, dtype: torch.dtype
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp, dtype=dtype)
        self.instead: TiledProduct | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn hidden [samples, hidden] into logits [samples, vocabulary] on rank 0, a part of them on others."""
        part = linear(hidden, self.weight) if self.instead is None else self.instead(hidden, None)
        return self.tp.gather(part)[:, : self.rows.total]

    def finish_loading(self) -> None:
        """Pack the weight where that pays; a tied embedding keeps its own table."""
        self.weight = pack_weight(self.weight)
