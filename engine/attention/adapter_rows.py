"""AdapterRows: which rows of a step have which adapter, sorted once for all layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class Product(Protocol):
    """The products that an adapter adds to one layer."""

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add the product with x [rows, in] to y [rows, out], in place."""


class AdapterGroup(NamedTuple):
    """The rows of a step that have one adapter.

    products: by layer; the adapter leaves all other layers alone. rows: a slice of the batch, or [rows] int64.
    """

    products: Mapping[nn.Module, Product]
    rows: slice | Tensor


class AdapterRows(Protocol):
    """The rows of a step with their adapters."""

    def add_to(self, y: Tensor, layer: nn.Module, x: Tensor) -> None:
        """Add each adapter's product to its rows of y = layer(x), in place."""


@dataclass(frozen=True)
class GroupedRows:
    """The groups of a step's rows, whose products are added one group after another.

    Rows outside all groups have no adapter.
    """

    groups: tuple[AdapterGroup, ...]

    def add_to(self, y: Tensor, layer: nn.Module, x: Tensor) -> None:
        """Add each adapter's product to its rows of y = layer(x), in place."""
        for products, rows in self.groups:
            product = products.get(layer)
            if product is None:
                continue
            if isinstance(rows, slice):
                product.add_to(y[rows], x[rows])
            else:
                adapted = y.index_select(0, rows)
                product.add_to(adapted, x.index_select(0, rows))
                y.index_copy_(0, rows, adapted)
