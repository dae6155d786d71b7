"""Triton backend: split-KV decode and varlen prefill over block tables, and fused kernels for the layers.

Runs on GPUs; on a CPU only under Triton's interpreter, which is for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBreak, AttentionMetadata, CapturableBackend, Lens
from engine.attention.decode_state import DecodeState, RowMemory, RowWrites
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.layer_kernels import ExpertKernels, LayerKernels, PackedKernels
from engine.attention.prefix_groups import PrefixArrays, PrefixTensors, choose_limits
from engine.attention.shared_tiles import Prompts, TileLimits, choose_tile_limits, cut_queries
from engine.errors import ConfigError
from engine.kernels.attention.decode import DecodeRows, choose_num_programs, decode_attention
from engine.kernels.attention.kv_store import store_kv
from engine.kernels.attention.kv_tile import INTERPRETED, MAX_HEAD_DIM
from engine.kernels.attention.prefill import QUERY_TILE, PrefillTiles, prefill_attention
from engine.kernels.attention.prefix import PREFIX_TILE, TILE_QUERIES, PrefixRows
from engine.kernels.attention.rotary import norm_rotate_and_store
from engine.kernels.attention.shared_prefill import SharedTiles, shared_prefill_attention
from engine.kernels.delta_net import delta_net
from engine.kernels.gpu_logit_edits import edit_logits
from engine.kernels.gpu_sampler import choose_tokens
from engine.kernels.gpu_token_scores import score_tokens
from engine.kernels.products import packed_product
from engine.kernels.products.expert_groups import choose_experts, group_by_expert
from engine.kernels.products.gate_and_mul import clamped_swiglu_and_mul, gelu_and_mul, silu_and_mul
from engine.kernels.products.grouped_packed_product import grouped_packed_product
from engine.kernels.products.grouped_product import grouped_product
from engine.kernels.products.low_rank import add_low_rank
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.row_writes import write_rows
from engine.kernels.step_inputs import advance_rows, fill_pending
from engine.kernels.upload import Arrays, upload_aligned
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_scores import TokenScores

PACKED = PackedKernels(
    packed_product.block,
    packed_product.lay_out,
    packed_product.packed_product,
    grouped_packed_product,
)
MIN_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
FP8_CAPABILITY = (8, 9)  # the first for which Triton compiles float8_e4m3fn
PREFIX_PROGRAMS = 2  # of the kernel for common prefixes, for each multiprocessor
# Stands in for a GPU's multiprocessors, so that tests see few splits and many.
INTERPRETER_PROCESSORS = 8


@dataclass(frozen=True)
class TritonMetadata(AttentionMetadata):
    """The step's sequences by kind: those with one new token, and those with more.

    shared: the prefilling sequences in tiles that they share, for layers without windows and chunks. None if they share
    none: these layers then take `prefill`, as all others do.
    """

    decode: DecodeRows
    prefill: PrefillTiles
    shared: SharedTiles | None = None


class TritonBackend(CapturableBackend):
    """Computes all prefill chunks of a step in one launch and all its decodes in another.

    tile_limits: say when prefilling sequences share tiles; None if they never do.
    """

    name = "triton"
    max_head_dim = MAX_HEAD_DIM
    tile_limits: TileLimits | None = None

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda":
            name, capability = _name_and_capability(device)
            if capability < MIN_CAPABILITY and not INTERPRETED:
                raise ConfigError(
                    f"attention_backend='triton' needs compute capability 8.0, {name} has "
                    f"{capability[0]}.{capability[1]}; use 'torch'"
                )
        elif not INTERPRETED:
            raise ConfigError(
                f"attention_backend='triton' does not run on device={device.type!r}; use 'torch' there. "
                "(For tests, TRITON_INTERPRET=1 set before Python starts runs it in Triton's interpreter.)"
            )

    @classmethod
    def fp8_problem(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or INTERPRETED:
            return None
        name, capability = _name_and_capability(device)
        if capability >= FP8_CAPABILITY:
            return None
        return f"that needs compute capability 8.9, {name} has {capability[0]}.{capability[1]}"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_processors = INTERPRETER_PROCESSORS
        self._counter_tensors: list[Tensor] = []
        self.layer_kernels = LayerKernels(
            add_rms_norm,
            norm_rotate_and_store,
            silu_and_mul,
            rms_norm,
            gelu_and_mul,
            ExpertKernels(choose_experts, group_by_expert, grouped_product, clamped_swiglu_and_mul),
            delta_net=delta_net,
            packed=PACKED,
            add_low_rank=add_low_rank,
        )
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def share_prefixes(
        self, layers: Sequence[AttentionFeatures], dtype: torch.dtype, block_size: int
    ) -> None:
        self.prefix_limits = choose_limits(
            layers, dtype, block_size, tile=PREFIX_TILE, tile_queries=TILE_QUERIES
        )
        self.tile_limits = choose_tile_limits(
            layers,
            block_size,
            query_tile=QUERY_TILE,
            key_tile=PREFIX_TILE,
            num_processors=self._num_processors,
        )

    def _prefix_rows(self, prefixes: PrefixTensors) -> PrefixRows:
        return PrefixRows(*prefixes, num_programs=PREFIX_PROGRAMS * self._num_processors)

    def store(
        self, keys: Tensor, values: Tensor, cache: LayerKVCache, slot_mapping: Tensor
    ) -> None:
        store_kv(keys, values, cache, slot_mapping)

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[AttentionMetadata, list[Tensor]]:
        """Build the step's metadata and upload it with `beside` in one transfer."""
        decodes = np.flatnonzero(query_lens == 1)
        # the longest first: the device then ends with short ones, and all its programs end at about the same time
        decodes = decodes[np.argsort(-context_lens[decodes], kind="stable")]
        prefills = np.flatnonzero(query_lens > 1)
        starts = np.cumsum(query_lens) - query_lens
        prompts = Prompts(starts[prefills], query_lens[prefills], context_lens[prefills])
        prompt_tables = block_tables[prefills]
        tiles = cut_queries(prompts.query_lens, QUERY_TILE)
        query_ranges = np.stack((prompts.starts, prompts.starts + prompts.query_lens), axis=1)
        arrays = [
            starts[decodes], context_lens[decodes], block_tables[decodes],
            tiles.seqs, tiles.starts, query_ranges, prompts.context_lens, prompt_tables,
        ]  # fmt: skip
        prefixes = self._find_prefixes(block_tables[decodes], context_lens[decodes]) or ()
        shared: Arrays = ()
        if self.tile_limits is not None:
            shared = self.tile_limits.share(prompts, tiles, prompt_tables) or ()
        narrow = [array.astype(np.int32, copy=False) for array in arrays]
        # on the device in the order in which they are named here
        uploaded = iter(upload_aligned([*narrow, *prefixes, *shared, *beside], self._device))
        rows, lens, tables, *prefill_parts = islice(uploaded, len(arrays))
        prefix_rows = None
        if prefixes:
            prefix_rows = self._prefix_rows(PrefixTensors(*islice(uploaded, len(prefixes))))
        prefill = PrefillTiles(*prefill_parts)
        shared_tiles = None
        if shared:
            shared_parts = [*islice(uploaded, len(shared)), prefill.block_tables]
            shared_tiles = SharedTiles(*shared_parts)
        longest = int(context_lens[decodes].max(initial=0))
        decode = DecodeRows(rows, lens, tables, longest, prefixes=prefix_rows)
        return TritonMetadata(decode, prefill, shared_tiles), list(uploaded)

    def _find_prefixes(
        self, block_tables: NDArray[np.int32], context_lens: Lens
    ) -> PrefixArrays | None:
        """Return the prefixes that decoding sequences of a step read together; None if there are none."""
        if self.prefix_limits is None:
            return None
        prefixes = self.prefix_limits.find(block_tables, context_lens)
        return self.prefix_limits.arrange(prefixes, len(context_lens)) if prefixes else None

    def fill_pending(
        self, token_ids: Tensor, rows: Tensor, sampled: Tensor, places: Tensor
    ) -> None:
        fill_pending(token_ids, rows, sampled, places)

    def prepare(
        self, dtype: torch.dtype, run: Callable[[], Tensor], *, repeats: bool = True
    ) -> Tensor:
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)
        fill_pending(torch.zeros_like(zeros), zeros, zeros, zeros)
        return run()

    def write_rows(self, memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
        write_rows(memory, writes, sampled)

    def advance(self, state: DecodeState) -> None:
        outputs = state.token_ids, state.positions, state.slot_mapping, state.context_lens
        advance_rows(
            state.next_token_ids, state.next_positions, state.block_tables,
            (*outputs, state.sampling.position), block_size=state.block_size,
        )  # fmt: skip

    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None,
        prefixes: PrefixTensors | None = None,
    ) -> AttentionMetadata:
        on_device = None if prefixes is None else self._prefix_rows(prefixes)
        decode = DecodeRows(rows, context_lens, block_tables, max_context_len, order, on_device)
        return TritonMetadata(decode, PrefillTiles(*5 * [rows[:0]]))

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        if isinstance(metadata, AttentionBreak):
            return metadata.attend(query, cache, features, sinks, slopes)
        assert isinstance(metadata, TritonMetadata)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decode = metadata.decode
        prefill = metadata.prefill
        options = features.options | {"sinks": sinks, "slopes": slopes}
        if metadata.shared is not None and features.sees_all:
            shared_prefill_attention(
                query,
                cache,
                metadata.shared,
                out,
                scale=features.scale,
                soft_cap=features.soft_cap,
                sinks=sinks,
                slopes=slopes,
            )
        elif len(prefill.seqs):
            prefill_attention(query, cache, prefill, out, **options)
        if len(decode.rows):
            num_pairs = len(decode.rows) * cache.keys.shape[2]
            num_programs = choose_num_programs(num_pairs, self._num_processors)
            arrived = self._counters(num_pairs)
            decode_attention(query, cache, decode, arrived, out, num_programs, **options)
        return out

    def _counters(self, number: int) -> Tensor:
        """Return at least `number` counters, at zero. They are never freed: graphs go on using them."""
        tensors = self._counter_tensors
        if not tensors or len(tensors[-1]) < number:
            tensors.append(torch.zeros(number, dtype=torch.int32, device=self._device))
        return tensors[-1]

    def edit(self, logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
        """Edit logits to the same bits as the base class does, in one transfer and one launch."""
        return edit_logits(logits, edits, sampled)

    def sample(self, logits: Tensor, rows: SamplingRows, chosen: Tensor | None = None) -> Tensor:
        """Choose the base class' tokens in two launches, which a graph may record: the host never waits."""
        return choose_tokens(logits, list(vars(rows).values()), chosen=chosen)

    def score(self, logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenScores:
        """Score tokens in one launch, which reads a row's logits once for each of its tokens and copies none."""
        return TokenScores(*score_tokens(logits, token_ids, rows))


def _name_and_capability(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Return a GPU's name and its compute capability."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, (properties.major, properties.minor)
