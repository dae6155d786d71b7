"""Paged attention of sequences with several new tokens, over their blocks of keys and values."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64, literally, njit
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import FLOAT_BYTES, float_of, narrow, pointer_to, row_pointer
from engine.cpu_kernels.shared_prefix import SharedPrefix
from engine.cpu_kernels.softmax import LEAST, exp_of_negative, tanh
from engine.cpu_kernels.vectors import LONGEST_VECTOR, add_outer_products, transpose_square, widen_row

TILE = 64  # tokens whose keys and values are in work at once, the same ones for every query of a sequence
HAS_32_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"
# Sums in registers: VECTORS of queries, for each of ROWS tokens, or numbers of a value
VECTORS, ROWS = (4, 4) if HAS_32_REGISTERS else (1, 8)
LANES = VECTORS * LONGEST_VECTOR  # queries at once, heads of a group and tokens
NO_LIMIT = 2**31  # tokens: above what any sequence has


@dataclass(frozen=True)
class PrefillTasks:
    """The tasks of a launch: each is up to LANES queries of one KV head over a span of tokens.

    Queries of a KV head are its group's heads, row after row; a task's are adjacent.
    rows, positions: [rows] int64, of the step's query, and the tokens before each in its sequence.
    table, first, count: [tasks] int64, the sequence whose block table it reads, its first query and how many.
    begin, end: [tasks] int64, the span; end may be beyond what a query sees.
    """

    rows: Tensor
    positions: Tensor
    table: Tensor
    first: Tensor
    count: Tensor
    begin: Tensor
    end: Tensor


def tasks_of_sequences(
    starts: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    tables: NDArray[np.int64],
    begins: NDArray[np.int64],
    group: int,
    *,
    reach: int = 0,
) -> PrefillTasks:
    """Make tasks for the tokens that sequences see from `begins` on, the longest first if all are causal.

    starts: [seqs], the first row of each in the query.  tables: [seqs], each one's block table.
    reach: tokens behind its own that a query sees as well; a window has them in it.
    """
    rows = np.repeat(starts - (np.cumsum(query_lens) - query_lens), query_lens) + np.arange(query_lens.sum())
    lens_before = context_lens - query_lens
    positions = rows + np.repeat(lens_before - starts, query_lens)
    counts = -(-query_lens * group // LANES)
    seqs = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * LANES
    if not reach:  # else they are alike, and adjacent ones find a sequence's keys in the cache
        order = np.argsort(begins[seqs] - lens_before[seqs] - firsts // group, kind="stable")
        seqs, firsts = seqs[order], firsts[order]
    counts = np.minimum(LANES, query_lens[seqs] * group - firsts)
    firsts = firsts + (np.cumsum(query_lens) - query_lens)[seqs] * group
    parts = (rows, positions + reach, tables[seqs], firsts, counts, begins[seqs], context_lens[seqs])
    return PrefillTasks(*map(torch.from_numpy, parts))


def tasks_of_prefixes(
    prefixes: list[SharedPrefix],
    starts: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    group: int,
) -> PrefillTasks | None:
    """Make tasks for shared prefixes: the queries of all their sequences over each."""
    if not prefixes:
        return None
    parts = []
    num_rows = 0
    for prefix in prefixes:
        lens = query_lens[prefix.seqs]
        within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        rows = np.repeat(starts[prefix.seqs], lens) + within
        positions = np.repeat(context_lens[prefix.seqs] - lens, lens) + within
        firsts = np.arange(0, len(rows) * group, LANES)
        every = np.ones_like(firsts)
        parts.append((
            rows, positions, every * prefix.seqs[0], firsts + num_rows * group,
            np.minimum(LANES, len(rows) * group - firsts), every * 0, every * prefix.num_tokens,
        ))  # fmt: skip
        num_rows += len(rows)
    return PrefillTasks(*(torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True)))


def state_shape(query: Tensor) -> tuple[int, int, int]:
    """Return the shape of a prefix's kept state: of each head float32 sums, highest score and total."""
    num_rows, num_heads, head_dim = query.shape
    return num_rows, num_heads, head_dim + 2


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    tasks: PrefillTasks,
    out: Tensor,
    *,
    state: Tensor | None = None,
    keeps_state: bool = False,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attend with each task's queries to its span, and write to the same rows of `out`.

    Shapes and dtypes as for decode_attention. A row has the same bits whatever rows are computed with it.
    state: of `state_shape`. With keeps_state it is written in place of `out`, otherwise a task whose span
    does not begin at 0 goes on from it; at a multiple of TILE that gives the same bits as in one go.
    """
    if not len(tasks.table):
        return
    num_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = key_cache.shape
    query = query.contiguous()
    kernel = _kernel(head_dim, soft_cap is not None, sinks is not None, slopes is not None, query.dtype)
    kernel(
        len(tasks.table) * num_kv_heads, query, key_cache, value_cache, out, tasks.rows, tasks.positions,
        block_tables, block_tables.shape[1], tasks.table, tasks.first, tasks.count, tasks.begin, tasks.end,
        block_size, num_kv_heads, num_heads // num_kv_heads,
        torch.empty(torch.get_num_threads() * _scratch_floats(head_dim)), scale,
        window or NO_LIMIT, chunk or NO_LIMIT, 0.0 if soft_cap is None else float(soft_cap),
        0 if sinks is None else sinks, 0 if state is None else state, int(keeps_state),
        0 if slopes is None else slopes,
    )  # fmt: skip


def _scratch_floats(head_dim: int) -> int:
    """Count one thread's scratch: queries and sums, scores, keys and values; eight numbers of each query."""
    return 2 * head_dim * LANES + TILE * LANES + 2 * TILE * head_dim + 8 * LANES


