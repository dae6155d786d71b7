"""Paged attention of sequences with several new tokens, over their blocks of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64, njit
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import FLOAT_BYTES, float_of, narrow, pointer_to, row_pointer, wide
from engine.cpu_kernels.softmax import LEAST, exp_of_negative, tanh
from engine.cpu_kernels.vectors import LONGEST_VECTOR, add_outer_products

TILE = 64  # tokens whose keys and values are in work at once, the same ones for every query of a sequence
ROWS = 8  # sums of so many tokens, or numbers of a value, are in registers at once
HAS_32_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"
VECTORS = 3 if HAS_32_REGISTERS else 1  # of queries: ROWS times as many registers hold sums
LANES = VECTORS * LONGEST_VECTOR  # queries at once, heads of a group and tokens


@dataclass(frozen=True)
class PrefillRows:
    """A step's sequences with several new tokens.

    starts, query_lens, context_lens: [prefills] int64, the first row of each in the query, its new tokens,
    and its tokens after them.  block_tables: [prefills, max_blocks] int32.
    """

    starts: Tensor
    query_lens: NDArray[np.int64]
    context_lens: NDArray[np.int64]
    block_tables: Tensor
    _tasks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def tasks(self, group: int) -> tuple[Tensor, Tensor]:
        """(the sequence, its first query) of each task, LANES queries of one KV head; the longest first.

        Queries of a KV head are its group's heads, token after token. Kept for all layers that group alike.
        """
        if group not in self._tasks:
            counts = -(-self.query_lens * group // LANES)
            seqs = np.repeat(np.arange(len(counts)), counts)
            firsts = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * LANES
            seen = self.context_lens[seqs] - self.query_lens[seqs] + firsts // group
            order = np.argsort(-seen, kind="stable")
            self._tasks[group] = (torch.from_numpy(seqs[order]), torch.from_numpy(firsts[order]))
        return self._tasks[group]


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefill: PrefillRows,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attend to what each prefill row's query sees of its context and write it to the same row of `out`.

    Shapes and dtypes as for decode_attention; sums and softmax are float32, and the output is rounded once.
    A row has the same bits whatever rows are computed with it.
    """
    if not len(prefill.query_lens):
        return
    num_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    seqs, firsts = prefill.tasks(group)
    query = query.contiguous()
    longest = int(prefill.context_lens.max())
    kernel = _kernel(head_dim, soft_cap is not None, sinks is not None, query.dtype)
    kernel(
        len(seqs) * num_kv_heads,
        query,
        key_cache,
        value_cache,
        out,
        prefill.starts,
        torch.from_numpy(prefill.query_lens),
        torch.from_numpy(prefill.context_lens),
        prefill.block_tables,
        prefill.block_tables.shape[1],
        seqs,
        firsts,
        block_size,
        num_kv_heads,
        group,
        torch.empty(torch.get_num_threads() * _scratch_floats(head_dim)),
        scale,
        min(window or longest, longest),
        min(chunk or longest, longest),
        0.0 if soft_cap is None else float(soft_cap),
        0 if sinks is None else sinks,
    )


def _scratch_floats(head_dim: int) -> int:
    """Of one thread: queries and sums, scores, keys and values; six numbers of each query."""
    return 2 * head_dim * LANES + TILE * LANES + 2 * TILE * head_dim + 6 * LANES


@njit  # type: ignore[untyped-decorator]
def _floats(address: Any, row: Any, length: Any) -> Any:
    """Row `row` of a matrix of float32 with so many columns."""
    return carray(pointer_to(address + row * length * FLOAT_BYTES, float32), (length,))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _gather(
    rows: Any, pool: Any, table: Any, block_size: Any, kv_heads: Any, kv_head: Any, start: Any, first: Any,
    end: Any, head_dim: Any, element: Any,
) -> None:  # fmt: skip
    """Fill rows with a tile's keys or values from token `start` on; zeros for those not in first..end."""
    block, offset = start // block_size, start % block_size
    for t in range(TILE):
        row = _floats(rows, t, head_dim)
        if first <= start + t < end:
            place = (table[block] * block_size + offset) * kv_heads + kv_head
            stored = carray(row_pointer(pool, place, head_dim, element), (head_dim,))
            for d in range(head_dim):
                row[d] = wide(stored[d])
        else:
            for d in range(head_dim):
                row[d] = np.float32(0)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _hide(scores: Any, start: Any, lows: Any, highs: Any) -> None:
    """Mark the scores of tokens that a query does not see."""
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        token = np.int32(start + t)
        for i in range(LANES):
            row[i] = row[i] if lows[i] <= token and token <= highs[i] else LEAST


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _cap(scores: Any, soft_cap: Any) -> None:
    every = _floats(scores, 0, TILE * LANES)
    for i in range(TILE * LANES):
        every[i] = soft_cap * tanh(every[i] / soft_cap)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _soften(scores: Any, highest: Any, totals: Any, factors: Any) -> None:
    """Replace scores by softmax numerators; factors: what earlier sums are to be multiplied by."""
    for i in range(LANES):
        factors[i] = highest[i]
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        for i in range(LANES):
            highest[i] = max(highest[i], row[i])
    for i in range(LANES):
        factors[i] = exp_of_negative(factors[i] - highest[i])
        totals[i] *= factors[i]
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        for i in range(LANES):
            weight = exp_of_negative(row[i] - highest[i])
            row[i] = weight if row[i] > LEAST else np.float32(0)  # the highest may be one that is not seen
            totals[i] += row[i]


