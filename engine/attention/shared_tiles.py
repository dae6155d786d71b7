"""Puts the queries of a step's prompts into tiles. Short prompts behind a common prefix share tiles where that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.features import AttentionFeatures
from engine.kernels.attention.shared_prefix import SharedPrefix, find_shared_prefixes

#: Sequences share tiles only if that spares at least this share of the launch's time, estimated in whole tiles of keys.
#: Sharing costs a little: queries of several sequences lie apart, and all scores behind the prefix are masked.
LEAST_SPARED_SHARE = 1 / 8

NO_ROW = -1  # where a tile has no query


class Prompts(NamedTuple):
    """The sequences of a step that compute several tokens.

    starts: [seqs], each sequence's first row in the step.  query_lens: [seqs].  context_lens: [seqs], the step's own
    tokens included.  All are int64.
    """

    starts: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    context_lens: NDArray[np.int64]

    @property
    def lens_before(self) -> NDArray[np.int64]:
        """Return the tokens before each sequence's first query."""
        return self.context_lens - self.query_lens


class QueryTiles(NamedTuple):
    """Tiles that hold queries of one sequence each.

    seqs, starts: [tiles] int64, each tile's sequence and the first of its queries.
    """

    seqs: NDArray[np.int64]
    starts: NDArray[np.int64]


class SharedTileArrays(NamedTuple):
    """SharedTiles of engine/kernels/attention/shared_prefill.py on the host, without block tables."""

    num_shared: NDArray[np.int32]
    first_segments: NDArray[np.int32]
    segments: NDArray[np.int32]
    rows: NDArray[np.int32]
    positions: NDArray[np.int32]

    def count_keys(self, key_tile: int) -> NDArray[np.int64]:
        """Count the keys that each tile's queries are multiplied with, in whole tiles of keys: [tiles]."""
        num_shared = self.num_shared.astype(np.int64)
        tiles = np.repeat(np.arange(len(num_shared)), np.diff(self.first_segments))
        ends = self.positions[tiles, self.segments[:, 2] - 1] + 1
        num_own = _whole_tiles(ends - num_shared[tiles], key_tile)
        return num_shared + np.add.reduceat(num_own, self.first_segments[:-1])


