"""Attention over a paged cache, and the other kernels of a layer, on random numbers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import load_backend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from ops.bench.kernels.timing import Case
from ops.bench.make import Shape

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Paged:
    """Sequences in a random pool, as one layer's attention sees them.

    query_lens, context_lens: [seqs] int64.  tables: [seqs, blocks] int32.
    """

    query: Tensor
    cache: LayerKVCache
    tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    query_lens: np.ndarray[tuple[int], np.dtype[np.int64]]
    context_lens: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def features(self) -> AttentionFeatures:
        """Plain attention over these heads."""
        heads, head_dim = self.query.shape[1:]
        return AttentionFeatures(heads, self.cache.keys.shape[2], head_dim, head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Keys and values of all contexts, queries in and out."""
        row = self.cache.keys.shape[2] * self.cache.keys.shape[3] * self.cache.keys.element_size()
        return 2 * int(self.context_lens.sum()) * row + 2 * self.query.nbytes

    @property
    def flops(self) -> int:
        """Scores and weighted sums of the keys that each query may see."""
        pairs = self.query_lens * self.context_lens - self.query_lens * (self.query_lens - 1) // 2
        return 4 * self.query.shape[1] * self.query.shape[2] * int(pairs.sum())


@dataclass(frozen=True)
class Peer:
    """Another library's attention.

    bind: takes sequences, and returns a function that computes their attention in the shape of `query`.
    """

    name: str
    bind: Callable[[Paged], Callable[[], Tensor]]


def make_paged(
    shape: Shape,
    context_lens: list[int],
    query_lens: list[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Paged:
    """Random numbers in shuffled blocks."""
    num_blocks = [-(-n // BLOCK_SIZE) for n in context_lens]
    order = np.random.default_rng(0).permutation(sum(num_blocks)).astype(np.int32)
    tables = np.zeros((len(context_lens), max(num_blocks)), np.int32)
    for row, blocks in zip(tables, np.split(order, np.cumsum(num_blocks)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    pool = (sum(num_blocks), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn(
        (sum(query_lens), shape.num_heads, shape.head_dim), dtype=dtype, device=device
    )
    return Paged(
        query, LayerKVCache(keys, values), tables, np.array(query_lens), np.array(context_lens)
    )


def contexts(num_seqs: int, low: int, high: int) -> list[int]:
    """Random context lengths, the same each time."""
    rng = random.Random(0)
    return [rng.randint(low, high) for _ in range(num_seqs)]


def attention_cases(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, tiny: bool, peer: Peer | None = None
) -> Iterator[Case]:
    """Attention of one layer: decodes, then whole prompts. Each case is followed by the peer's, if there is one."""
    toy = {"3 sequences": [20, 7, 33]}
    decodes = toy if tiny else {
        "256 sequences, contexts 100..2,048": contexts(256, 100, 2048),
        "256 sequences, context 512": [512] * 256,
        "16 sequences, context 4,096": [4096] * 16,
        "1 sequence, context 32,768": [32_768],
    }  # fmt: skip
    prefills = toy if tiny else {
        "8 prompts of 1,024": [1024] * 8, "32 prompts of 256": [256] * 32, "1 prompt of 8,192": [8192],
    }  # fmt: skip
    for label, lens in decodes.items():
        paged = make_paged(shape, lens, [1] * len(lens), device, dtype)
        yield from _attention(f"decode attention, {label}", paged, peer)
    for label, lens in prefills.items():
        paged = make_paged(shape, lens, lens, device, dtype)
        yield from _attention(f"prefill attention, {label}", paged, peer)


def _attention(name: str, paged: Paged, peer: Peer | None) -> Iterator[Case]:
    backend = load_backend("triton", paged.query.device)
    metadata, _ = backend.build_metadata(paged.tables, paged.context_lens, paged.query_lens)

    def run() -> Tensor:
        return backend.forward(paged.query, paged.cache, metadata, paged.features)

    ours = run()
    assert ours.isfinite().all(), f"{name} gives NaN or infinity"
    yield Case(name, run, paged.num_bytes, paged.flops)
    if peer is not None:
        run_peer = peer.bind(paged)
        # both round to 8 bits of mantissa, each in its own order
        torch.testing.assert_close(run_peer(), ours, rtol=2**-6, atol=2**-6)
        yield Case(f"{peer.name}, {name}", run_peer, paged.num_bytes, paged.flops)


def layer_cases(
    shape: Shape, rows: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """One layer's other kernels on so many tokens."""
    from engine.kernels.attention.kv_store import (
        store_kv,
    )  # Triton's, which a CPU user need not have
    from engine.kernels.attention.rotary import norm_rotate_and_store
    from engine.kernels.products.gate_and_mul import silu_and_mul
    from engine.kernels.rms_norm import add_rms_norm

    after = f", {rows:,} tokens"

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    dim, head_dim = shape.hidden_size, shape.head_dim
    x, residual, weight = random_tensor(rows, dim), random_tensor(rows, dim), random_tensor(dim)
    yield Case(
        "add + RMSNorm" + after, lambda: add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes
    )
    query = random_tensor(rows, shape.num_heads, head_dim)
    key = random_tensor(rows, shape.num_kv_heads, head_dim)
    rotation = (random_tensor(rows, 1, head_dim), random_tensor(rows, 1, head_dim))
    norms = (random_tensor(head_dim), random_tensor(head_dim))
    half_of_each = rotation[0].nbytes  # the second half of cosines and sines repeats the first
    pool = (-(-rows // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, head_dim)
    cache = LayerKVCache(random_tensor(*pool), random_tensor(*pool))
    slots = torch.randperm(pool[0] * BLOCK_SIZE, device=device)[:rows]
    yield Case(
        "head norms + rotary + store" + after,
        lambda: norm_rotate_and_store(query, key, key, rotation, norms, 1e-6, cache, slots),
        2 * (query.nbytes + 2 * key.nbytes) + half_of_each,
    )
    yield Case("store K and V" + after, lambda: store_kv(key, key, cache, slots), 4 * key.nbytes)
    gate_up = random_tensor(rows, 2 * shape.intermediate_size)
    yield Case("SiLU · mul" + after, lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2)
