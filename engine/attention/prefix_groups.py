"""Decides which sequences of a step attend to a common prefix together, for kernels that read it once for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.features import AttentionFeatures
from engine.kernels.attention.shared_prefix import SharedPrefix, find_shared_prefixes

#: Bytes of keys and values of one layer that a step's prefixes must spare together. A layer launches one kernel more
#: with them, which takes a few microseconds beside its products. An H200 reads these bytes in 4 microseconds, an RTX
#: 4090 in 17. What the kernel writes for the merge is left out: at most 1 % of what it spares for each query head of a
#: group.
LEAST_SPARED_BYTES = 16 * 2**20

NO_SEQ = -1


class PrefixArrays(NamedTuple):
    """The prefixes of a step's sequences: PrefixRows of engine/kernels/attention/prefix.py, on the host.

    begins: [seqs] int32.  members: [tiles, seqs of a tile] int32.  num_tiles: [1] int32.
    """

    begins: NDArray[np.int32]
    members: NDArray[np.int32]
    num_tiles: NDArray[np.int32]


class PrefixTensors(NamedTuple):
    """PrefixArrays on the device."""

    begins: Tensor
    members: Tensor
    num_tiles: Tensor


@dataclass(frozen=True)
class PrefixLimits:
    """Which prefixes are worth a kernel of their own.

    token_bytes: bytes of a token's keys and values, in the smallest of the layers that see all tokens.
    least_spared_bytes: the fewest bytes that a step's prefixes must spare together, in one layer.
    block_size: tokens of a block.  tile: the tokens of a prefix are a multiple of this.
    tile_seqs: how many sequences a tile holds.
    """

    token_bytes: int
    least_spared_bytes: int
    block_size: int
    tile: int
    tile_seqs: int

    def can_pay(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether a prefix can pay for num_seqs sequences of at most num_tokens tokens."""
        longest = (num_tokens - 1) // self.tile * self.tile
        return self._pays((num_seqs - 1) * longest)

    def find(
        self, block_tables: NDArray[np.int32], context_lens: NDArray[np.int64]
    ) -> list[SharedPrefix]:
        """Find the prefixes of decoding sequences; none if they spare too little.

        block_tables: [seqs, max_blocks].  context_lens: [seqs], the new token included.
        """
        if len(context_lens) < 2:
            return []
        prefixes = find_shared_prefixes(
            block_tables,
            context_lens - 1,
            np.ones_like(context_lens),
            self.block_size,
            tile=self.tile,
            least_queries=2,
        )
        return prefixes if self._pays(sum(map(_spared_tokens, prefixes))) else []

    def _pays(self, num_tokens: int) -> bool:
        return num_tokens > 0 and num_tokens * self.token_bytes >= self.least_spared_bytes

    def max_tiles(self, num_seqs: int) -> int:
        """Return how many tiles there is room for; all prefixes fit if a tile holds three sequences or more."""
        return -(-num_seqs // 2)

    def arrange(self, prefixes: Sequence[SharedPrefix], num_seqs: int) -> PrefixArrays:
        """Lay out the prefixes of num_seqs sequences; those that spare least are left out if tiles run out."""
        begins = np.zeros(num_seqs, np.int32)
        members = np.full((self.max_tiles(num_seqs), self.tile_seqs), NO_SEQ, np.int32)
        num_tiles = 0
        for prefix in sorted(prefixes, key=_spared_tokens, reverse=True):
            end = num_tiles + -(-len(prefix.seqs) // self.tile_seqs)
            if end > len(members):
                continue
            places = members[num_tiles:end].reshape(-1)
            places[: len(prefix.seqs)] = np.sort(prefix.seqs)
            begins[prefix.seqs] = prefix.num_tokens
            num_tiles = end
        return PrefixArrays(begins, members, np.array([num_tiles], np.int32))


def _spared_tokens(prefix: SharedPrefix) -> int:
    """Return how many fewer tokens a layer reads if it reads the prefix once."""
    return (len(prefix.seqs) - 1) * prefix.num_tokens


def choose_limits(
    layers: Sequence[AttentionFeatures],
    dtype: torch.dtype,
    block_size: int,
    *,
    tile: int,
    tile_queries: int,
) -> PrefixLimits | None:
    """Return the limits for a model's layers; None if no prefix can be read once for several sequences.

    dtype: of keys and values.  tile: a prefix is a multiple of these tokens.  tile_queries: the most
    queries of a tile: one for each head of a group and each sequence.
    """
    whole = [layer for layer in layers if layer.sees_all]
    if not whole:
        return None
    most_heads = max(layer.num_heads // layer.num_kv_heads for layer in whole)
    padded_heads = 1 << (most_heads - 1).bit_length()  # the next power of two
    tile_seqs = tile_queries // padded_heads
    if tile_seqs < 2:
        return None
    token_bytes = min(2 * layer.num_kv_heads * layer.head_dim for layer in whole) * dtype.itemsize
    return PrefixLimits(token_bytes, LEAST_SPARED_BYTES, block_size, tile, tile_seqs)
