"""CPU backend, float32 and bfloat16: compiled kernels for attention, other layers and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, KernelBackend, Lens
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.layer_kernels import LayerKernels, PackedKernels
from engine.errors import ConfigError
from engine.kernels.attention.shared_prefix import find_shared_prefixes
from engine.kernels.upload import Arrays, upload
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_scores import TokenScores

if TYPE_CHECKING:
    from engine.cpu_kernels.decode_attention import DecodeRows
    from engine.cpu_kernels.prefill_attention import PrefillTasks

MAX_HEAD_DIM = 256  # the kernels hold a head in registers
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Parts:
    """A step's attention as the kernels take it, for layers with the same number of heads in a group.

    shared: tokens that several sequences have in the same blocks; `prefill` and `decode` begin after them.
    """

    shared: PrefillTasks | None
    prefill: PrefillTasks
    decode: DecodeRows


@dataclass(frozen=True)
class CpuMetadata(AttentionMetadata):
    """The step's sequences.

    parts: by the heads in a group, and by whether shared prefixes may be read once; each is made when a layer needs it.
    """

    block_tables: NDArray[np.int32]  # contiguous
    context_lens: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    parts: dict[tuple[int, bool], Parts] = field(default_factory=dict)


class CpuBackend(KernelBackend):
    """Computes all decodes of a step in one call, and all prefill chunks in another."""

    name = "cpu"
    max_head_dim = MAX_HEAD_DIM
    # A sequence with fewer new tokens goes to the decode kernel, a row for each of them.
    least_prefill = 12

    @classmethod
    def problem(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot serve this device and dtype, and what to do; None if it can."""
        if device.type != "cpu":
            return f"it does not run on device={device.type!r}, set device='cpu'"
        if dtype not in DTYPES:
            dtype_name = str(dtype).removeprefix("torch.")
            return f"its kernels take float32 and bfloat16, not {dtype_name}; set dtype='float32'"
        try:
            import numba  # raises ImportError also beside a numpy it does not know
        except ImportError as error:
            return f"the package numba cannot be imported ({error}), pip install numba"
        if numba.config.DISABLE_JIT:
            return "numba compiles nothing where NUMBA_DISABLE_JIT is set; unset it"
        return None

    @classmethod
    def check(cls, device: torch.device, dtype: torch.dtype) -> None:
        problem = cls.problem(device, dtype)
        if problem:
            raise ConfigError(f"attention_backend='cpu' cannot be used: {problem}; or use 'torch'")

    def __init__(self, device: torch.device) -> None:
        # These import numba, which is optional and slow to import; this module can be imported without it.
        from engine.cpu_kernels import (
            cpu_sampler,
            decode_attention,
            elementwise,
            logit_masks,
            packed_product,
            prefill_attention,
            token_scores,
        )
        from engine.cpu_kernels.delta_net import delta_net
        from engine.cpu_kernels.kernel import run_compiled

        self._device = device
        self._decoding = decode_attention
        self._prefilling = prefill_attention
        self._logit_masks = logit_masks
        self._sampler = cpu_sampler
        self._token_scores = token_scores
        self._run_compiled = run_compiled
        self.layer_kernels = LayerKernels(
            elementwise.add_rms_norm,
            elementwise.norm_rotate_and_store,
            elementwise.silu_and_mul,
            elementwise.rms_norm,
            elementwise.gelu_and_mul,
            quantize_rows=elementwise.quantize_rows,
            sigmoid_and_mul=elementwise.sigmoid_and_mul,
            delta_net=delta_net,
            packed=PackedKernels(
                packed_product.block, packed_product.lay_out, packed_product.multiply
            ),
        )

    @classmethod
    def fp8_problem(cls, device: torch.device) -> str | None:
        return "it keeps them in the model's dtype only"

    def prepare(
        self, dtype: torch.dtype, run: Callable[[], Tensor], *, repeats: bool = True
    ) -> Tensor:
        def run_with_sampler() -> Tensor:
            self._sampler.kernel_for(dtype)
            return run()

        return self._run_compiled(run_with_sampler) if repeats else run_with_sampler()

    def edit(self, logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
        """Edit logits to the same bits as the base class does; a compiled kernel applies the masks first."""
        if not len(edits.masked):
            return super().edit(logits, edits, sampled)
        self._logit_masks.mask_rows(
            logits, *map(torch.from_numpy, (edits.rows, edits.masked, edits.token_masks))
        )
        remaining = edits.without_masks()
        return logits if remaining is None else super().edit(logits, remaining, sampled)

    def sample(self, logits: Tensor, rows: SamplingRows, chosen: Tensor | None = None) -> Tensor:
        """Choose the base class' tokens by a compiled kernel, which sorts nothing."""
        sampled = self._sampler.choose_tokens(logits, list(vars(rows).values()))
        return sampled if chosen is None else chosen.copy_(sampled)

    def score(self, logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenScores:
        """Score tokens by a compiled kernel, which copies no logits."""
        return TokenScores(*self._token_scores.score_tokens(logits, token_ids, rows))

    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: Lens,
        query_lens: Lens,
        beside: Arrays = (),
    ) -> tuple[CpuMetadata, list[Tensor]]:
        return CpuMetadata(np.ascontiguousarray(block_tables), context_lens, query_lens), upload(
            beside, self._device
        )

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, CpuMetadata)
        out = query.new_empty(query.shape)
        # a layer with a window or chunks reads no shared prefix
        shares = features.window is None and features.chunk is None
        group = query.shape[1] // cache.keys.shape[2]
        if (group, shares) not in metadata.parts:
            metadata.parts[group, shares] = self._split(
                metadata, group, cache.keys.shape[1], shares=shares
            )
        parts = metadata.parts[group, shares]
        options = features.options | {"sinks": sinks, "slopes": slopes, "state": None}
        prefill_attention = self._prefilling.prefill_attention
        tables = torch.from_numpy(metadata.block_tables)
        if parts.shared is not None:
            options["state"] = query.new_empty(
                self._prefilling.state_shape(query), dtype=torch.float32
            )
            prefill_attention(
                query,
                cache.keys,
                cache.values,
                tables,
                parts.shared,
                out,
                keeps_state=True,
                **options,
            )
        prefill_attention(query, cache.keys, cache.values, tables, parts.prefill, out, **options)
        self._decoding.decode_attention(
            query, cache.keys, cache.values, parts.decode, out, **options
        )
        return out

    def _split(self, step: CpuMetadata, group: int, block_size: int, *, shares: bool) -> Parts:
        """Sort the step's new tokens into tasks of the prefill kernel and rows of the decode kernel."""
        prefilling = self._prefilling
        lens = step.query_lens
        starts = np.cumsum(lens) - lens
        begins = np.zeros(len(lens), np.int64)  # the first token behind a shared prefix
        prefixes = []
        if shares and len(lens) > 1:
            # Longer sequences fill tasks by themselves.
            sharing_lens = np.where(lens * group < 4 * prefilling.TASK_LANES, lens, 0)
            prefixes = find_shared_prefixes(
                step.block_tables,
                step.context_lens - lens,
                sharing_lens,
                block_size,
                tile=prefilling.TILE,
                least_queries=-(-prefilling.LANES // group),
            )
        for prefix in prefixes:
            begins[prefix.seqs] = prefix.num_tokens
        few = np.flatnonzero(lens < self.least_prefill)
        # for each row of the decode kernel, its sequence, and its place among the sequence's new tokens
        decodes = np.repeat(few, lens[few])
        places = np.arange(len(decodes)) - np.repeat(np.cumsum(lens[few]) - lens[few], lens[few])
        context_lens = step.context_lens[decodes] - lens[decodes] + places + 1
        seen = context_lens - begins[decodes]
        order = np.argsort(-seen, kind="stable")
        decodes = decodes[order]
        many = np.flatnonzero(lens >= self.least_prefill)
        of_many = (array[many] for array in (starts, lens, step.context_lens))
        shared = prefilling.tasks_of_prefixes(prefixes, starts, lens, step.context_lens, group)
        of_decodes = (
            starts[decodes] + places[order],
            context_lens[order],
            step.block_tables[decodes],
            begins[decodes],
        )
        rows, lens_seen, tables, firsts = map(torch.from_numpy, of_decodes)
        return Parts(
            shared,
            prefilling.tasks_of_sequences(*of_many, many, begins[many], group),
            self._decoding.DecodeRows(rows, lens_seen, tables, firsts, int(seen.max(initial=0))),
        )


class DeterministicCpuBackend(CpuBackend):
    """Computes every query by the prefill kernel, whose sums depend on a token's place in its sequence alone.

    Tiles of a context begin at the same tokens in every step; the decode kernel sums in another order.
    """

    least_prefill = 1
