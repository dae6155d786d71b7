"""Finds sequences of a step that share their first blocks, so that these are read once for all."""

from dataclasses import dataclass
from typing import Any, Self

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
    # sequences with the same first block are a group
    seqs = np.flatnonzero((lens_before >= tile) & (query_lens > 0))
    seqs = seqs[np.argsort(block_tables[seqs, 0], kind="stable")]
    groups = _Groups.of_equal(block_tables[seqs, 0])
    may_pay = (groups.sizes > 1) & (groups.sums(query_lens[seqs]) >= least_queries)
    if not may_pay.any():
        return []

    # how many tokens each sequence shares with the first one of its group
    seqs = seqs[np.repeat(may_pay, groups.sizes)]
    groups = _Groups.of_equal(block_tables[seqs, 0])
    most_blocks = -(-int(lens_before[seqs].max()) // block_size)
    tables = block_tables[seqs, :most_blocks]
    differ = tables != tables[groups.of_each(groups.firsts)]
    same_blocks = np.where(differ.any(axis=1), differ.argmax(axis=1), tables.shape[1])
    lens = np.minimum(same_blocks * block_size, lens_before[seqs]) // tile * tile

    # the longest first: a sequence that shares little shall not cut the others' prefix short
    order = np.lexsort((-lens, groups.numbers))
    seqs = seqs[order]
    lens = lens[order]

    # what a prefix spares that a group's sequences share, from its first to each one
    own_queries = query_lens[seqs]
    queries_so_far = np.cumsum(own_queries)
    queries_before = (queries_so_far - own_queries)[groups.firsts]
    num_queries = queries_so_far - groups.of_each(queries_before)
    spared = lens * (num_queries - groups.of_each(own_queries[groups.firsts]))
    lasts = groups.argmax(spared)
    pays = (spared[lasts] > 0) & (num_queries[lasts] >= least_queries)

    prefixes = []
    for first, last in zip(groups.firsts[pays].tolist(), lasts[pays].tolist(), strict=True):
        prefixes.append(SharedPrefix(seqs[first : last + 1], int(lens[last])))
    return prefixes


@dataclass(frozen=True)
class _Groups:
    """Entries of an array that lie side by side, in groups.

    firsts: [groups], the first entry of each.  sizes: [groups].  numbers: [entries], the group of each entry.
    """

    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @classmethod
    def of_equal(cls, values: NDArray[Any]) -> Self:
        """Return the groups of equal neighbours."""
        differs = np.ones(len(values), np.bool_)  # from the value before it
        differs[1:] = values[1:] != values[:-1]
        firsts = np.flatnonzero(differs)
        sizes = np.diff(firsts, append=len(values))
        return cls(firsts, sizes, np.repeat(np.arange(len(firsts)), sizes))

    def of_each(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each entry the value of its group. values: [groups]."""
        return np.repeat(values, self.sizes)

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each group's sum. values: [entries]."""
        if not len(self.firsts):
            return values[:0]  # reduceat takes no empty arrays
        return np.add.reduceat(values, self.firsts)

    def argmax(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entry of each group's largest value, the first of equal ones. values: [entries]."""
        maxima = np.maximum.reduceat(values, self.firsts)
        largest = np.flatnonzero(values == self.of_each(maxima))
        _, places = np.unique(self.numbers[largest], return_index=True)
        return largest[places]
