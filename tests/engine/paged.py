"""Paged batches for kernel tests: poisoned pools, and what attention over them is in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache, Scales, quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16  # tokens of a block in `sharing`
# Results are rounded once to their dtype; bfloat16 weights of the softmax are rounded before they are summed.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class PagedBatch:
    """Sequences in a pool that holds NaN wherever none of their tokens is.

    query: [tokens, heads, head_dim], with NaN between its rows.  key_cache, value_cache: the pools.
    block_tables: [seqs, blocks] int32; entries past a context point to a block of NaN, as those of blocks do
    that none of a sequence's queries can see through window and chunk.
    context_lens, query_lens: [seqs].  A context of 0 is a padding row, with one query.
    window, chunk, soft_cap: as AttentionFeatures has them.  sinks, slopes: [heads] float32, None without.
    scales: of pools of FP8 numbers, as LayerKVCache has them.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    context_lens: np.ndarray[tuple[int], np.dtype[np.int64]]
    query_lens: np.ndarray[tuple[int], np.dtype[np.int64]]
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    scales: Scales | None = None

    def as_fp8(self) -> PagedBatch:
        """The same keys and values in FP8, by scales that differ from head to head, keys' from values'.

        They are no powers of two, which bfloat16 would hold.
        """
        kv_heads = self.key_cache.shape[2]
        exponents = torch.arange(kv_heads, dtype=torch.float32, device=DEVICE)
        scales = 1.3 * 2.0 ** (exponents - 5), 1.7 * 2.0 ** (-3 - exponents)
        pools = [
            quantize(pool.flatten(0, 1), own).view(pool.shape)
            for pool, own in zip((self.key_cache, self.value_cache), scales, strict=True)
        ]
        return replace(self, key_cache=pools[0], value_cache=pools[1], scales=scales)

    @property
    def cache(self) -> LayerKVCache:
        return LayerKVCache(self.key_cache, self.value_cache, self.scales)

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    @property
    def features(self) -> AttentionFeatures:
        heads, head_dim = self.query.shape[1:]
        kv_heads = self.key_cache.shape[2]
        kind = (self.scale, self.window, self.chunk, self.soft_cap)
        return AttentionFeatures(heads, kv_heads, head_dim, *kind)

    def tensor(self, values: object) -> Tensor:
        """int32 on the device."""
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)

    def expected(self) -> Tensor:
        """[tokens, heads, head_dim] float64; zeros for padding."""
        return self._of_sequences(attend)

    def rounded_inside(self) -> Tensor:
        """[tokens, heads, head_dim] float64: the root of the sum of the squares of each token's part of a number.

        These parts are rounded one by one where the softmax's weights are rounded before they meet the values.
        """

        def squares(
            rows: Tensor, keys: Tensor, values: Tensor, scale: float, **kind: Any
        ) -> Tensor:
            return combine(softmax_weights(rows, keys, scale, **kind).square(), values.square())

        return self._of_sequences(squares).sqrt()

    def _of_sequences(self, compute: Callable[..., Tensor]) -> Tensor:
        """What `compute`, which takes the arguments of `attend`, gives for each sequence; zeros for padding."""
        out, start = torch.zeros(self.query.shape, dtype=torch.float64), 0
        for i, (context_len, query_len) in enumerate(
            zip(self.context_lens, self.query_lens, strict=True)
        ):
            rows = self.query[start : start + query_len].cpu().double()
            if context_len:
                pools, scales = (self.key_cache, self.value_cache), self.scales or (None, None)
                keys, values = (self._context(*pair, i) for pair in zip(pools, scales, strict=True))
                out[start : start + query_len] = compute(
                    rows,
                    keys,
                    values,
                    self.scale,
                    window=self.window,
                    chunk=self.chunk,
                    soft_cap=self.soft_cap,
                    sinks=None if self.sinks is None else self.sinks.cpu().double(),
                    slopes=None if self.slopes is None else self.slopes.cpu().double(),
                )
            start += query_len
        return out

    def error_beyond_rounding(self, output: Tensor) -> float:
        """The largest of what the differences have beyond half of the last digit in the output's dtype."""
        expected = self.expected()
        last_digit = torch.finfo(output.dtype).eps * torch.exp2(expected.abs().log2().floor())
        difference = (output[: len(self.query)].cpu().double() - expected).abs() - last_digit / 2
        return float(difference.nan_to_num(float("inf")).max())

    def error(self, output: Tensor) -> float:
        """Largest difference from the expected rows; NaN anywhere gives infinity."""
        difference = (output[: len(self.query)].cpu().double() - self.expected()).abs()
        return float(difference.nan_to_num(float("inf")).max())

    def _context(self, pool: Tensor, scales: Tensor | None, seq: int) -> Tensor:
        """[context, kv_heads, dim] float64; zeros for the blocks that no query sees."""
        blocks = pool.cpu()[torch.from_numpy(self.block_tables[seq]).long()]
        context = blocks.flatten(0, 1)[: self.context_lens[seq]].double().nan_to_num()
        return context if scales is None else context * scales.cpu().double()[:, None]


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, **kind: Any) -> Tensor:
    """Causal attention in float64, the queries at the end of the context; heads grouped over KV heads.

    kind: as softmax_weights takes it.
    """
    return combine(softmax_weights(query, keys, scale, **kind), values)


