"""LoadedAdapters: the adapters on the device, and the rows of a step that use each."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.attention.adapter_rows import AdapterGroup, AdapterRows, GroupedRows, Product
from engine.attention.layer_kernels import LayerKernels
from engine.checkpoint.adapter_folder import Adapter
from engine.kernels.adapter_tables import MOST_RANKS
from engine.kernels.upload import upload
from engine.layers.lora import LowRank
from engine.layers.lora_tables import LowRankTables
from engine.run.forward.adapter_loader import AdapterLoader, adapted_layers
from engine.schedule.sequence import NO_ADAPTER
from engine.schedule.step_batch import StepBatch

logger = logging.getLogger(__name__)


class LoadedAdapters:
    """Owns the adapters of a model, by number.

    tables: of the adapters, where kernels multiply with all of them at once; None where they multiply one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        most: int,
        kernels: LayerKernels | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """most: adapters that are loaded at a time; 0 if there are none."""
        self._model = model
        self._device = device
        self._dtype = dtype
        self._products: dict[int, dict[nn.Module, LowRank]] = {}
        self.tables: LowRankTables | None = None
        if most and kernels is not None and kernels.add_low_rank is not None:
            self.tables = LowRankTables(adapted_layers(model).values(), most, kernels, device)

    def load(self, number: int, adapter: Adapter) -> None:
        """Load an adapter in place of the one that has the number. Raises AdapterRefused."""
        if self.tables is not None:
            self.tables.drop(number)
        self._products.pop(number, None)  # the memory is free before the next one takes it
        products = AdapterLoader(self._model, self._device, self._dtype).load(adapter)
        self._products[number] = products
        if self.tables is None:
            return
        self.tables.put(number, products)
        if not self.tables.hold(np.array([number])):
            logger.warning(
                "adapter %r has more than %d ranks in a layer, or changes a part of a layer twice: steps with it run "
                "without CUDA graphs, one adapter after another",
                adapter.name,
                MOST_RANKS,
            )

    def rows(self, step: StepBatch) -> AdapterRows:
        """Sort a step's rows by adapter."""
        if self.tables is None or not self.tables.hold(step.adapters):
            return adapter_rows(step, self._products, self._device)
        of_seq = np.where(step.adapters == NO_ADAPTER, self.tables.none, step.adapters)
        (of_row,) = upload([np.repeat(of_seq, step.query_lens)], self._device)
        return self.tables.sort(of_row)


def adapter_rows(
    step: StepBatch, loaded: Mapping[int, Mapping[nn.Module, Product]], device: torch.device
) -> GroupedRows:
    """Sort a step's rows by adapter. loaded: each adapter's products, by the adapter's number in a step."""
    of_row = np.repeat(step.adapters, step.query_lens)
    order = np.argsort(of_row, kind="stable")
    numbers, starts = np.unique(of_row[order], return_index=True)
    rows_of_number = dict(zip(numbers.tolist(), np.split(order, starts[1:]), strict=True))
    rows_of_number.pop(NO_ADAPTER, None)
    places = {number: _as_range(rows) for number, rows in rows_of_number.items()}
    scattered = [rows for number, rows in rows_of_number.items() if places[number] is None]
    uploaded = iter(upload(scattered, device))  # one for each None in `places`, in the same order
    return GroupedRows(
        tuple(
            AdapterGroup(loaded[number], next(uploaded) if place is None else place)
            for number, place in places.items()
        )
    )


def _as_range(rows: NDArray[np.int64]) -> slice | None:
    """Return ascending rows as a range; None if they have gaps."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else None
