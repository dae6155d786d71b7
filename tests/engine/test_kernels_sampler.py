"""The sampler's kernels choose the tokens of the reference in torch, and weigh each token as it does.

On random rows of every kind, and on what such rows hardly meet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from engine.attention.triton_backend import TritonBackend
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.kernels.sampler import weigh
from engine.kernels.token_weights import FRACTION_BITS, WHOLE
from engine.sampling import weights
from tests.engine.paged import DEVICE
from tests.engine.sampler_cases import Case, by_triton, cases, differences, make_case
from tests.engine.test_sampler import sampling_rows

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


def test_the_only_token_is_found_wherever_it_is() -> None:
    """Greedy, drawn and cut, at both ends of each tile and of the vocabulary."""
    places = [0, 31, 32, 63, 99]
    logits = torch.full((4 * len(places), 100), -torch.inf)
    logits[torch.arange(len(logits)), torch.tensor(places * 4)] = 2.0
    rows = sampling_rows(
        len(logits),
        temperature=np.repeat([0.0, 1.0, 1.0, 1.0], len(places)),
        top_k=np.repeat([0, 0, 1, 0], len(places)),
        top_p=np.repeat([1, 1, 1, 0.5], len(places)),
        seed=np.arange(len(logits)),
    )
    case = Case(logits, rows, ["one"] * len(logits))
    assert differences(case, by_triton(DEVICE, tile=32)) == []
    assert TritonBackend(DEVICE).sample(logits.to(DEVICE), rows).tolist() == places * 4


def test_ties_at_a_cut_go_to_the_lower_ids_across_tiles() -> None:
    """Forty equal logits, of which top_k or top_p leaves the first twenty, in three tiles."""
    n = 3
    for cut in ({"top_k": 20}, {"top_p": 0.5}):
        rows = sampling_rows(n, seed=np.arange(n), **cut)
        case = Case(torch.zeros(n, 40).bfloat16(), rows, ["equal"] * n)
        assert differences(case, by_triton(DEVICE, tile=16)) == []


def test_rows_that_lie_apart() -> None:
    """As a rank's gathered logits do, whose padding is cut off."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn((6, 130), generator=generator).bfloat16()
    wide[:, 101:] = torch.inf
    rows = sampling_rows(6, seed=np.arange(6), temperature=[0.0, 1.0, 0.5] * 2, top_p=[1.0, 0.9] * 3)
    assert differences(Case(wide[:, :101], rows, ["apart"] * 6), by_triton(DEVICE)) == []


def test_two_launches_whatever_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, with and without cuts, few and many."""
    seen: list[str] = []
    kind = InterpretedFunction if INTERPRETED else triton.JITFunction
    launch = kind.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kernel.fn.__name__)
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", run)
    backend = TritonBackend(DEVICE)
    for case in cases(seed=5, num_rows=12):
        rows = type(case.rows)(*(column.to(DEVICE) for column in vars(case.rows).values()))
        with np.errstate(over="ignore"):
            backend.sample(case.logits.to(DEVICE), rows)
        assert seen == ["tile_maxima_kernel", "choose_token_kernel"]
        seen.clear()


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
