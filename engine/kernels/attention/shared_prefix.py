"""Finds sequences of a step that share their first blocks, so that these are read once for all."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences with the same first num_tokens tokens. seqs: [members] int64, indices of a step's sequences."""

    seqs: NDArray[np.int64]
    num_tokens: int


def find_shared_prefixes(
    block_tables: NDArray[np.int32],
    lens_before: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    block_size: int,
    *,
    tile: int,
    least_queries: int,
) -> list[SharedPrefix]:
    """Find the prefixes that together spare the most reads, at most one for a sequence. Source: arXiv:2402.05099.

    block_tables: [seqs, max_blocks].  lens_before: [seqs], tokens before each sequence's first query; only
    these are shared.  query_lens: [seqs], 0 for a sequence that is left out.  tile: num_tokens is a multiple of it.
    least_queries: the fewest queries that a prefix's members have together; with fewer, reading it once is no gain.
    """
    found = []
    long_enough = np.flatnonzero((lens_before >= tile) & (query_lens > 0))
    if int(query_lens[long_enough].sum()) < least_queries:
        return []
    first_blocks = block_tables[long_enough, 0]
    different_blocks, counts = np.unique(first_blocks, return_counts=True)
    for first_block in different_blocks[counts > 1]:
        seqs = long_enough[first_blocks == first_block]
        if int(query_lens[seqs].sum()) < least_queries:
            continue
        tables = block_tables[seqs]
        same_blocks = np.logical_and.accumulate(tables == tables[0], axis=1).sum(1)
        lens = np.minimum(same_blocks * block_size, lens_before[seqs]) // tile * tile
        # the longest first: a sequence that shares little shall not cut the others' prefix short
        order = np.argsort(-lens, kind="stable")
        num_queries = np.cumsum(query_lens[seqs[order]])
        spared = lens[order] * (num_queries - num_queries[0])
        last = int(spared.argmax())
        if spared[last] and num_queries[last] >= least_queries:
            found.append(SharedPrefix(seqs[order[: last + 1]], int(lens[order[last]])))
    return found
