"""Log probabilities and ranks of given tokens as one Triton kernel.

It computes what engine/sampling/token_scores.py does, and reads a row's logits once for each of its tokens. Plain torch
copies the logits to float32, and reads them again for the maximum, for the sum, and for the ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu_draws import as_float32, load_tile

TILE = 4096
#: The highest logit is kept within this bound, so that a row with infinite logits has the same sum as in torch. It is
#: half of the largest number, so that the difference of two bounds is finite too.
BOUND = tl.constexpr(torch.finfo(torch.float32).max / 2)


@triton.jit
def score_kernel(
    logprobs_ptr, ranks_ptr, totals_ptr, logits_ptr, token_ids_ptr, rows_ptr, row_stride,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (token): score the token. Programs of one row write the same total."""
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    token_id = tl.load(token_ids_ptr + place)
    row_ptr = logits_ptr + row * row_stride
    own_logit = as_float32(tl.load(row_ptr + token_id))

    highest = tl.full([], -BOUND, tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    num_before = tl.zeros([TILE], tl.int32)
    for tile in tl.range(0, TILES, num_stages=3):
        ids, logits = load_tile(row_ptr, tile, VOCAB, TILE)
        new_highest = tl.minimum(tl.maximum(highest, tl.max(logits, 0)), BOUND)
        sums = sums * tl.exp(highest - new_highest) + tl.exp(logits - new_highest)
        highest = new_highest
        is_before = (logits > own_logit) | ((logits == own_logit) & (ids < token_id))
        num_before += is_before.to(tl.int32)

    total = highest + tl.log(tl.sum(sums, 0))
    tl.store(logprobs_ptr + place, own_logit - total)
    tl.store(ranks_ptr + place, 1 + tl.sum(num_before, 0).to(tl.int64))
    tl.store(totals_ptr + row, total)


def score_tokens(
    logits: Tensor, token_ids: Tensor, rows: Tensor, *, tile: int = TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of TokenScores. The order in which a row is summed depends on the vocabulary's size alone.

    logits: [rows, vocabulary] bfloat16, float16 or float32; rows may lie apart.
    token_ids, rows: [tokens] int64, as in engine/sampling/token_scores.py.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    assert logits.stride(1) == 1
    assert token_ids.is_contiguous()
    assert rows.is_contiguous()
    logprobs = torch.empty(len(rows), dtype=torch.float32, device=device)
    ranks = torch.empty(len(rows), dtype=torch.int64, device=device)
    totals = torch.empty(num_rows, dtype=torch.float32, device=device)
    if len(rows):
        score_kernel[(len(rows),)](
            logprobs, ranks, totals, logits, token_ids, rows, logits.stride(0),
            VOCAB=vocab_size, TILES=triton.cdiv(vocab_size, tile), TILE=tile,
            num_warps=max(tile // 256, 1),  # 8 logits, 16 bytes of bfloat16, for each thread
        )  # fmt: skip
    return logprobs, ranks, totals