@njit  # type: ignore[untyped-decorator]
def _floats(address: Any, row: Any, length: Any) -> Any:
    """Return row `row` of a matrix of float32 with so many columns."""
    return carray(pointer_to(address + row * length * FLOAT_BYTES, float32), (length,))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _gather(
    rows: Any, pool: Any, table: Any, block_size: Any, kv_heads: Any, kv_head: Any, start: Any, first: Any,
    end: Any, head_bytes: Any, head_dim: Any, element: Any,
) -> None:  # fmt: skip
    """Fill rows with a tile's keys or values from token `start` on; zeros for those not in first..end."""
    block, offset = start // block_size, start % block_size
    for t in range(TILE):
        if first <= start + t < end:
            place = (table[block] * block_size + offset) * kv_heads + kv_head
            row = rows + t * head_dim * FLOAT_BYTES
            widen_row(pool + place * head_bytes, row, literally(head_dim), element)
        else:
            row = _floats(rows, t, head_dim)
            for d in range(head_dim):
                row[d] = np.float32(0)
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _transpose(source: Any, num_rows: Any, num_columns: Any, target: Any) -> None:
    """Write a matrix of float32 with its columns as rows."""
    whole = num_rows // LONGEST_VECTOR * LONGEST_VECTOR, num_columns // LONGEST_VECTOR * LONGEST_VECTOR
    row_bytes, column_bytes = num_columns * FLOAT_BYTES, num_rows * FLOAT_BYTES
    for i in range(0, whole[0], LONGEST_VECTOR):
        for j in range(0, whole[1], LONGEST_VECTOR):
            here = source + i * row_bytes + j * FLOAT_BYTES
            transpose_square(here, row_bytes, target + j * column_bytes + i * FLOAT_BYTES, column_bytes)
    numbers, turned = _floats(source, 0, num_rows * num_columns), _floats(target, 0, num_rows * num_columns)
    for i in range(num_rows):
        for j in range(whole[1] if i < whole[0] else 0, num_columns):
            turned[j * num_rows + i] = numbers[i * num_columns + j]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _hide(scores: Any, start: Any, lows: Any, highs: Any) -> None:
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
def _lower(scores: Any, start: Any, owns: Any, slopes: Any) -> None:
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        token = np.int32(start + t)
        for i in range(LANES):
            row[i] -= slopes[i] * np.float32(owns[i] - token)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _soften(scores: Any, highest: Any, totals: Any, factors: Any) -> None:
    """Replace scores by softmax numerators; put the multipliers of earlier sums into factors."""
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
def _kernel(head_dim: int, has_cap: bool, has_sinks: bool, has_slopes: bool, dtype: torch.dtype) -> Kernel:
    """A task is LANES queries of one KV head. Matrices are transposed, a query a lane. Source: arXiv:2205.14135."""
    element = ELEMENTS[dtype]
    head_bytes = head_dim * (element.bitwidth // 8)
    lane_bytes = LANES * FLOAT_BYTES
    tile_bytes = TILE * head_dim * FLOAT_BYTES
    rows_of_value = min(ROWS, head_dim & -head_dim)
    scratch_bytes = _scratch_floats(head_dim) * FLOAT_BYTES
    matrix = head_dim * LANES

    def kernel(parameters: Any) -> None:
        rows, positions = pointer_to(parameters[7], int64), pointer_to(parameters[8], int64)
        table_len = parameters[10]
        tables, firsts = pointer_to(parameters[11], int64), pointer_to(parameters[12], int64)
        counts = pointer_to(parameters[13], int64)
        begins, ends = pointer_to(parameters[14], int64), pointer_to(parameters[15], int64)
        block_size, kv_heads, group = parameters[16], parameters[17], parameters[18]
        scale = np.float32(float_of(parameters[20]))
        window, chunk = parameters[21], parameters[22]
        soft_cap = np.float32(float_of(parameters[23]))
        sinks, slopes = pointer_to(parameters[24], float32), pointer_to(parameters[27], float32)
        states, keeps_state = parameters[25], parameters[26]
        scratch = parameters[19] + worker_number(parameters) * scratch_bytes
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
        owns = carray(pointer_to(state_at + 5 * lane_bytes, int32), (LANES,))
        lane_slopes = carray(pointer_to(state_at + 6 * lane_bytes, float32), (LANES,))
        places = carray(pointer_to(state_at + 7 * lane_bytes, int32), (LANES,))
        task = next_task(parameters)
        while task >= 0:
            kv_head, task = task % kv_heads, task // kv_heads
            first, num_lanes = firsts[task], counts[task]
            table = carray(pointer_to(parameters[9] + tables[task] * table_len * 4, int32), (table_len,))
            row, member = first // group, first % group
            for i in range(LANES):
                place = (rows[row] * kv_heads + kv_head) * group + member
                head = kv_head * group + member
                token = positions[row]
                places[i], owns[i], highs[i] = place, token, min(token, ends[task] - 1)
                lows[i] = max(begins[task], token - window + 1)
                if chunk < NO_LIMIT:
                    lows[i] = max(lows[i], token // chunk * chunk)
                if has_slopes:
                    lane_slopes[i] = slopes[head]
                highest[i] = sinks[head] if has_sinks else LEAST
                totals[i] = np.float32(1) if has_sinks else np.float32(0)
                widen_row(
                    parameters[3] + place * head_bytes,
                    sums_at + i * head_dim * FLOAT_BYTES,
                    literally(head_dim),
                    element,
                )
                if i + 1 < num_lanes:  # those that are too many repeat the last query
                    member += 1
                    if member == group:
                        row, member = row + 1, 0
            _transpose(sums_at, LANES, head_dim, scratch)
            for i in range(matrix):
                queries[i] *= scale
                sums[i] = np.float32(0)
            if begins[task] > 0:
                for i in range(LANES):
                    state = _floats(states, places[i], head_dim + 2)
                    for d in range(head_dim):
                        sums[d * LANES + i] = state[d]
                    highest[i], totals[i] = state[head_dim], state[head_dim + 1]
            begin, end = np.int64(lows[0]), np.int64(highs[LANES - 1]) + 1
            for start in range(begin // TILE * TILE, end, TILE):
                _gather(
                    keys_at, parameters[4], table, block_size, kv_heads, kv_head, start, begin, end,
                    head_bytes, head_dim, element,
                )  # fmt: skip
                for t in range(0, TILE, ROWS):
                    add_outer_products(
                        keys_at + t * head_dim * FLOAT_BYTES, head_dim * FLOAT_BYTES, FLOAT_BYTES, scratch,
                        scores_at + t * lane_bytes, head_dim, 0, False, ROWS, VECTORS,
                    )  # fmt: skip
                if has_cap:
                    _cap(scores_at, soft_cap)
                if has_slopes:
                    _lower(scores_at, start, owns, lane_slopes)
                if start + TILE > highs[0] + 1 or start < lows[LANES - 1]:
                    _hide(scores_at, start, lows, highs)
                _soften(scores_at, highest, totals, factors)
                _gather(
                    keys_at + tile_bytes, parameters[5], table, block_size, kv_heads, kv_head, start, begin,
                    end, head_bytes, head_dim, element,
                )  # fmt: skip
                for d in range(0, head_dim, rows_of_value):
                    add_outer_products(
                        keys_at + tile_bytes + d * FLOAT_BYTES, FLOAT_BYTES, head_dim * FLOAT_BYTES,
                        scores_at, sums_at + d * lane_bytes, TILE, state_at + 2 * lane_bytes, True,
                        rows_of_value, VECTORS,
                    )  # fmt: skip
            _transpose(sums_at, head_dim, LANES, scratch)
            for i in range(num_lanes):
                summed = _floats(scratch, i, head_dim)
                if keeps_state:
                    state = _floats(states, places[i], head_dim + 2)
                    for d in range(head_dim):
                        state[d] = summed[d]
                    state[head_dim], state[head_dim + 1] = highest[i], totals[i]
                else:
                    out = carray(row_pointer(parameters[6], places[i], head_dim, element), (head_dim,))
                    part = np.float32(1) / totals[i]
                    for d in range(head_dim):
                        out[d] = narrow(summed[d] * part, element)
            task = next_task(parameters)

    return Kernel(kernel)
