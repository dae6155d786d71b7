"""Log probabilities and ranks of given tokens, in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """Log probabilities and ranks of given tokens.

    logprobs: [tokens] float32, log probabilities.  ranks: [tokens] int64, 1 for a row's likeliest token; of equal
    logits the lower id comes first.  totals: [rows] float32, each row's log-sum-exp.
    """

    logprobs: Tensor
    ranks: Tensor
    totals: Tensor


def score_tokens(logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenScores:
    """Score tokens by the rows of logits that they belong to.

    logits: [rows, vocabulary], of any floating dtype.  token_ids: [tokens] int64.  rows: [tokens] int64, ascending,
    the row of each token; each row has at least one.
    """
    logits = logits.float()
    totals = logits.logsumexp(-1)
    token_logits = logits[rows, token_ids]
    vocab_ids = torch.arange(logits.shape[1], device=logits.device)
    ranks = []
    for part in torch.split(torch.arange(len(rows), device=logits.device), len(logits)):
        # A part has at most as many tokens as logits has rows, so `numbers` takes no more memory than logits.
        numbers = logits if len(rows) == len(logits) else logits[rows[part]]
        own_logits = token_logits[part, None]
        before = vocab_ids < token_ids[part, None]
        # a rank is 1 plus the tokens with a higher logit, or with the same logit and a lower id
        ranks.append(1 + ((numbers > own_logits) | ((numbers == own_logits) & before)).sum(-1))
    return TokenScores(token_logits - totals[rows], torch.cat(ranks), totals)
