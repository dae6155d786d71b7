"""Applies LogitEdits on the logits' device, in plain torch and without waiting for the device."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.upload import upload
from engine.sampling.logit_edits import WORD, LogitEdits

MASKED_AT_ONCE = 64  # rows, which bounds the scratch: 64 of 152k tokens take 100 MB and more


def edit_logits(logits: Tensor, edits: LogitEdits, sampled: Tensor | None = None) -> Tensor:
    """Return the edited logits, in float32 if numbers are added to any row.

    logits: [rows, vocabulary] of any floating dtype, which are changed.  sampled: [any] int64, the pending tokens.
    """
    names = [field.name for field in fields(edits)]
    parts = upload([getattr(edits, name) for name in names], logits.device)  # in one transfer
    on_device: Any = SimpleNamespace(**dict(zip(names, parts, strict=True)))
    last = None  # [edited] int64, the pending token of each place, -1 where none is
    if len(edits.pending):
        assert sampled is not None, "only a step that follows another has pending tokens"
        last = torch.full((len(edits.rows),), -1, dtype=torch.int64, device=logits.device)
        last[on_device.pending[:, 0]] = sampled[on_device.pending[:, 1]]
    if len(edits.biased) or len(edits.counted):
        logits = logits.float()
    _mask(logits, on_device)
    _ban(logits, on_device, last)
    _bias(logits, on_device)
    _penalize(logits, on_device, last)
    return logits


def _mask(logits: Tensor, edits: Any) -> None:
    bits = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    for start in range(0, len(edits.masked), MASKED_AT_ONCE):
        place, mask = edits.masked[start : start + MASKED_AT_ONCE].unbind(1)
        is_banned = (edits.token_masks[mask].unsqueeze(2) >> bits) & 1 == 0
        rows = edits.rows[place]
        num_tokens = min(logits.shape[1], is_banned[0].numel())
        masked = torch.full_like(logits[rows], -torch.inf)  # a mask allows no token beyond its end
        masked[:, :num_tokens] = logits[rows, :num_tokens].masked_fill_(
            is_banned.flatten(1)[:, :num_tokens], -torch.inf
        )
        logits[rows] = masked


def _ban(logits: Tensor, edits: Any, last: Tensor | None) -> None:
    if len(edits.banned):
        place, token = edits.banned.unbind(1)
        logits[edits.rows[place], token] = -torch.inf
    if len(edits.banned_behind) and last is not None:
        place, before, token = edits.banned_behind.unbind(1)
        # Added, not set: a token may be banned behind several others, and only one of these is the pending token.
        change = torch.zeros(len(place), dtype=logits.dtype, device=logits.device)
        change.masked_fill_(last[place] == before, -torch.inf)
        logits.index_put_((edits.rows[place], token), change, accumulate=True)


def _bias(logits: Tensor, edits: Any) -> None:
    if len(edits.biased):
        place, token = edits.biased.unbind(1)
        at = edits.rows[place], token
        logits[at] = logits[at] + edits.biases


def _penalize(logits: Tensor, edits: Any, last: Tensor | None) -> None:
    if not len(edits.counted):
        return
    token, count = edits.counted.long().unbind(1)
    # [counted] int64: which of `penalized` each entry belongs to
    owner = torch.arange(len(edits.penalized), device=logits.device)
    owner = owner.repeat_interleave(edits.num_counted, output_size=len(token))
    if last is not None:
        token, count = _count_pending(owner, token, count, last[edits.penalized])
    presence, frequency, repetition = edits.penalties[owner].unbind(1)
    rows = edits.rows[edits.penalized][owner]
    values = logits[rows, token]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[rows, token] = values - frequency * count - presence * (count > 0)


def _count_pending(
    owner: Tensor, token: Tensor, count: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens and counts with pending tokens counted in.

    owner, token, count: [counted]; owner is an index into `last`. last: [penalized], each row's pending token.
    """
    is_pending = token < 0
    own_last = last[owner]
    is_last = (token == own_last) & ~is_pending
    count_before = torch.zeros_like(last).index_add_(0, owner, count * is_last)
    count = torch.where(is_pending, count_before[owner] + 1, count + is_last)
    token = torch.where(is_pending, own_last, token)
    # A pending token is -1 where no token could be chosen. That row's next sample is dropped, so any index will do.
    return token.clamp_(min=0), count
