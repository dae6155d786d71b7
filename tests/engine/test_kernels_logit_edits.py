"""The kernel that edits logits gives the bits of the reference in torch, for rows of every kind at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.kernels.logit_edits import Entries
from engine.kernels.logit_edits import edit_logits as by_kernel
from engine.sampling.edit_logits import edit_logits as by_torch
from engine.sampling.logit_edits import EditParts, LogitEdits, token_mask
from tests.engine.paged import DEVICE

pytestmark = pytest.mark.long

VOCABS = (67, 300)
TILE = 128  # so that rows, and entries of a kind, are more than one
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_edits(rng: np.random.Generator, num_rows: int, vocab: int, adds: bool) -> tuple[LogitEdits, Tensor]:
    """Edits of some rows, and the tokens that are pending; few tokens, so that one has several kinds."""
    rows = np.sort(rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)])
    parts, few = EditParts(), rng.integers(2, vocab + 1)
    masks = [token_mask(rng.integers(0, few, 40).tolist(), size) for size in (vocab, max(vocab // 2, few))]
    sampled = torch.from_numpy(rng.integers(0, few, len(rows)))

    def tokens(most: int) -> np.ndarray:
        return rng.permutation(few)[: rng.integers(0, most)]

    for place in range(len(rows)):
        is_pending = rng.random() < 0.5
        if is_pending:
            parts.pending.append((place, int(rng.integers(len(rows)))))
        if rng.random() < 0.4:
            parts.allow(place, masks[rng.integers(2)])
        parts.banned.append((place, tokens(200).astype(np.int64)))
        if is_pending:
            parts.banned_behind.append((place, rng.integers(0, few, (rng.integers(0, 300), 2))))
        if adds and rng.random() < 0.7:
            biased = tokens(200).astype(np.int64)
            parts.biased.append((place, biased))
            parts.biases.append(rng.normal(0, 9, len(biased)).astype(np.float32))
        if adds and rng.random() < 0.7:
            counted = tokens(400).astype(np.int32)
            entries = np.stack((counted, rng.integers(0, 5, len(counted)).astype(np.int32)), axis=1)
            if is_pending:
                entries = np.concatenate((entries, np.array([[-1, 0]], np.int32)))
            presence, frequency = rng.choice((0.0, 0.3, -1.7, 2.0), 2).tolist()
            parts.penalize(place, (presence, frequency, float(rng.choice((1.0, 0.4, 1.7)))), entries)
    for place in range(len(rows)):  # as those of min_tokens, behind all others
        parts.banned.append((place, tokens(4).astype(np.int64)))
    return parts.joined(rows), sampled


def edit_by_kernel(logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
    entries = Entries(*(getattr(edits, name) for name in Entries._fields))
    on_device = None if sampled is None else sampled.to(DEVICE)
    return by_kernel(logits.to(DEVICE), edits.rows, entries, on_device, tile=TILE).cpu()


def assert_same_bits(logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
    expected = by_torch(logits.clone(), edits, sampled)
    found = edit_by_kernel(logits.clone(), edits, sampled)
    assert found.dtype == expected.dtype
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(bits), expected.view(bits))
    return found


@given(seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES), adds=st.booleans())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_the_bits_are_those_of_the_reference(seed: int, dtype: torch.dtype, adds: bool) -> None:
    rng = np.random.default_rng(seed)
    vocab, num_rows = int(rng.choice(VOCABS)), int(rng.integers(1, 4))
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    logits[rng.integers(num_rows), rng.integers(vocab)] = -torch.inf
    edits, sampled = make_edits(rng, num_rows, vocab, adds)
    assert_same_bits(logits, edits, sampled)


def test_tokens_that_could_not_be_chosen_change_nothing() -> None:
    """-1 is pending: neither what is banned behind a token counts, nor the entry that stands for it."""
    parts = EditParts(pending=[(0, 0)], banned_behind=[(0, np.array([[3, 4], [0, 5]]))])
    parts.penalize(0, (9.0, 9.0, 9.0), np.array([[-1, 0]], np.int32))
    logits = torch.randn(1, 70)
    found = edit_by_kernel(logits.clone(), parts.joined(np.array([0])), torch.tensor([-1]))
    assert torch.equal(found, logits)
