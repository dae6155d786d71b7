"""Makes a decoder whose rows have the same bits in a batch of any size, or says why it cannot."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.errors import NotDeterministic
from engine.layers.embedding import ParallelLMHead
from engine.layers.int8 import Int8Product
from engine.layers.linear import ReplicatedLinear
from engine.layers.onednn import linear
from engine.layers.parallel import TensorParallel
from engine.layers.row_tiles import Product, TiledProduct, find_tiles
from engine.models.decoder import DecoderForCausalLM
from engine.models.decoder_config import DecoderConfig

# Two numbers have one sum in either order. With more, the order depends on their place in a message.
MOST_RANKS = 2


def check_deterministic(name: str, decoder: DecoderConfig | None, tp: TensorParallel) -> None:
    """Raise NotDeterministic if this model or number of ranks is not known to be deterministic.

    decoder: None for a model that runs through transformers.
    """
    problem = None
    if decoder is None:
        problem = (
            f"{name} runs through transformers, whose layers are torch's own; use a native model"
        )
    elif any(layer.experts for layer in decoder.layers):
        problem = f"{name} is a mixture of experts, and only dense models can be deterministic"
    elif tp.size > MOST_RANKS:
        problem = f"tensor_parallel_size={tp.size}, and sums over more than {MOST_RANKS} ranks have no fixed order"
    elif tp.size > 1 and decoder.flags.qk_norm == "whole":
        problem = (
            f"{name} normalises over ranks, so it is deterministic only with tensor_parallel_size=1"
        )
    if problem is not None:
        raise NotDeterministic(
            f"deterministic=True cannot be used: {problem}, or leave deterministic out"
        )


@torch.inference_mode()
def make_deterministic(model: DecoderForCausalLM, dtype: torch.dtype) -> None:
    """Make the loaded model compute its matrix products in tiles, whose bits do not depend on the batch's size.

    dtype: the model's. Raises NotDeterministic.
    """
    known: dict[tuple[object, ...], Sequence[int]] = {}

    def tiled(product: Product, shape: tuple[int, int], bias: Tensor | None) -> TiledProduct:
        """Return the product in tiles, which are found once for each shape (in, out)."""
        kind = (shape, isinstance(product, Int8Product), bias is None)
        if kind not in known:
            known[kind] = find_tiles(product, shape[0], dtype, bias)
        return TiledProduct(product, known[kind])

    for module in model.modules():
        if isinstance(module, ReplicatedLinear) and not isinstance(module.instead, TiledProduct):
            product = module.instead or partial(_multiply, module.weight)
            module.instead = tiled(product, (module.in_features, module.out_features), module.bias)
        elif isinstance(module, ParallelLMHead):
            weight = module.weight
            module.instead = tiled(partial(_multiply, weight), (weight.shape[1], len(weight)), None)
    model.is_deterministic = True


def _multiply(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias)