def combine(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of values [context, kv_heads, dim] by weights [heads, queries, context] -> [queries, heads, dim]."""
    values = values.repeat_interleave(len(weights) // values.shape[1], 1)
    return torch.einsum("hqc,chd->qhd", weights, values)


def softmax_weights(
    query: Tensor,
    keys: Tensor,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """The weight of each token of the context for each query: [heads, queries, context]."""
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("qhd,chd->hqc", query, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None:
        key = torch.arange(len(keys))
        scores = scores - slopes.double()[:, None, None] * (
            key[len(keys) - len(query) :, None] - key
        )
    scores = scores.masked_fill(hidden(len(query), len(keys), window, chunk), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), -1)
    return scores.softmax(-1)[..., : len(keys)]


def hidden(num_queries: int, context_len: int, window: int | None, chunk: int | None) -> Tensor:
    """[queries, context] bool: which tokens each of the context's last `num_queries` tokens does not see."""
    key = torch.arange(context_len)
    query = key[context_len - num_queries :, None]
    out = key > query
    if window is not None:
        out |= query - key >= window
    if chunk is not None:
        out |= query // chunk != key // chunk
    return out


def _first_visible(
    num_queries: int, context_len: int, window: int | None, chunk: int | None
) -> int:
    """The first token of the context that a query sees; 0 for a padding row."""
    if not context_len:
        return 0
    return int((~hidden(num_queries, context_len, window, chunk).all(0)).nonzero()[0])


def make_batch(
    context_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    head_dim: int = 64,
    group: int = 2,
    kv_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    has_slopes: bool = False,
) -> PagedBatch:
    """A batch with random numbers in random blocks; every query_len is 1 unless given."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = query_lens or [1] * len(context_lens)
    num_blocks = [-(-n // block_size) for n in context_lens]
    free = torch.randperm(sum(num_blocks), generator=generator) + 1  # block 0 holds NaN alone
    tables = np.zeros((len(context_lens), max(num_blocks) + 1), np.int32)
    shape = (sum(num_blocks) + 1, block_size, kv_heads, head_dim)
    pools = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    for i, (context_len, query_len) in enumerate(zip(context_lens, query_lens, strict=True)):
        own, free = free[: num_blocks[i]], free[num_blocks[i] :]
        first = _first_visible(query_len, context_len, window, chunk) // block_size
        tables[i, first : len(own)] = own[first:].numpy()
        for pool in pools:
            content = torch.randn((context_len, kv_heads, head_dim), generator=generator)
            for j, block in enumerate(own.tolist()[first:], first):
                part = content[j * block_size : (j + 1) * block_size]
                pool[block, : len(part)] = part.to(dtype)
    heads, num_tokens = kv_heads * group, sum(query_lens)
    # queries as a view with gaps, as they are cut out of a merged projection
    wide = torch.full((num_tokens, heads + 3, head_dim), float("nan"), dtype=dtype)
    wide[:, :heads] = torch.randn((num_tokens, heads, head_dim), generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator) * 3 if has_sinks else None
    return PagedBatch(
        wide.to(DEVICE)[:, :heads],
        pools[0].to(DEVICE),
        pools[1].to(DEVICE),
        tables,
        np.array(context_lens, np.int64),
        np.array(query_lens, np.int64),
        window,
        chunk,
        soft_cap,
        None if sinks is None else sinks.to(DEVICE),
        (0.5 ** torch.arange(2, heads + 2)).to(DEVICE) if has_slopes else None,
    )


def sharing(
    shared: list[int],
    own: list[int],
    queries: list[int],
    *,
    firsts: list[int] | None = None,
    **options: Any,
) -> PagedBatch:
    """Sequences with so many blocks of another one, which is at least as long, and so many tokens of their own.

    firsts: whose blocks each has; those of the first sequence unless given.
    """
    contexts = [blocks * BLOCK + tokens for blocks, tokens in zip(shared, own, strict=True)]
    limits = {
        name: options.pop(name, None) for name in ("window", "chunk")
    }  # no blocks are NaN for these
    batch = make_batch(contexts, queries, block_size=BLOCK, **options)
    tables = batch.block_tables.copy()
    for seq, blocks in enumerate(shared):
        tables[seq, :blocks] = tables[firsts[seq] if firsts else 0, :blocks]
    return replace(batch, block_tables=tables, **limits)


def attend_by(
    backend: KernelBackend, batch: PagedBatch, metadata: AttentionMetadata | None = None
) -> Tensor:
    """A layer's attention over the batch, by metadata of its own unless given."""
    metadata = (
        metadata
        or backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)[0]
    )
    return backend.forward(
        batch.query, batch.cache, metadata, batch.features, batch.sinks, batch.slopes
    )