def cut_queries(query_lens: NDArray[np.int64], query_tile: int) -> QueryTiles:
    """Cut each sequence's queries into tiles of its own. Its last tile may have fewer queries than the others."""
    num_tiles = -(-query_lens // query_tile)
    seqs = np.repeat(np.arange(len(query_lens)), num_tiles)
    tiles_before = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return QueryTiles(seqs, (np.arange(len(seqs)) - tiles_before) * query_tile)


@dataclass(frozen=True)
class TileLimits:
    """Says when sequences share tiles.

    block_size: tokens of a block.  query_tile: queries of a tile.  key_tile: tokens of a tile of keys; the number of
    shared tokens is a multiple of it.
    num_programs: programs of a tile, in the layer that has fewest.  num_slots: how many programs run at the same time.
    least_spared_share: as LEAST_SPARED_SHARE; below 0, sequences share tiles wherever they have a prefix in common.
    """

    block_size: int
    query_tile: int
    key_tile: int
    num_programs: int
    num_slots: int
    least_spared_share: float

    def share(
        self, prompts: Prompts, tiles: QueryTiles, block_tables: NDArray[np.int32]
    ) -> SharedTileArrays | None:
        """Return tiles that sequences share; None if tiles of their own are about as good.

        tiles: those of each sequence alone.  block_tables: [seqs, max_blocks].
        """
        if len(prompts.starts) < 2:
            return None
        # the other queries fill tiles by themselves
        num_left = prompts.query_lens % self.query_tile
        prefixes = find_shared_prefixes(
            block_tables,
            prompts.lens_before,
            num_left,
            self.block_size,
            tile=self.key_tile,
            least_queries=2,
        )
        if not prefixes:
            return None
        segments = self._cut(self._gather(prompts, tiles, prefixes))
        shared = self._lay_out(prompts, segments)
        time_alone = self._estimate_time(self.count_keys(prompts, tiles))
        time_shared = self._estimate_time(shared.count_keys(self.key_tile))
        pays = time_shared <= (1 - self.least_spared_share) * time_alone
        return shared if pays else None

    def count_keys(self, prompts: Prompts, tiles: QueryTiles) -> NDArray[np.int64]:
        """Count the keys that each tile's queries are multiplied with, as SharedTileArrays does: [tiles]."""
        return _whole_tiles(_tokens_seen(prompts, tiles, self.query_tile), self.key_tile)

    def _estimate_time(self, num_keys: NDArray[np.int64]) -> float:
        """Estimate how long a launch takes, in the time that a program takes for one key.

        It ends no sooner than its longest program, and no sooner than all programs that take turns on num_slots.
        num_keys: [tiles].
        """
        in_turns = float(num_keys.sum()) * self.num_programs / self.num_slots
        return max(in_turns, float(num_keys.max()))

    def _gather(
        self, prompts: Prompts, tiles: QueryTiles, prefixes: Sequence[SharedPrefix]
    ) -> _Pieces:
        """Return all tiles by group: those that join behind the same prefix first, then each of the others alone."""
        seqs = tiles.seqs
        ends = _tokens_seen(prompts, tiles, self.query_tile)
        first_positions = prompts.lens_before[seqs] + tiles.starts
        counts = ends - first_positions

        prefix_of_seq = np.full(len(prompts.starts), len(prefixes))
        tokens_of_seq = np.zeros(len(prompts.starts), np.int64)
        for number, prefix in enumerate(prefixes):
            prefix_of_seq[prefix.seqs] = number
            tokens_of_seq[prefix.seqs] = prefix.num_tokens
        prefix_tokens = tokens_of_seq[seqs]
        # a tile with more tokens behind the prefix than in it spares little, and would make the others wait
        joins = (counts < self.query_tile) & (ends <= 2 * prefix_tokens)
        # A tile that stays alone is a group of its own. All its queries see what its first one sees.
        group = np.where(joins, prefix_of_seq[seqs], len(prefixes) + np.arange(len(seqs)))
        seen_by_all = (first_positions + 1) // self.key_tile * self.key_tile
        num_shared = np.where(joins, prefix_tokens, seen_by_all)
        num_own = _whole_tiles(ends - num_shared, self.key_tile)
        order = np.argsort(group, kind="stable")
        return _Pieces(
            group=group[order],
            seqs=seqs[order],
            starts=tiles.starts[order],
            counts=counts[order],
            num_shared=num_shared[order],
            num_own=num_own[order],
            joins=joins[order],
        )

    def _cut(self, pieces: _Pieces) -> _Segments:
        """Fill tiles with the pieces, group after group. A piece that does not fit goes on in the next tile."""
        firsts = np.flatnonzero(np.diff(pieces.group, prepend=-1))
        sizes = np.diff(firsts, append=len(pieces.group))
        queries_of_group = np.add.reduceat(pieces.counts, firsts)
        # nothing lies behind what all see where a tile has one query, the last of a tile of keys
        own_of_group = np.maximum(np.add.reduceat(pieces.num_own, firsts), 1)
        shared_of_group = pieces.num_shared[firsts]
        # With this number of queries, a tile has about the same number of tokens behind the prefix as in it.
        # A program with more would end long after the others.
        most_queries = np.minimum(
            shared_of_group * queries_of_group // own_of_group, self.query_tile
        )
        most_queries[~pieces.joins[firsts]] = self.query_tile
        tiles_of_group = -(-queries_of_group // most_queries)

        # the places of a piece's queries among those of its group
        most_of_piece = np.repeat(most_queries, sizes)
        begins = np.cumsum(pieces.counts) - pieces.counts
        begins -= np.repeat(begins[firsts], sizes)
        ends = begins + pieces.counts
        first_tiles = begins // most_of_piece
        num_segments = (ends - 1) // most_of_piece - first_tiles + 1

        # one entry for each segment; a tile's number counts from the first tile of its group
        piece = np.repeat(np.arange(len(begins)), num_segments)
        most = most_of_piece[piece]
        tile_in_group = first_tiles[piece] + _count_up(num_segments)
        tile_begins = tile_in_group * most
        segment_begins = np.maximum(begins[piece], tile_begins)
        segment_ends = np.minimum(ends[piece], tile_begins + most)
        tiles_before = np.repeat(np.cumsum(tiles_of_group) - tiles_of_group, sizes)
        return _Segments(
            tiles=tiles_before[piece] + tile_in_group,
            seqs=pieces.seqs[piece],
            starts=pieces.starts[piece] + segment_begins - begins[piece],
            counts=segment_ends - segment_begins,
            first_rows=segment_begins - tile_begins,
            num_shared=np.repeat(shared_of_group, tiles_of_group),
        )

    def _lay_out(self, prompts: Prompts, segments: _Segments) -> SharedTileArrays:
        """Return the tiles with the row and the position of each query."""
        seqs = segments.seqs
        counts = segments.counts
        end_rows = segments.first_rows + counts
        num_tiles = len(segments.num_shared)
        rows = np.full((num_tiles, self.query_tile), NO_ROW, np.int32)
        positions = np.full_like(rows, NO_ROW)
        places = _ranges(segments.tiles * self.query_tile + segments.first_rows, counts)
        rows.reshape(-1)[places] = _ranges(prompts.starts[seqs] + segments.starts, counts)
        first_positions = prompts.lens_before[seqs] + segments.starts
        positions.reshape(-1)[places] = _ranges(first_positions, counts)
        first_segments = np.searchsorted(segments.tiles, np.arange(num_tiles + 1))
        columns = (seqs, segments.first_rows, end_rows)
        return SharedTileArrays(
            num_shared=segments.num_shared.astype(np.int32),
            first_segments=first_segments.astype(np.int32),
            segments=np.stack(columns, axis=1).astype(np.int32),
            rows=rows,
            positions=positions,
        )


class _Pieces(NamedTuple):
    """Tiles of one sequence each, in the order of their groups. A group's pieces are put into tiles together.

    group: [pieces], in rising order.  seqs, starts: as QueryTiles has them.  counts: [pieces], the queries of each.
    num_shared: [pieces], tokens that all queries of the group see.  num_own: [pieces], the tokens behind those, in
    whole tiles of keys.  joins: [pieces] bool, whether the piece's group stands behind a prefix.
    """

    group: NDArray[np.int64]
    seqs: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_shared: NDArray[np.int64]
    num_own: NDArray[np.int64]
    joins: NDArray[np.bool_]


class _Segments(NamedTuple):
    """The pieces, cut where a tile ends.

    tiles, seqs, starts, counts, first_rows: [segments], the tile of each, its sequence, the first of its queries, how
    many it has, and the first of its rows in the tile.  num_shared: [tiles], as SharedTiles has it.
    """

    tiles: NDArray[np.int64]
    seqs: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    num_shared: NDArray[np.int64]


def choose_tile_limits(
    layers: Sequence[AttentionFeatures],
    block_size: int,
    *,
    query_tile: int,
    key_tile: int,
    num_processors: int,
) -> TileLimits | None:
    """Return the limits for a model's layers; None if each of them has a window or chunks.

    num_processors: multiprocessors. One of them runs a program of two heads, or two programs of one head each.
    """
    heads = [layer.num_heads for layer in layers if layer.sees_all]
    if not heads:
        return None
    num_programs = max(min(heads) // 2, 1)
    return TileLimits(
        block_size, query_tile, key_tile, num_programs, num_processors, LEAST_SPARED_SHARE
    )


def _tokens_seen(prompts: Prompts, tiles: QueryTiles, query_tile: int) -> NDArray[np.int64]:
    """Return how many tokens the last query of each tile sees: [tiles]."""
    query_ends = np.minimum(tiles.starts + query_tile, prompts.query_lens[tiles.seqs])
    return prompts.lens_before[tiles.seqs] + query_ends


def _count_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... for each length in turn: [sum of lengths]."""
    return _ranges(np.zeros_like(lengths), lengths)


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... for each start and length in turn: [sum of lengths]."""
    before = np.cumsum(lengths) - lengths
    numbers: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return numbers


def _whole_tiles(num_tokens: NDArray[np.int64], key_tile: int) -> NDArray[np.int64]:
    """Round numbers of tokens up to whole tiles of keys."""
    return -(-num_tokens // key_tile) * key_tile
