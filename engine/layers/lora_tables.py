"""LowRankTables: where each loaded adapter has its matrices, for kernels that multiply with all adapters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.kernels.adapter_tables import (
    BLOCK_FIELDS,
    HEAD_FIELDS,
    MOST_RANKS,
    LayerTable,
    SortedRows,
)
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.lora import LowRank

Linear = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True)
class TabledRows:
    """A step's rows, sorted by adapter, and the tables with the adapters' matrices."""

    sorted_rows: SortedRows
    tables: Mapping[nn.Module, LayerTable]
    add: Callable[[Tensor, Tensor, SortedRows, LayerTable], None]

    def add_to(self, y: Tensor, layer: nn.Module, x: Tensor) -> None:
        """Add each adapter's product to its rows of y = layer(x), in place."""
        table = self.tables.get(layer)
        if table is not None:
            self.add(y, x, self.sorted_rows, table)

    def refill(self, step: TabledRows) -> None:
        """Copy another step's sorted rows over these, where CUDA graphs read them. The other step has no more rows."""
        rows, ends = step.sorted_rows
        self.sorted_rows.rows[: len(rows)].copy_(rows)
        self.sorted_rows.ends.copy_(ends)


class LowRankTables:
    """Owns a table for each linear layer: where the matrices of all loaded adapters are.

    A table never moves, so a CUDA graph that reads it sees the adapters that are loaded at each replay.
    """

    def __init__(
        self,
        layers: Iterable[Linear],
        num_adapters: int,
        kernels: LayerKernels,
        device: torch.device,
    ) -> None:
        """num_adapters: the most that are loaded at a time.  kernels: must have those for experts and for adapters."""
        assert kernels.experts is not None
        assert kernels.add_low_rank is not None
        self._num_adapters = num_adapters
        self._add = kernels.add_low_rank
        self._group = kernels.experts.group
        self._numbers: set[int] = set()  # the adapters that are in the tables
        self._tables: dict[nn.Module, LayerTable] = {}
        for layer in layers:
            rows = block_rows(layer)
            fields = HEAD_FIELDS + BLOCK_FIELDS * len(rows)
            self._tables[layer] = LayerTable(
                torch.zeros((num_adapters, fields), dtype=torch.int64, device=device),
                torch.zeros((num_adapters, len(rows)), dtype=torch.float32, device=device),
                max(rows),
            )

    @property
    def none(self) -> int:
        """The number that stands for no adapter in `sort`."""
        return self._num_adapters

    def put(self, number: int, products: Mapping[nn.Module, LowRank]) -> None:
        """Enter a loaded adapter, unless a layer of it has more ranks or blocks than its table holds; see `hold`."""
        for layer, product in products.items():
            num_blocks = self._tables[layer].scales.shape[1]
            if len(product.a) > MOST_RANKS or len(product.blocks) > num_blocks:
                return
        for layer, product in products.items():
            _enter(self._tables[layer], number, product)
        self._numbers.add(number)

    def drop(self, number: int) -> None:
        """Forget an adapter: its addresses become 0 in every table. It may have been entered into some tables only."""
        self._numbers.discard(number)
        for table in self._tables.values():
            table.addresses[number] = 0

    def hold(self, numbers: NDArray[np.int64]) -> bool:
        """Return whether all these adapters are in the tables. Negative numbers stand for none."""
        return self._numbers.issuperset(numbers[numbers >= 0].tolist())

    def sort(self, numbers: Tensor) -> TabledRows:
        """Sort rows by adapter, on the device. numbers: [rows] int64, `none` for rows without one."""
        rows, _, ends = self._group(numbers[:, None], self._num_adapters + 1)
        return TabledRows(SortedRows(rows, ends), self._tables, self._add)


def block_rows(layer: Linear) -> list[int]:
    """Return how many rows this rank has of each matrix that is stacked in a layer."""
    if isinstance(layer, ColumnParallelLinear):
        return [share.length for share in layer.rows.values()]
    return [layer.out_features]


def _enter(table: LayerTable, number: int, product: LowRank) -> None:
    fields = torch.zeros(table.addresses.shape[1], dtype=torch.int64)
    scales = torch.zeros(table.scales.shape[1])
    fields[:HEAD_FIELDS] = torch.tensor([product.a.data_ptr(), len(product.a)])
    for i, block in enumerate(product.blocks):
        assert block.b.is_contiguous()
        place = HEAD_FIELDS + BLOCK_FIELDS * i
        num_rows, num_ranks = block.b.shape
        fields[place : place + BLOCK_FIELDS] = torch.tensor(
            [block.b.data_ptr(), block.rows.start, num_rows, block.ranks.start, num_ranks]
        )
        scales[i] = block.scale
    table.addresses[number].copy_(fields)
    table.scales[number].copy_(scales)
