"""Paged attention of sequences with several new tokens, over their blocks of keys and values."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64, literally
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import (
    FLOAT_BYTES,
    float_of,
    helper,
    narrow,
    pointer_to,
    row_pointer,
)
from engine.cpu_kernels.softmax import LEAST, tanh
from engine.cpu_kernels.vectors import (
    LONGEST_VECTOR,
    add_outer_products,
    copy_words,
    interleave,
    soften,
    transpose_square,
)
from engine.kernels.attention.shared_prefix import SharedPrefix

TILE = 64  # tokens whose keys and values are in work at once, the same ones for every query of a sequence
HAS_32_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"
# Sums in registers: VECTORS of queries, for each of ROWS tokens, or numbers of a value
VECTORS, ROWS = (4, 4) if HAS_32_REGISTERS else (1, 8)
LANES = VECTORS * LONGEST_VECTOR  # queries at once, heads of a group and tokens
BLOCKS = 4  # of LANES queries in a task, over the same keys and values
TASK_LANES = BLOCKS * LANES
NO_LIMIT = 2**31  # tokens: above what any sequence has


@dataclass(frozen=True)
class PrefillTasks:
    """The tasks of a launch: each is up to TASK_LANES queries of one KV head over a span of tokens.

    The queries of a KV head are numbered row after row, and in a row by the heads of its group.
    rows: [rows] int64, the rows of the step's query.  positions: [rows] int64, their positions in their sequences.
    table: [tasks] int64, the sequence whose block table a task reads.
    first, count: [tasks] int64, a task's first query, and how many queries it has from there on.
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
    """Make tasks in which each sequence's queries attend to its tokens from `begins` on.

    starts: [seqs], each sequence's first row in the query.  tables: [seqs], the number of its block table.
    reach: how many tokens after its own a query sees as well; a window's length includes them.
    Without a reach, the longest tasks come first.
    """
    queries_before = np.cumsum(query_lens) - query_lens
    rows = np.repeat(starts - queries_before, query_lens) + np.arange(query_lens.sum())
    lens_before = context_lens - query_lens
    positions = rows + np.repeat(lens_before - starts, query_lens)
    num_tasks = -(-query_lens * group // TASK_LANES)
    tasks_before = np.cumsum(num_tasks) - num_tasks
    seqs = np.repeat(np.arange(len(num_tasks)), num_tasks)
    firsts = (np.arange(len(seqs)) - np.repeat(tasks_before, num_tasks)) * TASK_LANES
    if not reach:  # with a reach tasks are equally long; in this order they find a sequence's keys in the cache
        # the tasks whose first query sees the most tokens come first
        order = np.argsort(begins[seqs] - lens_before[seqs] - firsts // group, kind="stable")
        seqs = seqs[order]
        firsts = firsts[order]
    counts = np.minimum(TASK_LANES, query_lens[seqs] * group - firsts)
    firsts = firsts + queries_before[seqs] * group
    parts = (
        rows,
        positions + reach,
        tables[seqs],
        firsts,
        counts,
        begins[seqs],
        context_lens[seqs],
    )
    return PrefillTasks(*map(torch.from_numpy, parts))


def tasks_of_prefixes(
    prefixes: list[SharedPrefix],
    starts: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    group: int,
) -> PrefillTasks | None:
    """Make tasks in which the queries of all sequences with a shared prefix attend to the prefix."""
    if not prefixes:
        return None
    parts = []
    num_rows = 0
    for prefix in prefixes:
        lens = query_lens[prefix.seqs]
        # each new token's number among its sequence's new tokens
        within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        rows = np.repeat(starts[prefix.seqs], lens) + within
        positions = np.repeat(context_lens[prefix.seqs] - lens, lens) + within
        firsts = np.arange(0, len(rows) * group, TASK_LANES)
        counts = np.minimum(TASK_LANES, len(rows) * group - firsts)
        tables = np.full_like(firsts, prefix.seqs[0])
        begins = np.zeros_like(firsts)
        ends = np.full_like(firsts, prefix.num_tokens)
        parts.append((rows, positions, tables, firsts + num_rows * group, counts, begins, ends))
        num_rows += len(rows)
    return PrefillTasks(
        *(torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    )


def state_shape(query: Tensor) -> tuple[int, int, int]:
    """Return the shape of a prefix's kept state, float32: each head's sums, then its highest score and its total."""
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
    state: of `state_shape`. With keeps_state it is written, and `out` is not. Otherwise a task whose span does not
    begin at 0 starts from it. If the span begins at a multiple of TILE, the bits are those of one span from 0.
    """
    if not len(tasks.table):
        return
    num_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = key_cache.shape
    query = query.contiguous()
    kernel = _kernel(
        head_dim, soft_cap is not None, sinks is not None, slopes is not None, query.dtype
    )
    kernel(
        len(tasks.table) * num_kv_heads, query, key_cache, value_cache, out, tasks.rows, tasks.positions,
        block_tables, block_tables.shape[1], tasks.table, tasks.first, tasks.count, tasks.begin, tasks.end,
        block_size, num_kv_heads, num_heads // num_kv_heads,
        torch.empty(torch.get_num_threads() * _scratch_floats(head_dim)), scale,
        window or NO_LIMIT, chunk or NO_LIMIT, 0.0 if soft_cap is None else float(soft_cap),
        0 if sinks is None else sinks, 0 if state is None else state, int(keeps_state),
        0 if slopes is None else slopes,
    )  # fmt: skip


def _block_floats(head_dim: int) -> int:
    """Count the floats of a block's scratch: its queries, their sums, and eight more numbers for each query."""
    return (2 * head_dim + 8) * LANES


def _scratch_floats(head_dim: int) -> int:
    """Count the floats of a thread's scratch: blocks, scores, keys, values before and after interleaving, the scale."""
    return BLOCKS * _block_floats(head_dim) + TILE * LANES + 3 * TILE * head_dim + LANES


@helper()
def _floats(address: Any, row: Any, length: Any) -> Any:
    """Return row `row` of a matrix of float32 with `length` columns."""
    return carray(pointer_to(address + row * length * FLOAT_BYTES, float32), (length,))


@helper()
def _words(address: Any, row: Any, length: Any) -> Any:
    """Return row `row` of a matrix of words of four bytes with `length` columns."""
    return carray(pointer_to(address + row * length * FLOAT_BYTES, int32), (length,))


@helper(error_model="numpy")
def _gather(
    rows: Any, pool: Any, table: Any, block_size: Any, kv_heads: Any, kv_head: Any, start: Any, first: Any,
    end: Any, num_words: Any,
) -> None:  # fmt: skip
    """Fill rows with the keys or values of a tile of tokens from `start` on, and zeros for those not in first..end."""
    block, offset = start // block_size, start % block_size
    for t in range(TILE):
        if first <= start + t < end:
            place = (table[block] * block_size + offset) * kv_heads + kv_head
            row_bytes = num_words * FLOAT_BYTES
            copy_words(pool + place * row_bytes, rows + t * row_bytes, literally(num_words))
        else:
            row = _words(rows, t, num_words)
            for d in range(num_words):
                row[d] = 0
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@helper(error_model="numpy")
def _transpose(source: Any, num_rows: Any, num_columns: Any, target: Any) -> None:
    """Write a matrix of words of four bytes with its columns as rows."""
    # the rows and columns that make whole squares
    whole = (
        num_rows // LONGEST_VECTOR * LONGEST_VECTOR,
        num_columns // LONGEST_VECTOR * LONGEST_VECTOR,
    )
    row_bytes, column_bytes = num_columns * FLOAT_BYTES, num_rows * FLOAT_BYTES
    for i in range(0, whole[0], LONGEST_VECTOR):
        for j in range(0, whole[1], LONGEST_VECTOR):
            here = source + i * row_bytes + j * FLOAT_BYTES
            transpose_square(
                here, row_bytes, target + j * column_bytes + i * FLOAT_BYTES, column_bytes
            )
    numbers, turned = (
        _words(source, 0, num_rows * num_columns),
        _words(target, 0, num_rows * num_columns),
    )
    # the numbers outside the squares, one by one
    for i in range(num_rows):
        for j in range(whole[1] if i < whole[0] else 0, num_columns):
            turned[j * num_rows + i] = numbers[i * num_columns + j]


@helper(error_model="numpy")
def _hide(scores: Any, start: Any, lows: Any, highs: Any) -> None:
    """Set scores to LEAST for the tokens outside lows..highs, which a query does not see."""
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        token = np.int32(start + t)
        for i in range(LANES):
            row[i] = row[i] if lows[i] <= token and token <= highs[i] else LEAST


@helper(fastmath={"contract", "nsz"}, error_model="numpy")
def _cap(scores: Any, soft_cap: Any) -> None:
    every = _floats(scores, 0, TILE * LANES)
    for i in range(TILE * LANES):
        every[i] = soft_cap * tanh(every[i] / soft_cap)


@helper(fastmath={"contract", "nsz"}, error_model="numpy")
def _lower(scores: Any, start: Any, owns: Any, slopes: Any) -> None:
    """Lower scores by each query's slope times its distance to the token. owns: the queries' own positions."""
    for t in range(TILE):
        row = _floats(scores, t, LANES)
        token = np.int32(start + t)
        for i in range(LANES):
            row[i] -= slopes[i] * np.float32(owns[i] - token)


@cache
def _kernel(
    head_dim: int, has_cap: bool, has_sinks: bool, has_slopes: bool, dtype: torch.dtype
) -> Kernel:
    """A task is BLOCKS * LANES queries of one KV head, over the same tiles of keys and values.

    Matrices are transposed, so that each lane is a query. A word is a float32, or two adjacent numbers in bfloat16.
    Source: arXiv:2205.14135.
    """
    element = ELEMENTS[dtype]
    per_word = FLOAT_BYTES // (element.bitwidth // 8)
    head_words = head_dim // per_word
    lane_bytes = LANES * FLOAT_BYTES
    row_bytes = head_words * FLOAT_BYTES
    rows_of_value = min(ROWS, head_dim & -head_dim)
    block_bytes = _block_floats(head_dim) * FLOAT_BYTES
    scratch_bytes = _scratch_floats(head_dim) * FLOAT_BYTES
    sums_offset = head_dim * lane_bytes
    state_offset = 2 * head_dim * lane_bytes

    def kernel(parameters: Any) -> None:
        rows, positions = pointer_to(parameters[7], int64), pointer_to(parameters[8], int64)
        table_len = parameters[10]
        tables, firsts = pointer_to(parameters[11], int64), pointer_to(parameters[12], int64)
        counts = pointer_to(parameters[13], int64)
        begins, ends = pointer_to(parameters[14], int64), pointer_to(parameters[15], int64)
        block_size, kv_heads, group = parameters[16], parameters[17], parameters[18]
        window, chunk = parameters[21], parameters[22]
        soft_cap = np.float32(float_of(parameters[23]))
        sinks, slopes = pointer_to(parameters[24], float32), pointer_to(parameters[27], float32)
        states, keeps_state = parameters[25], parameters[26]
        scratch = parameters[19] + worker_number(parameters) * scratch_bytes
        scores_at = scratch + BLOCKS * block_bytes
        keys_at = scores_at + TILE * lane_bytes
        values_at = keys_at + TILE * row_bytes
        # the values as gathered; those in bfloat16 are then interleaved into values_at
        raw_at = values_at + (per_word - 1) * TILE * row_bytes
        scale_at = raw_at + TILE * row_bytes
        scales = _floats(scale_at, 0, LANES)
        for i in range(LANES):
            scales[i] = np.float32(float_of(parameters[20]))
        task = next_task(parameters)
        while task >= 0:
            kv_head, task = task % kv_heads, task // kv_heads
            first, num_lanes = firsts[task], counts[task]
            num_blocks = (num_lanes + LANES - 1) // LANES
            table = carray(
                pointer_to(parameters[9] + tables[task] * table_len * 4, int32), (table_len,)
            )
            begin, end = np.int64(NO_LIMIT), np.int64(0)
            # each block's queries, transposed, and the tokens that each query sees
            for block in range(num_blocks):
                queries_at = scratch + block * block_bytes
                sums_at, state_at = queries_at + sums_offset, queries_at + state_offset
                sums = _floats(sums_at, 0, head_dim * LANES)
                highest, totals = _floats(state_at, 0, LANES), _floats(state_at, 1, LANES)
                lows, highs = _words(state_at, 3, LANES), _words(state_at, 4, LANES)
                owns, lane_slopes = _words(state_at, 5, LANES), _floats(state_at, 6, LANES)
                places = _words(state_at, 7, LANES)
                lane = first + block * LANES
                row, member = lane // group, lane % group
                for i in range(LANES):
                    head = kv_head * group + member
                    place, token = rows[row] * kv_heads * group + head, positions[row]
                    places[i], owns[i], highs[i] = place, token, min(token, ends[task] - 1)
                    lows[i] = max(begins[task], token - window + 1)
                    if chunk < NO_LIMIT:
                        lows[i] = max(lows[i], token // chunk * chunk)
                    if has_slopes:
                        lane_slopes[i] = slopes[head]
                    highest[i] = sinks[head] if has_sinks else LEAST
                    totals[i] = np.float32(1) if has_sinks else np.float32(0)
                    copy_words(
                        parameters[3] + place * row_bytes,
                        sums_at + i * row_bytes,
                        literally(head_words),
                    )
                    if block * LANES + i + 1 < num_lanes:  # lanes after the last query repeat it
                        member += 1
                        if member == group:
                            row, member = row + 1, 0
                _transpose(sums_at, LANES, head_words, queries_at)
                for i in range(head_dim * LANES):
                    sums[i] = np.float32(0)
                if begins[task] > 0:
                    for i in range(LANES):
                        state = _floats(states, places[i], head_dim + 2)
                        for d in range(head_dim):
                            sums[d * LANES + i] = state[d]
                        highest[i], totals[i] = state[head_dim], state[head_dim + 1]
                begin, end = min(begin, np.int64(lows[0])), max(end, np.int64(highs[LANES - 1]) + 1)
            # one tile of keys and values after the other, for all blocks
            for start in range(begin // TILE * TILE, end, TILE):
                _gather(
                    keys_at,
                    parameters[4],
                    table,
                    block_size,
                    kv_heads,
                    kv_head,
                    start,
                    begin,
                    end,
                    head_words,
                )
                _gather(
                    raw_at,
                    parameters[5],
                    table,
                    block_size,
                    kv_heads,
                    kv_head,
                    start,
                    begin,
                    end,
                    head_words,
                )
                if per_word == 2:
                    for t in range(0, TILE, 2):
                        raw = raw_at + t * row_bytes
                        interleave(raw, raw + row_bytes, values_at + t * row_bytes, head_dim)
                for block in range(num_blocks):
                    queries_at = scratch + block * block_bytes
                    sums_at, state_at = queries_at + sums_offset, queries_at + state_offset
                    lows, highs = _words(state_at, 3, LANES), _words(state_at, 4, LANES)
                    if start > highs[LANES - 1] or start + TILE <= lows[0]:
                        continue
                    num_tokens = int64(min(TILE, (highs[LANES - 1] - start + ROWS) // ROWS * ROWS))
                    for t in range(0, num_tokens, ROWS):
                        add_outer_products(
                            keys_at + t * row_bytes, row_bytes, FLOAT_BYTES, queries_at, scores_at + t * lane_bytes,
                            head_words, scale_at, False, ROWS, VECTORS, element,
                        )  # fmt: skip
                    if has_cap:
                        _cap(scores_at, soft_cap)
                    if has_slopes:
                        _lower(
                            scores_at,
                            start,
                            _words(state_at, 5, LANES),
                            _floats(state_at, 6, LANES),
                        )
                    if start + TILE > highs[0] + 1 or start < lows[LANES - 1]:
                        _hide(scores_at, start, lows, highs)
                    soften(scores_at, state_at, num_tokens, VECTORS, element)
                    for d in range(0, head_dim, rows_of_value):
                        add_outer_products(
                            values_at + d * FLOAT_BYTES, FLOAT_BYTES, head_dim * FLOAT_BYTES, scores_at,
                            sums_at + d * lane_bytes, num_tokens // per_word, state_at + 2 * lane_bytes, True,
                            rows_of_value, VECTORS, element,
                        )  # fmt: skip
            # each query's result, or its state
            for i in range(num_lanes):
                own, block_at = i % LANES, scratch + i // LANES * block_bytes
                if own == 0:
                    _transpose(block_at + sums_offset, head_dim, LANES, block_at)
                summed, state_at = _floats(block_at, own, head_dim), block_at + state_offset
                place, total = _words(state_at, 7, LANES)[own], _floats(state_at, 1, LANES)[own]
                if keeps_state:
                    state = _floats(states, place, head_dim + 2)
                    for d in range(head_dim):
                        state[d] = summed[d]
                    state[head_dim], state[head_dim + 1] = _floats(state_at, 0, LANES)[own], total
                else:
                    out = carray(row_pointer(parameters[6], place, head_dim, element), (head_dim,))
                    share = np.float32(1) / total
                    for d in range(head_dim):
                        out[d] = narrow(summed[d] * share, element)
            task = next_task(parameters)

    return Kernel(kernel)
