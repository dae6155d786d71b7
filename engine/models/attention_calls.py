"""The calls of a transformers model's attention function, and the paged attention that answers them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.attention.base import ForwardBatch, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import KVCache
from engine.attention.torch_backend import TorchMetadata
from engine.errors import UnsupportedModel

# The attribute of a module that holds what answers its attention calls.
PLACE = "tokenmill_attention"
NUM_RECORDED_TOKENS = 8
FAR = 1 << 20  # a position beyond every window and chunk

# Options that change attention and are built, and options that do not change it.
BUILT = frozenset({"alibi", "block_indices", "indices", "sliding_window", "softcap", "s_aux"})
IDLE = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)

# Window and chunk of a mask, as AttentionFeatures have them.
MaskSpan = tuple[int | None, int | None]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    query: [1, heads, tokens, dim].  key, value: [1, kv_heads, tokens, dim]; values may have another dim.
    mask: what the model's own mask function made, or None.  options: every other argument.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    options: Mapping[str, Any]


def answer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Pass a call of a model's attention to the function for its module.

    Returns ([1, tokens, heads, value dim], None for the attention weights).
    """
    call = AttentionCall(module, query, key, value, attention_mask, scaling, options)
    compute: Callable[[AttentionCall], Tensor] | None = module.__dict__.get(PLACE)
    if compute is None:
        raise UnsupportedModel(
            f"{type(module).__name__} computes attention now, but did not when the model was loaded"
        )
    return compute(call), None


def describe_mask(
    *, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any
) -> Tensor:
    """Make a mask for the recorded tokens, [1, 1, tokens, tokens]; its attribute `span` says how far a token sees.

    `span` is (window, chunk). For a mask that is neither causal, nor a window, nor chunks, it is an UnsupportedModel
    error, which is raised if the model attends with the mask.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        seen = mask_function(zero, zero, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        return seen.expand(1, 1, len(queries), len(keys))

    def first_seen(query: int) -> int:
        # The last of these keys is the token after the query.
        row = sees(
            torch.tensor([query], device=device), torch.arange(query + 2, device=device)
        ).flatten()
        first = int(row.int().argmax())
        if row[-1] or not row[first:-1].all():
            raise UnsupportedModel(
                "its mask lets a token see later tokens, or hides some between those that it sees"
            )
        return first

    tokens = torch.arange(NUM_RECORDED_TOKENS, device=device)
    mask = sees(tokens, tokens).clone()
    try:
        with _AllTokensAlike():
            span: MaskSpan | UnsupportedModel = _reach(first_seen)
    except UnsupportedModel as error:
        span = error
    mask.span = span  # type: ignore[attr-defined]  # it travels through the model's code
    return mask


class _AllTokensAlike(TorchFunctionMode):
    """Lets a mask be asked about positions behind the last token.

    A mask function may look up each position in a tensor, such as the image that a token belongs to. Positions behind
    that tensor's end get its last value.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            function is Tensor.__getitem__
            and isinstance(args[1], tuple)
            and all(isinstance(i, Tensor) for i in args[1])
        ):
            values, indices = args
            clamped = tuple(
                index.clamp(max=length - 1)
                for index, length in zip(indices, values.shape, strict=False)
            )
            args = (values, clamped)
        return function(*args, **(kwargs or {}))


def _reach(first_seen: Callable[[int], int]) -> MaskSpan:
    start = first_seen(FAR)
    if start and first_seen(FAR + 1) == start + 1:
        return FAR + 1 - start, None
    return None, start - first_seen(start - 1) if start else None


