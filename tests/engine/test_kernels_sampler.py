"""The sampler's kernels choose the tokens of the reference in torch, and weigh each token as it does.

On random rows of every kind, and on what such rows hardly meet.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

import triton
import triton.language as tl

from engine.kernels.sampler import weigh
from engine.kernels.token_weights import FRACTION_BITS, WHOLE
from engine.sampling import weights
from tests.engine.paged import DEVICE
from tests.engine.sampler_cases import by_triton, cases, differences, make_case

pytestmark = pytest.mark.long


def test_a_sample_of_random_rows() -> None:
    assert [
        line for case in cases(seed=77, num_rows=40) for line in differences(case, by_triton(DEVICE))
    ] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [63, 64, 65, 200])
def test_rows_of_several_tiles(vocab_size: int, dtype: torch.dtype) -> None:
    """Small ones, so that ties, thresholds and sums cross their edges."""
    case = make_case(np.random.default_rng(vocab_size), 4, vocab_size, dtype)
    assert differences(case, by_triton(DEVICE, tile=64)) == []


@triton.jit
def weigh_kernel(out_ptr, logits_ptr, rate, SIZE: tl.constexpr):
    """Weights of logits whose highest is 0."""
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places, weigh(tl.load(logits_ptr + places), 0.0, rate, 0))


def test_weights_are_equal_bit_by_bit() -> None:
    """Over all exponents, next to their edges and where the weight ends."""
    exact = -torch.linspace(0, 42, 2**15, dtype=torch.float64)
    near = (-torch.arange(43.0).double()[:, None] + torch.linspace(-1e-6, 1e-6, 101).double()).flatten()
    logits = torch.cat((exact, near.clamp(max=0))).float()
    logits = torch.nn.functional.pad(logits, (0, 2**16 - len(logits)), value=-torch.inf).to(DEVICE)
    rate = float(2**FRACTION_BITS)
    found = torch.empty(len(logits), dtype=torch.int64, device=DEVICE)
    weigh_kernel[(1,)](found, logits, rate, SIZE=len(logits), enable_fp_fusion=False)
    highest = torch.zeros(1, device=DEVICE)
    assert torch.equal(found, weights.weigh(logits, highest, highest + rate))
    assert (found[0], found[-1]) == (WHOLE, 0)
