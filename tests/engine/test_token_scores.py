"""Kernels that score tokens give plain torch's log probabilities and ranks, whatever the logits are."""

import pytest
import torch
from torch import Tensor

from engine.attention import load_backend
from engine.attention.base import KernelBackend
from engine.sampling.token_scores import TokenScores, score_tokens

CLOSE = 1e-4
CPU = torch.device("cpu")
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Each kernel's backend, and the dtypes that it takes.
KERNELS = {"cpu": ("numba", ALL_DTYPES[:2]), "triton": ("triton", ALL_DTYPES)}
#: Of the GPU's kernel, whose tiles have 4,096 logits: within one, at its edges, and a real model's.
VOCABULARIES = (1, 307, 4095, 4096, 4097, 8193, 151_936)


def backend_of(name: str) -> KernelBackend:
    """Return a backend, or skip the test where its package is not installed."""
    package, _ = KERNELS[name]
    pytest.importorskip(package, reason=f"{package} is not installed, so the kernel cannot run")
    return load_backend(name, CPU)


def tied_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    """Draw logits of few values, so that many are equal, in rows that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size + 26, generator=generator) * 4
    return logits.round().to(dtype)[:, :vocab_size]


def assert_same_scores(scores: TokenScores, expected: TokenScores) -> None:
    """Compare with plain torch's scores. Ranks are equal, and what is infinite or no number is so in both."""
    assert scores.ranks.dtype == torch.int64
    assert scores.ranks.equal(expected.ranks)
    for name in ("logprobs", "totals"):
        found = getattr(scores, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(
            found, getattr(expected, name), rtol=0, atol=CLOSE, equal_nan=True, msg=name
        )


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in KERNELS.items() for dtype in dtypes]
)
def test_a_kernel_says_what_torch_does_of_several_tokens_a_row(
    name: str, dtype: torch.dtype
) -> None:
    """Of equal logits too, of rows that lie apart, of banned tokens, and at both ends of the vocabulary."""
    logits = tied_logits(9, 307, dtype)
    logits[5, ::2] = -torch.inf
    generator = torch.Generator().manual_seed(6)
    ends = torch.randint(1, 6, (9,), generator=generator).cumsum(0)
    rows = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
    token_ids = torch.randint(307, (len(rows),), generator=generator)
    token_ids[0] = 0
    token_ids[-1] = 306
    token_ids[rows == 5] = 1
    token_ids[int((rows == 5).nonzero()[0])] = 2  # which is banned

    scores = backend_of(name).score(logits, token_ids, rows)

    assert_same_scores(scores, score_tokens(logits, token_ids, rows))


# Triton's interpreter computes with numpy, which warns of infinity minus infinity
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_has_no_number_has_no_log_probability(name: str) -> None:
    """NaN, infinity, and nothing but minus infinity; the rows between them are as they would be alone."""
    logits = tied_logits(5, 307, torch.float32)
    logits[0, 7] = torch.nan
    logits[2, 9] = torch.inf
    logits[4] = -torch.inf
    rows = torch.arange(5)
    token_ids = torch.tensor([3, 4, 9, 5, 6])

    scores = backend_of(name).score(logits, token_ids, rows)

    expected = score_tokens(logits, token_ids, rows)
    assert scores.logprobs[[0, 2, 4]].isnan().all()
    assert (scores.logprobs - expected.logprobs)[[1, 3]].abs().max() < CLOSE
    assert scores.ranks[[1, 3]].equal(expected.ranks[[1, 3]])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_gpu_kernel_says_what_torch_does_of_vocabularies_of_any_size(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """Tokens at the ends of tiles. The largest logits come late, or early."""
    logits = tied_logits(3, vocab_size, dtype)
    logits[0, -1] = 60
    logits[1, 0] = 60
    rows = torch.arange(3).repeat_interleave(2)
    last = vocab_size - 1
    token_ids = torch.tensor([last, 0, last // 2, min(4095, last), min(4096, last), last])

    scores = backend_of("triton").score(logits, token_ids, rows)

    assert_same_scores(scores, score_tokens(logits, token_ids, rows))


@pytest.mark.parametrize("name", KERNELS)
def test_a_rows_scores_have_the_same_bits_beside_any_other_rows(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 9000, generator=generator).bfloat16()
    token_ids = torch.randint(9000, (7,), generator=generator)
    backend = backend_of(name)

    together = backend.score(logits, token_ids, torch.arange(7))
    alone = [
        backend.score(logits[row : row + 1], token_ids[row : row + 1], torch.arange(1))
        for row in range(7)
    ]

    for field, whole in zip(TokenScores._fields, together, strict=True):
        assert torch.cat([getattr(scores, field) for scores in alone]).equal(whole), field


@pytest.mark.parametrize("name", KERNELS)
def test_no_tokens_have_no_scores(name: str) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    scores = backend_of(name).score(torch.empty(0, 307), nothing, nothing)
    assert [len(part) for part in scores] == [0, 0, 0]