def features_of(call: AttentionCall, max_positions: int) -> AttentionFeatures:
    """Return the attention that a recorded call asks for. Raises UnsupportedModel for one that is not built.

    max_positions: the most tokens of a sequence. A window or chunk that holds all of them is left out.
    """
    _refuse_unbuilt(call)
    if call.options.get("is_causal") is False or not getattr(call.module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal")
    sinks = call.options.get("s_aux")
    if sinks is not None and sinks.shape != call.query.shape[1:2]:
        raise UnsupportedModel(
            f"its sinks are of shape {list(sinks.shape)}; one for each head is built"
        )
    bias = call.options.get("alibi")
    if bias is not None and bias.numel() != call.query.shape[1] * bias.shape[-1]:
        raise UnsupportedModel(
            f"its bias is of shape {list(bias.shape)}; a slope for each head is built"
        )
    head_dim = call.query.shape[-1]
    is_indexed = chosen_by(call) is not None
    window, chunk = (span if span and span < max_positions else None for span in _span_of(call))
    if is_indexed and (window or chunk or bias is not None):
        raise UnsupportedModel(
            "an index chooses tokens, and there is a window, a chunk or a slope too: that is not built"
        )
    return AttentionFeatures(
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=max(head_dim, call.value.shape[-1]),
        scale=head_dim**-0.5 if call.scaling is None else float(call.scaling),
        window=window,
        chunk=chunk,
        soft_cap=call.options.get("softcap"),
        has_sinks=sinks is not None,
        has_slopes=bias is not None,
        is_indexed=is_indexed,
    )


def chosen_by(call: AttentionCall) -> Tensor | None:
    """Return the positions of the tokens that each query attends to, [1 or kv_heads, tokens, chosen]; None for all."""
    blocks: Tensor | None = call.options.get("block_indices")
    if blocks is None:
        return call.options.get("indices")
    size: int = call.module.indexer.block_size  # type: ignore[union-attr, assignment]  # such classes have it
    return (blocks[0][..., None] * size + torch.arange(size, device=blocks.device)).flatten(-2)


def _refuse_unbuilt(call: AttentionCall) -> None:
    """Raise UnsupportedModel if the call sets an option that is not built."""
    set_options = {
        name for name, value in call.options.items() if value is not None and value is not False
    }
    unknown = set_options - BUILT - IDLE - {"is_causal"}
    if unknown:
        raise UnsupportedModel(
            f"its attention takes {', '.join(sorted(unknown))}, which is not built"
        )


def _span_of(call: AttentionCall) -> MaskSpan:
    """Return the window and the chunk of a call's attention. Raises UnsupportedModel for a mask of another kind."""
    span: MaskSpan | UnsupportedModel | None = getattr(call.mask, "span", None)
    if isinstance(span, UnsupportedModel):
        raise span
    if span is not None:
        return span
    window = call.options.get("sliding_window")
    if call.mask is not None and not call.mask.is_meta:
        seen = call.mask if call.mask.dtype == torch.bool else call.mask == 0
        ones = torch.ones(
            call.query.shape[2], call.key.shape[2], dtype=torch.bool, device=seen.device
        )
        expected = ones.tril() & ones.triu(1 - (window or len(ones)))
        if seen.shape[-2:] != expected.shape or not (seen == expected).all():
            raise UnsupportedModel("it builds an attention mask or bias of its own")
    return window, None


def _slopes_of(call: AttentionCall) -> Tensor | None:
    """Return, for each head, how much a call's bias on scores grows from token to token; None without a bias."""
    if call.options.get("alibi") is None:
        return None
    bias: Tensor = call.options["alibi"].float().reshape(call.query.shape[1], -1)
    # measured over the longest distance, as biases are rounded to the model's dtype
    return ((bias[:, -1] - bias[:, 0]) / (bias.shape[-1] - 1)).contiguous()


class PagedAttention:
    """Answers the attention calls of each forward pass, which must come in their recorded order.

    features: of each call.  only_windows: a picture's tokens see each other only in layers with a window.
    layer_numbers: the number of each call's layer among the model's layers.
    """

    only_windows = False

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        backend: KernelBackend,
        max_positions: int,
        dtype: torch.dtype,
        chosen: Callable[[], Tensor | None] | None = None,
    ) -> None:
        """Raise UnsupportedModel, or AttentionRefused if the backend cannot compute such an attention.

        chosen: returns the tokens to attend to, for a model that chooses tokens but gives its attention only a mask.
        """
        self._modules = [call.module for call in calls]
        self.layer_numbers = [
            getattr(module, "layer_idx", index) for index, module in enumerate(self._modules)
        ]
        self._slopes = [_slopes_of(call) for call in calls]
        self._backend = backend
        self.features = [features_of(call, max_positions) for call in calls]
        self._chosen = chosen
        if chosen is not None:
            self.features = [
                replace(layer_features, is_indexed=True) for layer_features in self.features
            ]
        for layer_features in self.features:
            backend.check_features(layer_features)
        self._dtype = dtype
        self._pass: tuple[ForwardBatch, KVCache] | None = None
        self._next = 0

    def begin(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Answer calls from this batch and cache from now on."""
        self._pass = (batch, cache)
        self._next = 0
        for module in self._modules:
            module.__dict__[PLACE] = self

    def end(self) -> None:
        """Answer no calls from now on."""
        self._pass = None
        for module in self._modules:
            module.__dict__.pop(PLACE, None)

    @property
    def positions(self) -> Tensor | None:
        """The positions of the batch's rows, [rows]; None outside a pass."""
        return None if self._pass is None else self._pass[0].positions

    def __call__(self, call: AttentionCall) -> Tensor:
        index = self._next
        self._next += 1
        if (
            self._pass is None
            or index >= len(self._modules)
            or call.module is not self._modules[index]
        ):
            raise UnsupportedModel(
                "its layers attend in another order than when the model was loaded"
            )
        _refuse_unbuilt(call)  # a model may set some options only for long sequences
        batch, cache = self._pass
        features = self.features[index]
        layer_cache = cache.layers[index]
        head_dim = features.head_dim
        query, key, value = (
            _rows(x, head_dim, self._dtype) for x in (call.query, call.key, call.value)
        )
        if len(key) != len(batch.slot_mapping):
            raise UnsupportedModel("it does not attend to exactly one key for each token")
        sinks = call.options.get("s_aux")
        sinks = None if sinks is None else sinks.float().contiguous()
        self._backend.store(key, value, layer_cache, batch.slot_mapping)
        metadata = batch.attention
        pictures = batch.pictures
        is_causal = self.only_windows and features.window is None
        if pictures is not None and pictures.attention is not None and not is_causal:
            metadata = pictures.attention
        chosen = chosen_by(call) if self._chosen is None else self._chosen()
        if chosen is not None:
            assert isinstance(metadata, TorchMetadata), "no other backend takes such features"
            metadata = replace(metadata, chosen=chosen)
        attended = self._backend.forward(
            query, layer_cache, metadata, features, sinks, self._slopes[index]
        )
        heads = attended.view(1, len(query), -1, head_dim)[..., : call.value.shape[-1]]
        answered: Tensor = heads.to(call.value.dtype).contiguous()
        return answered


def _rows(x: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Turn [1, heads, tokens, dim] into [tokens, heads, head_dim]; narrower heads end in zeros."""
    rows = x[0].transpose(0, 1).to(dtype)
    if rows.shape[-1] < head_dim:
        return F.pad(rows, (0, head_dim - rows.shape[-1]))
    return rows.contiguous()
