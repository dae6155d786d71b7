"""Modules of a model that choose the tokens to attend to, by a key that they keep of each token.

Each module is called for one sequence of a batch at a time, with the index keys of the whole sequence. It names tokens
by their places in the sequence.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from engine.attention.base import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.attention.torch_backend import Span, TorchMetadata

NONE = -1  # the place of no token
SCORES_AT_ONCE = 1 << 20  # of each head of an index: modules write out all of them


class Indexers:
    """The wrapped indexers of a model. chosen: the last choice.

    Until the first batch begins, the model runs only to try out its positions. Each indexer then computes one choice
    and repeats it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._step: tuple[ForwardBatch, KVCache] | None = None
        self._span: Span | None = None
        self._tried: dict[Any, Tensor] | None = {}
        self.chosen: Tensor | None = None
        for module in modules:
            module.forward = partial(self._choose, module.forward)

    def begin(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Choose for each sequence of this batch from now on."""
        self._step = (batch, cache)
        self._tried = None

    def end(self) -> None:
        """Let the modules compute whole inputs from now on, as they would without a batch."""
        self._step = None
        self._tried = None

    def all_keys(self, keys: Tensor, layer: int) -> Tensor:
        """Store a sequence's new index keys, [1, tokens, dim]; return those of its whole context."""
        if self._step is None or self._span is None:
            return keys
        batch, cache = self._step
        span = self._span
        assert cache.index is not None, "a model with index keys has a pool of them"
        ((_, stored),) = cache.index.layers[layer]  # a layer has one kind of index keys
        stored[batch.slot_mapping[span.start : span.end]] = keys[0]
        blocks = stored.view(-1, cache.block_size, *stored.shape[1:])
        num_blocks = -(-span.context_len // cache.block_size)
        known: Tensor = blocks[span.block_ids[:num_blocks]].flatten(0, 1)[None, : span.context_len]
        return known

    def _choose(self, compute: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
        if self._tried is not None:
            if compute not in self._tried:
                self._tried[compute] = compute(*args, **options)
            return self._tried[compute]
        if self._step is None:
            return compute(*args, **options)
        metadata = self._step[0].attention
        assert isinstance(metadata, TorchMetadata), "no other backend takes such features"
        num_rows = metadata.spans[-1].end
        chosen = []
        for span in metadata.spans:
            pieces = list(span.pieces(max(1, SCORES_AT_ONCE // span.context_len)))
            # the last piece comes first; a piece has to store its keys before later ones read them
            for piece in reversed(pieces):
                self._span = piece  # for `all_keys`, which the module calls
                cut = partial(_part, piece, num_rows)
                piece_args, piece_options = tree_map(cut, (args, options))
                chosen.append(compute(*piece_args, **piece_options))
        self._span = None
        width = max(places.shape[-1] for places in chosen)
        self.chosen = torch.cat(
            [F.pad(places, (0, width - places.shape[-1]), value=NONE) for places in chosen], dim=-2
        )
        return self.chosen


def _part(span: Span, num_rows: int, x: Any) -> Any:
    """Cut the span's rows out of an argument that has a row for each token; return other arguments as they are.

    A mask of a single element, which hides nothing, becomes the span's causal mask.
    """
    if not isinstance(x, Tensor):
        return x
    if x.dtype == torch.bool and x.ndim > 2 and x.numel() == 1:
        tokens = torch.arange(span.context_len, device=x.device)
        seen = tokens <= tokens[span.start - span.end :, None]
        return seen.view(*(1,) * (x.ndim - 2), *seen.shape)
    return x[:, span.start : span.end] if x.shape[:2] == (1, num_rows) else x