@cache
def _kernel(head_dim: int, has_cap: bool, has_sinks: bool, dtype: torch.dtype) -> Kernel:
    """One task is LANES queries of one KV head, over all that they see, tile after tile.

    Matrices are kept transposed, a query in each lane of a vector: softmax then runs down the lanes, and
    keys and values are used as they lie, one number multiplying all queries. Sums over a tile are kept in
    registers; softmax is rescaled as its maximum grows. Source: arXiv:2205.14135.
    """
    element = ELEMENTS[dtype]
    lane_bytes = LANES * FLOAT_BYTES
    tile_bytes = TILE * head_dim * FLOAT_BYTES
    rows_of_value = min(ROWS, head_dim & -head_dim)
    scratch_bytes = _scratch_floats(head_dim) * FLOAT_BYTES
    matrix = head_dim * LANES

    def kernel(parameters: Any) -> None:
        starts = pointer_to(parameters[7], int64)
        query_lens, context_lens = pointer_to(parameters[8], int64), pointer_to(parameters[9], int64)
        table_len = parameters[11]
        seqs, firsts = pointer_to(parameters[12], int64), pointer_to(parameters[13], int64)
        block_size, kv_heads, group = parameters[14], parameters[15], parameters[16]
        scale = np.float32(float_of(parameters[18]))
        window, chunk = parameters[19], parameters[20]
        soft_cap = np.float32(float_of(parameters[21]))
        sinks = pointer_to(parameters[22], float32)
        scratch = parameters[17] + worker_number(parameters) * scratch_bytes
        keys_at = scratch + (2 * head_dim + TILE) * lane_bytes
        sums_at, scores_at = scratch + head_dim * lane_bytes, scratch + 2 * head_dim * lane_bytes
        state_at = keys_at + 2 * tile_bytes
        queries = carray(pointer_to(scratch, float32), (matrix,))
        sums = carray(pointer_to(sums_at, float32), (matrix,))
        highest = carray(pointer_to(state_at, float32), (LANES,))
        totals = carray(pointer_to(state_at + lane_bytes, float32), (LANES,))
        factors = carray(pointer_to(state_at + 2 * lane_bytes, float32), (LANES,))
        lows = carray(pointer_to(state_at + 3 * lane_bytes, int32), (LANES,))
        highs = carray(pointer_to(state_at + 4 * lane_bytes, int32), (LANES,))
        task = next_task(parameters)
        while task >= 0:
            kv_head, seq = task % kv_heads, seqs[task // kv_heads]
            first = firsts[task // kv_heads]
            num_lanes = min(LANES, query_lens[seq] * group - first)
            before = context_lens[seq] - query_lens[seq]
            table = carray(pointer_to(parameters[10] + seq * table_len * 4, int32), (table_len,))
            for i in range(LANES):
                lane = first + min(i, num_lanes - 1)  # those that are too many repeat the last query
                token = before + lane // group
                head = kv_head * group + lane % group
                highs[i] = token
                lows[i] = max(0, token - window + 1, token // chunk * chunk)
                place = (starts[seq] + lane // group) * kv_heads * group + head
                query = carray(row_pointer(parameters[3], place, head_dim, element), (head_dim,))
                for d in range(head_dim):
                    queries[d * LANES + i] = wide(query[d]) * scale
                highest[i] = sinks[head] if has_sinks else LEAST
                totals[i] = np.float32(1) if has_sinks else np.float32(0)
            for i in range(matrix):
                sums[i] = np.float32(0)
            begin, end = np.int64(lows[0]), np.int64(highs[LANES - 1]) + 1
            for start in range(begin // TILE * TILE, end, TILE):
                _gather(
                    keys_at, parameters[4], table, block_size, kv_heads, kv_head, start, begin, end, head_dim,
                    element,
                )  # fmt: skip
                for t in range(0, TILE, ROWS):
                    add_outer_products(
                        keys_at + t * head_dim * FLOAT_BYTES, head_dim * FLOAT_BYTES, FLOAT_BYTES, scratch,
                        scores_at + t * lane_bytes, head_dim, False, ROWS, VECTORS,
                    )  # fmt: skip
                if has_cap:
                    _cap(scores_at, soft_cap)
                if start + TILE > highs[0] + 1 or start < lows[LANES - 1]:
                    _hide(scores_at, start, lows, highs)
                _soften(scores_at, highest, totals, factors)
                for d in range(head_dim):
                    row = _floats(sums_at, d, LANES)
                    for i in range(LANES):
                        row[i] *= factors[i]
                _gather(
                    keys_at + tile_bytes, parameters[5], table, block_size, kv_heads, kv_head, start, begin,
                    end, head_dim, element,
                )  # fmt: skip
                for d in range(0, head_dim, rows_of_value):
                    add_outer_products(
                        keys_at + tile_bytes + d * FLOAT_BYTES, FLOAT_BYTES, head_dim * FLOAT_BYTES,
                        scores_at, sums_at + d * lane_bytes, TILE, True, rows_of_value, VECTORS,
                    )  # fmt: skip
            for i in range(num_lanes):
                lane = first + i
                place = (starts[seq] + lane // group) * kv_heads * group + kv_head * group + lane % group
                out = carray(row_pointer(parameters[6], place, head_dim, element), (head_dim,))
                for d in range(head_dim):
                    out[d] = narrow(sums[d * LANES + i] / totals[i], element)
            task = next_task(parameters)

    return Kernel(kernel)
