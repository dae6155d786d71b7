"""LowRank: what a LoRA adapter adds to a linear layer, y += scale * (x A^T) B^T.

Source: arXiv:2106.09685. Rows of several adapters in one batch: Punica, arXiv:2310.18547.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """The product for one of the matrices that are stacked in a layer.

    rows: the matrix's rows of the layer's output.  ranks: its columns of the product x A^T.  b: [rows, ranks].
    """

    rows: slice
    ranks: slice
    b: Tensor
    scale: float


@dataclass(frozen=True)
class LowRank:
    """The product that an adapter adds to a linear layer, or to this rank's part. a: [ranks of all blocks, in]."""

    a: Tensor
    blocks: tuple[Block, ...]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add the product with x [rows, in] to y [rows, out], in place."""
        narrow = F.linear(x, self.a)
        for block in self.blocks:
            y[:, block.rows].addmm_(narrow[:, block.ranks], block.b.T, alpha=block.scale)
