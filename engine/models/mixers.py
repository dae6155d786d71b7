"""The mixers of a transformers model: layers that keep a state of each sequence beside the KV cache.

A module is a mixer if it is the innermost one that runs when a state of the cache is read or set. A mixer gets the
batch's rows sequence by sequence, with transformers' own cache layer. The layer is filled from the pool of states
before the mixer runs, and the new states are stored in the pool afterwards.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.cache_utils import Cache, LinearAttentionLayer

from engine.attention.base import ForwardBatch
from engine.attention.indexers import Indexers
from engine.attention.kv_cache import KVCache
from engine.attention.state_pool import StatePart, StateParts, StatePool, StateShape
from engine.errors import UnsupportedModel

MAX_STATES = 4  # convolutions of one layer
KINDS = ("conv_states", "recurrent_states")
WITH_HEADS = 4  # dimensions of a state of Mamba-1 with heads
SCAN = "mamba_selective_scan"  # transformers' function, which cannot begin at a state


class StateCache(Cache):
    """The cache that transformers' modules get, which holds only states of mixers, not keys and values.

    Its layers hold the states of the part of a batch that is being computed. Keys and values pass through unchanged.

    mixers and indexers: the modules that read or write the cache while `recording`. index_keys: the shape of a token's
    index keys, by layer. all_index_keys: takes new index keys and a layer, and returns the keys of all tokens.
    """

    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers: Any = _Layers(self.update_indexer)
        self._running: list[nn.Module] = []  # while recording; the innermost module is last
        self.mixers: dict[nn.Module, None] = {}
        self.indexers: dict[nn.Module, None] = {}
        self.index_keys: dict[int, StateShape] = {}
        self.all_index_keys: Callable[[Tensor, int], Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Note the indexer that calls, and return the keys of all tokens, or only the new ones while recording."""
        keys = indexer_key_states
        if self._running:
            self.indexers[self._running[-1]] = None
        if self.all_index_keys is None:
            self.index_keys[layer_idx] = StateShape(
                layer_idx, "index_keys", 0, tuple(keys.shape[2:]), keys.dtype
            )
        else:
            keys = self.all_index_keys(keys, layer_idx)
        # The layer is asked only for the number of its keys, so the keys here are empty.
        self.layers[layer_idx].keys = keys.new_empty(*keys.shape[:2], 0)
        return keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_conv_state(self, *args: Any, **options: Any) -> Tensor | None:
        self._note()
        return super().get_conv_state(*args, **options)

    def get_recurrent_state(self, *args: Any, **options: Any) -> Tensor | None:
        self._note()
        return super().get_recurrent_state(*args, **options)

    def update_conv_state(self, *args: Any, **options: Any) -> Tensor:
        self._note()
        return super().update_conv_state(*args, **options)

    def update_recurrent_state(self, *args: Any, **options: Any) -> Tensor:
        self._note()
        return super().update_recurrent_state(*args, **options)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # MiniMax asks so
        self._note()
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.layers[layer_idx].recurrent_states[0] = linear_cache

    def _note(self) -> None:
        if self._running:
            self.mixers[self._running[-1]] = None

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Note the mixers of a model that runs within the block."""

        def leave(*_: Any) -> None:
            self._running.pop()  # returns nothing: a value would replace the module's output

        hooks = [
            hook
            for module in model.modules()
            for hook in (
                module.register_forward_pre_hook(lambda module, _: self._running.append(module)),
                module.register_forward_hook(leave),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def shapes(self) -> list[StateShape]:
        """Return the shapes of the states that the layers hold, without the batch's dimension."""
        return [
            StateShape(index, kind, i, tuple(state.shape[1:]), state.dtype)
            for index, layer in self.layers.items()
            for kind in KINDS
            for i, state in getattr(layer, kind).items()
            if state is not None
        ]


class _Layer(LinearAttentionLayer):
    """A cache's layer.

    update_index: MiniMax M3 calls it with its new index keys. keys: a tensor with an entry for each index key, whose
    number GLM 5 Next asks for.
    """

    keys: Tensor

    def __init__(self, update_index: Callable[[Tensor], Tensor]) -> None:
        super().__init__(MAX_STATES)
        self.update_index = update_index

    def get_seq_length(self) -> int:
        return self.keys.shape[1]


