"""Loads an adapter for a model's layers, or for one rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.checkpoint.adapter_folder import CONFIG, WEIGHTS, Adapter, scale_of
from engine.checkpoint.model_config import read_json
from engine.checkpoint.weights import CheckpointTensor, open_tensors
from engine.errors import AdapterRefused, ConfigError
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.lora import Block, LowRank
from engine.layers.lora_tables import Linear
from engine.layers.parallel import Share
from engine.models.load import ModelPath
from engine.models.loader import BODY, PACKED

#: What PEFT writes before a module's name.
PREFIX = "base_model.model."


def check_takes_adapters(folder: str, path: ModelPath) -> None:
    """Raise ConfigError for models that adapters are not built for. folder: of the adapters."""
    if path.decoder is None:
        raise ConfigError(
            f"adapters={folder!r} cannot be used: this model {path}, and they are built for native models; leave "
            "it unset"
        )


def adapted_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the layers that an adapter may change, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


class AdapterLoader:
    """Reads adapters into the layout and the dtype of a model's layers."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._layers = adapted_layers(model)

    def load(self, adapter: Adapter) -> dict[nn.Module, LowRank]:
        """Read an adapter. Raises AdapterRefused if it does not fit the model."""
        try:
            values = read_json(adapter.folder / CONFIG)
            with open_tensors([adapter.folder / WEIGHTS]) as tensors:
                places = self._places(_pairs(tensors, values))
                return {layer: self._low_rank(layer, found) for layer, found in places.items()}
        except _Misfit as error:
            raise AdapterRefused(adapter.name, str(error)) from error
        except (ConfigError, OSError) as error:
            raise AdapterRefused(adapter.name, f"its files cannot be read: {error}") from error
        except torch.OutOfMemoryError as error:
            raise AdapterRefused(
                adapter.name,
                "the device's memory ran out; lower memory_utilization or max_adapters",
            ) from error

    def _places(self, pairs: Iterator[_Pair]) -> dict[Linear, dict[str | None, _Pair]]:
        """Group the pairs by layer and shard. The shard None stands for a pair for all shards of a stacked layer."""
        places: dict[Linear, dict[str | None, _Pair]] = {}
        for pair in pairs:
            layer, shard = self._find(pair.module)
            pairs_of_layer = places.setdefault(layer, {})
            if shard in pairs_of_layer:
                raise _named_twice(pair.module)
            pairs_of_layer[shard] = pair
        return places

    def _find(self, module: str) -> tuple[Linear, str | None]:
        for name in (module, BODY + module):  # models for embeddings have no prefix
            parents, _, last = name.rpartition(".")
            stacked, shard = PACKED.get(last, (last, None))
            layer = self._layers.get(f"{parents}.{stacked}")
            if layer is not None:
                return layer, shard
        raise _Misfit(f"it changes {module!r}, and this model has no such linear layer")

    def _low_rank(self, layer: Linear, pairs: dict[str | None, _Pair]) -> LowRank:
        """Stack the A of a layer's pairs, and make a block of B for each range of its output rows."""
        parts: list[Tensor] = []
        blocks: list[Block] = []
        num_ranks = 0
        for shard, pair in pairs.items():
            ranks = slice(num_ranks, num_ranks + pair.rank)
            num_ranks += pair.rank
            if isinstance(layer, RowParallelLinear):
                pair.check(layer.columns.total, layer.out_features)
                parts.append(self._placed(layer.columns.read(pair.a, 1), pair))
                blocks.append(
                    self._block(slice(0, layer.out_features), ranks, pair.b.whole(), pair)
                )
                continue
            total = sum(share.total for share in layer.rows.values())
            pair.check(layer.in_features, total if shard is None else layer.rows[shard].total)
            parts.append(self._placed(pair.a.whole(), pair))
            for rows, share in _rows_of(layer, shard):
                b = pair.b.read(0, share.start, share.length)
                blocks.append(self._block(rows, ranks, b, pair))
        return LowRank(torch.cat(parts), tuple(blocks))

    def _block(self, rows: slice, ranks: slice, b: Tensor, pair: _Pair) -> Block:
        return Block(rows, ranks, self._placed(b, pair), pair.scale)

    def _placed(self, tensor: Tensor, pair: _Pair) -> Tensor:
        """Bring one of a pair's matrices to the device. Raises _Misfit if it is not finite there."""
        placed = tensor.to(self._dtype)
        if not placed.isfinite().all():
            dtype = str(self._dtype).removeprefix("torch.")
            raise _Misfit(f"{pair.module!r} has numbers that are NaN or infinite in {dtype}")
        return placed.to(self._device)


class _Misfit(Exception):
    """An adapter does not fit the model."""


def _named_twice(module: str) -> _Misfit:
    """Return the error for a module whose name stands there with and without a prefix."""
    return _Misfit(
        f"{WEIGHTS} holds {module!r} twice, with and without a prefix: save the adapter again"
    )


class _Pair:
    """The matrices A [rank, in] and B [out, rank] for one of the checkpoint's modules, and their factor."""

    def __init__(
        self, module: str, a: CheckpointTensor, b: CheckpointTensor, values: Mapping[str, object]
    ) -> None:
        """values: the contents of adapter_config.json."""
        self.module = module
        self.a = a
        self.b = b
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise _Misfit(
                f"{module!r}: lora_A has the shape {list(a.shape)} and lora_B {list(b.shape)}, "
                "expected [rank, in] and [out, rank]"
            )
        self.rank = a.shape[0]
        self.scale = scale_of(values, module, self.rank)

    def check(self, num_in: int, num_out: int) -> None:
        """Raise _Misfit unless the pair is for a matrix [num_out, num_in]."""
        shape = [self.b.shape[0], self.a.shape[1]]
        if shape != [num_out, num_in]:
            raise _Misfit(
                f"{self.module!r}: it is for a weight of shape {shape}, and this model's has "
                f"{[num_out, num_in]}; was it trained on another model?"
            )


def _pairs(
    tensors: Mapping[str, CheckpointTensor], values: Mapping[str, object]
) -> Iterator[_Pair]:
    """Pair an adapter's tensors by module. Raises _Misfit if one has no partner, or a module is there twice."""
    halves: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in tensors.items():
        module, _, half = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        halves_of_module = halves.setdefault(module, {})
        if half in halves_of_module:
            raise _named_twice(module)
        halves_of_module[half] = tensor
    if not halves:
        raise _Misfit(f"{WEIGHTS} holds no tensors")
    for module, by_half in halves.items():
        if by_half.keys() != {"lora_A", "lora_B"}:
            raise _Misfit(f"{module!r} has {' and '.join(by_half)}, and needs lora_A and lora_B")
        yield _Pair(module, by_half["lora_A"], by_half["lora_B"], values)


def _rows_of(layer: ColumnParallelLinear, shard: str | None) -> Iterator[tuple[slice, Share]]:
    """Yield ranges of this rank's output rows, each with its share of the rows of B.

    shard: the one that B is for; None if B is for all shards of the layer, stacked.
    """
    start = stacked = 0
    for name, share in layer.rows.items():
        rows = slice(start, start + share.length)
        if shard is None:
            yield rows, Share(stacked + share.start, share.length, share.total)
        elif name == shard:
            yield rows, share
        start += share.length
        stacked += share.total
