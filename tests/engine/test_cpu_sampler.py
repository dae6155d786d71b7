"""The CPU's compiled sampler chooses the tokens of the reference in torch, and weighs each token as it does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

import numba

from engine.attention.cpu_backend import CpuBackend
from engine.cpu_kernels.token_weights import exponent, ordered_key, weight
from engine.kernels.weight_constants import FRACTION_BITS, WHOLE
from engine.sampling import draws
from engine.sampling.sampler import sample
from tests.engine.sampler_cases import Case, by_numba, cases, differences, make_case
from tests.engine.test_sampler import sampling_rows

DTYPES = (torch.float32, torch.bfloat16)

both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def compare(logits: Tensor, **values: Any) -> Tensor:
    """What both choose, for rows that may have values of their own each."""
    rows = sampling_rows(len(logits), seed=np.arange(len(logits)), **values)
    assert differences(Case(logits, rows, ["a row"] * len(logits)), by_numba()) == []
    return sample(logits, rows)


def test_a_sample_of_random_rows() -> None:
    assert [
        line for case in cases(seed=78, num_rows=150) for line in differences(case, by_numba())
    ] == []


@both_dtypes
def test_every_small_vocabulary(dtype: torch.dtype) -> None:
    """Less than a tile, exactly one and two, and what is left of one."""
    rng = np.random.default_rng(1)
    for vocab_size in (*range(1, 12), *range(126, 131), 255, 256, 257):
        case = make_case(rng, 20, vocab_size, dtype)
        assert differences(case, by_numba()) == [], vocab_size


@both_dtypes
def test_what_is_no_distribution_has_no_token(dtype: torch.dtype) -> None:
    """NaN of either sign, plus infinity, all banned: greedy and drawn, in the first tile and in others."""
    rows = []
    for bad in (torch.nan, -torch.nan, torch.inf):
        for place in (0, 200, 299):
            rows.append(torch.zeros(300, dtype=dtype))
            rows[-1][place] = bad
    rows.append(torch.full((300,), -torch.inf, dtype=dtype))
    for temperature in (0.0, 1.0):
        for cut in ({}, {"top_k": 5}, {"top_p": 0.5}):
            assert compare(torch.stack(rows), temperature=temperature, **cut).tolist() == [
                -1
            ] * len(rows)


@both_dtypes
def test_the_backend_samples_by_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiles it before the first step."""
    backend, compiled = CpuBackend(torch.device("cpu")), []
    backend.prepare(dtype, lambda: torch.zeros(1))
    monkeypatch.setattr("engine.attention.base.sample", None)
    monkeypatch.setattr("engine.cpu_kernels.kernel._compile", compiled.append)
    logits = torch.zeros(3, 9, dtype=dtype)
    logits[:, 4] = 50
    assert backend.sample(logits, sampling_rows(3)).tolist() == [4] * 3
    assert compiled == []


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def weigh_all(logits: Any, rate: Any, out: Any, keys: Any) -> None:
    for i in range(len(logits)):
        out[i] = weight(exponent(logits[i], np.float32(0), rate))
        keys[i] = ordered_key(logits[i])


def test_weights_are_equal_bit_by_bit_and_keys_in_order() -> None:
    """Over all exponents, next to their edges and where the weight ends."""
    exact = -torch.linspace(0, 42, 2**15, dtype=torch.float64)
    near = (
        -torch.arange(43.0).double()[:, None] + torch.linspace(-1e-6, 1e-6, 101).double()
    ).flatten()
    logits = torch.cat(
        (exact, near.clamp(max=0), torch.tensor([-torch.inf, -1e38, -1e-45, -0.0]))
    ).float()
    rate = float(2**FRACTION_BITS)
    found, keys = (
        torch.empty(len(logits), dtype=torch.int64),
        torch.empty(len(logits), dtype=torch.int32),
    )
    weigh_all(logits.numpy(), np.float32(rate), found.numpy(), keys.numpy())
    highest = torch.zeros(1)
    assert torch.equal(found, draws.weigh(logits, highest, highest + rate))
    assert (found[0], found[-4]) == (WHOLE, 0)
    assert torch.equal(keys.unique(return_inverse=True)[1], logits.unique(return_inverse=True)[1])