class _Layers(dict[int, LinearAttentionLayer]):
    """A cache's layers by index. A layer is made when it is first looked up; `fill` then gives it its states."""

    fill: Callable[[int, LinearAttentionLayer], None] | None = None

    def __init__(self, update_indexer: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self._update_indexer = update_indexer

    def __missing__(self, index: int) -> LinearAttentionLayer:
        def update_index(keys: Tensor) -> Tensor:
            return self._update_indexer(keys[:, 0], index)[:, None]  # without the heads' dimension

        layer = _Layer(update_index)
        self[index] = layer
        if self.fill is not None:
            self.fill(index, layer)
        return layer


class Mixers:
    """The mixers and indexers of a model, wrapped so that they compute from the engine's cache.

    states: the shapes of a sequence's states, in all layers. index_keys: the shapes of a token's index keys.
    """

    def __init__(self, cache: StateCache, argument: str) -> None:
        """cache: what the model was given while it was recorded. argument: the name of the body's cache argument."""
        self.states = cache.shapes()
        self._cache = cache
        self._argument = argument
        self.index_keys = tuple(cache.index_keys.values())
        self._step: tuple[StateParts, StatePool] | None = None
        self._indexers = Indexers(cache.indexers)
        cache.all_index_keys = self._indexers.all_keys
        cache.layers.clear()
        for mixer in cache.mixers:
            self._wrap(mixer)

    def chosen(self) -> Tensor | None:
        """Return the tokens that an indexer chose last in this batch."""
        return self._indexers.chosen

    def begin(self, batch: ForwardBatch, cache: KVCache) -> dict[str, Any]:
        """Compute this batch from now on; return the arguments that the body needs for it."""
        self._indexers.begin(batch, cache)
        if self.states:
            assert isinstance(batch.states, StateParts), "a batch lacks the parts for its states"
            assert cache.states is not None, "a cache lacks the pool of states"
            self._step = batch.states, cache.states
        return {self._argument: self._cache}

    def end(self) -> None:
        """Leave the batch: from now on the mixers compute without stored states."""
        self._step = None
        self._indexers.end()
        self._cache.layers.clear()

    def _wrap(self, mixer: nn.Module) -> None:
        """Let the mixer compute the decodes of a batch together, and each other part from its own states."""
        compute = _with_scan(mixer, self._cache)

        def forward(*args: Any, **options: Any) -> Any:
            if self._step is None:
                return compute(*args, **options)
            parts, pool = self._step

            # The first tensor is [1, rows, ...].
            values, _form = tree_flatten((args, options))
            num_rows = next(len(value[0]) for value in values if isinstance(value, Tensor))
            rows = _Rows(num_rows)
            num_decodes = len(parts.decodes)
            if num_decodes:
                self._fill(pool, parts.decodes)
                decode_args, decode_options = rows.cut((args, options), 0, num_decodes, by_row=True)
                rows.take(compute(*decode_args, **decode_options), 0, num_decodes, by_row=True)
                self._store(pool, parts.decodes)
            for part in parts.others:
                self._compute_part(compute, pool, part, rows, (args, options))
            return rows.joined()

        mixer.forward = forward

    def _compute_part(
        self, compute: Any, pool: StatePool, part: StatePart, rows: "_Rows", arguments: Any
    ) -> None:
        """Compute one sequence's rows from its states in the pool, and store the new states."""
        self._fill(pool, part.source)
        args, options = rows.cut(arguments, part.start, part.end)
        rows.take(compute(*args, **options), part.start, part.end)
        self._store(pool, part.target)
        if part.saved >= 0:
            self._store(pool, part.saved)

    def _fill(self, pool: StatePool, rows: Tensor | int) -> None:
        """Let the cache's layers hold copies of these rows of the pool. A layer is filled when it is first looked up.

        rows: one for each sequence, or the row of a single sequence; -1 leaves the layers without states.
        """

        def fill(index: int, layer: Any) -> None:
            for state, stored in pool.layers.get(index, ()):
                values = (
                    stored[rows : rows + 1].clone()
                    if isinstance(rows, int)
                    else stored.index_select(0, rows)
                )
                getattr(layer, state.name)[state.place] = values
                getattr(layer, f"is_{state.name}_initialized")[state.place] = True
                layer.has_previous_state[state.place] = True
                layer.dtype = values.dtype
                layer.device = values.device
                if state.name == "conv_states":
                    layer.conv_kernel_size[state.place] = values.shape[-1]

        self._cache.layers.clear()
        self._cache.layers.fill = None if isinstance(rows, int) and rows < 0 else fill

    def _store(self, pool: StatePool, rows: Tensor | int) -> None:
        """Copy the states of the cache's layers to these rows of the pool."""
        for index, layer in self._cache.layers.items():
            for state, stored in pool.layers.get(index, ()):
                values = getattr(layer, state.name)[state.place]
                if values is None:
                    continue
                if values.shape[1:] != stored.shape[1:] or values.dtype != stored.dtype:
                    raise UnsupportedModel("the size of its states depends on the number of tokens")
                stored[rows] = values[0] if isinstance(rows, int) else values


class _Rows:
    """A mixer's output, put together part by part."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._wholes: dict[int, Tensor] = {}  # by place in the flattened output
        self._last: list[Any] = []  # the last part's output, flattened
        self._form: Any = None  # how that output was nested

    def cut(self, arguments: Any, start: int, end: int, *, by_row: bool = False) -> Any:
        """Cut these rows out of each tensor that has a row for each token; other arguments stay as they are.

        The result is [1, rows, ...], one sequence; with `by_row` [rows, 1, ...], a sequence for each row.
        """

        def part(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape[:2] != (1, self._num_rows):
                return x
            rows = x[:, start:end]
            return rows.transpose(0, 1) if by_row else rows

        return tree_map(part, arguments)

    def take(self, output: Any, start: int, end: int, *, by_row: bool = False) -> None:
        """Put the output for rows that `cut` returned into its place. by_row: as for `cut`."""
        self._last, self._form = tree_flatten(output)
        shape = (end - start, 1) if by_row else (1, end - start)
        for place, x in enumerate(self._last):
            if isinstance(x, Tensor) and x.shape[:2] == shape:
                whole = self._wholes.setdefault(place, x.new_empty(1, self._num_rows, *x.shape[2:]))
                if whole.shape[2:] == x.shape[2:]:  # otherwise x only looked like rows
                    whole[:, start:end] = x.transpose(0, 1) if by_row else x

    def joined(self) -> Any:
        """Return the output for all rows. Values in it that have no rows are those of the last part."""
        return tree_unflatten(
            [self._wholes.get(place, x) for place, x in enumerate(self._last)], self._form
        )


def _with_scan(mixer: nn.Module, cache: StateCache) -> Callable[..., Any]:
    """Return the mixer's forward; if it calls Mamba-1's scan, the scan begins with the state in the cache."""
    outer = mixer.forward
    forward: Any = inspect.unwrap(type(mixer).forward)
    calls = count()  # the model calls the scan once for each head, in their order
    scan_of_model = forward.__globals__.get(SCAN)
    if scan_of_model is None:
        return outer

    def scan(*args: Any, **options: Any) -> Any:
        states = (layer.recurrent_states[0] for layer in cache.layers.values())
        before = next((state for state in states if state is not None), None)
        if before is None or not options.get("return_last_state"):  # without a cache
            return scan_of_model(*args, **options)
        if before.ndim == WITH_HEADS:
            before = before[:, next(calls) % before.shape[1]]
        return scan_from(before, *args, **options)

    known = {**forward.__globals__, SCAN: scan}
    changed = FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed.__get__(mixer)


def scan_from(
    state: Tensor, hidden: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-1's selective scan from a given state, [1, channels, size]; transformers' scan starts from zeros.

    hidden, dt: [1, channels, tokens].  a: [channels, size].  b, c: [1, size, tokens].
    options: the keyword arguments of transformers' scan. Returns the output and the last state.
    """
    if options.get("delta_bias") is not None:
        dt = dt + options["delta_bias"].to(dt.dtype)[..., None]
    if options.get("delta_softplus"):
        dt = F.softplus(dt)
    decay = torch.exp(a[None, :, None] * dt[..., None])
    added = dt[..., None] * b.transpose(1, 2)[:, None].float() * hidden[..., None].float()
    outputs = []
    for i in range(hidden.shape[-1]):
        state = decay[:, :, i] * state + added[:, :, i]
        outputs.append((state.to(hidden.dtype) @ c[:, :, i, None])[..., 0])
    output = torch.stack(outputs, dim=-1)
    if options.get("D") is not None:
        output = output + hidden * options["D"][None, :, None]
    if options.get("z") is not None:
        output = output * F.silu(options["z"])
    return output, state
