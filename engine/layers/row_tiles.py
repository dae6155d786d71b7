"""Products whose rows have the same bits whatever rows are multiplied with them, for deterministic engines.

A BLAS library may add in another order for another number of rows. So it only gets tiles, in sizes with which a row's
bits were found not to depend on the size or on the row's place in the tile.
Source: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.errors import NotDeterministic

TILES = (8, 16, 32, 64, 128, 256)  # rows; products of more than 256 are no faster
PROBES = 2  # rows by which tiles are compared
FILLED = 0.75  # the share of a tile that rows must fill for it to be taken: one call instead of two
ALIGNMENT = 64  # bytes, of memory that torch allocates

Product = Callable[[Tensor, Tensor | None], Tensor]


class TiledProduct(nn.Module):
    """Computes product(x, bias) in tiles of rows. tiles: the sizes that `find_tiles` has found."""

    def __init__(self, product: Product, tiles: Sequence[int]) -> None:
        super().__init__()
        self.product = product
        self.tiles = tuple(tiles)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]."""
        if len(x) == 0:
            return self.product(x, bias)
        parts = [self.product(_tile(x, *span), bias) for span in cut_rows(len(x), self.tiles)]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return padded[: len(x)]


def cut_rows(num_rows: int, tiles: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut num_rows rows into tiles; yield each one's first row and its size. tiles: the sizes, ascending."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        size = next((tile for tile in tiles if FILLED * tile <= left <= tile), None)
        if size is None:
            size = max((tile for tile in tiles if tile <= left), default=tiles[0])
        yield start, size
        start += size


def find_tiles(
    product: Product, in_features: int, dtype: torch.dtype, bias: Tensor | None
) -> list[int]:
    """Return the sizes of TILES in which a row has the same bits at every place as in the smallest size.

    It tries random rows. Rounding to bfloat16 hides most differences between sums; a bias that subtracts the row's
    product makes them show. Raises NotDeterministic if a row's place matters even in the smallest size.
    """
    generator = torch.Generator().manual_seed(0)
    tiles = list(TILES)
    for row in torch.randn(PROBES, in_features, generator=generator).to(dtype):
        negative_product = -product(row.repeat(TILES[0], 1), None)[0]
        for added in (bias, negative_product):
            expected = product(row.repeat(TILES[0], 1), added)[0]
            agreeing = []
            for size in tiles:
                products = product(row.repeat(size, 1), added)
                if bool((products == expected).all()):
                    agreeing.append(size)
            tiles = agreeing
    if TILES[0] not in tiles:
        raise NotDeterministic(
            f"this processor's products of {in_features} numbers in {str(dtype).removeprefix('torch.')} "
            "depend on a row's place; try another dtype"
        )
    return tiles


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply function, [1, n] -> [1, m], to each row of x [rows, n]. Each row is first copied into memory of its own."""
    if len(x) == 0:
        return function(x)
    return torch.cat([function(row.clone()) for row in torch.split(x, 1)])


def _tile(x: Tensor, start: int, size: int) -> Tensor:
    """Return `size` rows from `start` on, with zeros after the last row. They are a copy unless whole and aligned."""
    rows = x[start : start + size]
    if len(rows) == size and rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    tile = x.new_zeros(size, x.shape[1])
    tile[: len(rows)] = rows
    return tile
