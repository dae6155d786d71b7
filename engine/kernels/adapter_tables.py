"""What kernels read of adapters: the rows of a step, sorted by adapter, and a table for each linear layer."""

from typing import NamedTuple

from torch import Tensor

#: The ranks of all blocks of a layer that a table can hold.
MOST_RANKS = 256
#: Fields of an adapter in a table: the address of A and the number of its ranks, then those of each block.
HEAD_FIELDS = 2
#: Fields of a block: the address of B, its first row in the layer's output, its rows, its first rank and its ranks.
BLOCK_FIELDS = 5


class LayerTable(NamedTuple):
    """The matrices of all loaded adapters for one linear layer.

    A block is an adapter's product for one of the matrices that are stacked in the layer. Each adapter has its blocks
    in an order of its own. If an adapter lacks a block, the block's fields are 0. If an adapter is not loaded, all its
    fields are 0. The scales of such blocks may be stale.

    addresses: [adapters, HEAD_FIELDS + BLOCK_FIELDS * blocks] int64.  scales: [adapters, blocks] float32.
    most_rows: the rows of the largest block.
    """

    addresses: Tensor
    scales: Tensor
    most_rows: int


class SortedRows(NamedTuple):
    """The rows of a step, sorted by adapter.

    rows: [rows or more] int64, those without an adapter last.  ends: [adapters + 1] int32, where each adapter's end.
    Kernels read `rows` up to the last adapter's end only.
    """

    rows: Tensor
    ends: Tensor
