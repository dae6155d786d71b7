"""The kernels of a step beside its layers do what their references in torch do, bit by bit."""

from dataclasses import fields

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from typing import Any

import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.decode_state import PADDING, DecodeState, RowMemory, RowWrites
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.gpu_draws import weigh
from engine.kernels.gpu_logit_edits import edit_logits as by_kernel
from engine.kernels.step_inputs import TILE
from engine.kernels.weight_constants import FRACTION_BITS, WHOLE
from engine.run.forward.checks.plain_kernels import plain_advance, plain_write_rows
from engine.run.forward.rows import StaticRows
from engine.sampling import draws
from engine.sampling.edit_logits import edit_logits as by_torch
from engine.sampling.logit_edits import EditParts, LogitEdits, token_mask
from tests.engine.paged import DEVICE
from tests.engine.sampler_cases import by_triton, cases, differences, make_case

pytestmark = pytest.mark.long

WIDE, NARROW, WIDTH = 4, 4, 7


def memory(num_rows: int) -> RowMemory:
    """Full of numbers, each another one; the columns have room behind their rows."""
    pitch = num_rows + 16 - num_rows % 16

    def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return -1 - torch.arange(int(np.prod(shape)), dtype=dtype).view(shape).to(DEVICE)

    return RowMemory(
        filled(WIDE, pitch, dtype=torch.int64) * 2**33,
        filled(NARROW, pitch, dtype=torch.int32),
        filled(num_rows, WIDTH, dtype=torch.int32),
        filled(num_rows, dtype=torch.int32),
    )


def writes(rng: np.random.Generator, num_rows: int, written: int, num_blocks: int) -> RowWrites:
    """Any of the rows, in any order, half of them with a token that the step before has sampled."""
    return RowWrites(
        rows=rng.permutation(num_rows)[:written],
        wide=rng.integers(-(2**63), 2**63, (WIDE, written)),
        narrow=rng.integers(-(2**31), 2**31, (NARROW, written)).astype(np.int32),
        sampled_at=np.where(rng.random(written) < 0.5, rng.integers(0, num_rows, written), -1),
        table_places=rng.permutation(num_rows * WIDTH)[:num_blocks],
        block_ids=rng.integers(0, 2**31, num_blocks).astype(np.int32),
        order=rng.permutation(num_rows).astype(np.int32) if written else np.zeros(0, np.int32),
    )


@pytest.mark.parametrize(
    ("num_rows", "written", "num_blocks"),
    [
         (1, 0, 1), (2, 1, 3), (9, 9, 63), (300, 0, 512), (300, 7, 513), (600, 512, 1),
        (600, 513, 0), (1100, 1100, 7700),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_memory", [True, False])
def test_it_equals_the_reference(
    num_rows: int, written: int, num_blocks: int, in_memory: bool
) -> None:
    """Of as many rows and entries as a program takes at once, of fewer and of more; the rest stays as it is.

    in_memory: what was sampled lies in the rows that are written, as it does between two steps of graphs.
    """
    rng = np.random.default_rng(num_rows + num_blocks)
    new = writes(rng, num_rows, written, num_blocks)
    others = torch.from_numpy(rng.integers(0, 2**40, num_rows)).to(DEVICE)
    found, expected = memory(num_rows), memory(num_rows)
    for into, write in ((found, TritonBackend(DEVICE).write_rows), (expected, plain_write_rows)):
        write(into, new, into.wide[0, :num_rows] if in_memory else others)
    for name, left, right in zip(RowMemory._fields, found, expected, strict=True):
        assert torch.equal(left, right), name
    assert not torch.equal(found.wide, memory(num_rows).wide) or not written


def test_rows_that_change_places_change_their_tokens() -> None:
    """Each of two rows is written with what the other has sampled, so neither may be written too early."""
    new = writes(np.random.default_rng(1), 2, 2, 0)
    new = new._replace(rows=np.array([0, 1]), sampled_at=np.array([1, 0]))
    found = memory(2)
    before = found.wide[0, :2].tolist()
    TritonBackend(DEVICE).write_rows(found, new, found.wide[0, :2])
    assert found.wide[0, :2].tolist() == before[::-1]


def filled(num_rows: int, block_size: int, seed: int) -> DecodeState:
    """Rows at any place of their sequences, some of them padding, some without a token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: Any) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    static = StaticRows(num_rows + 3, 40, block_size, DEVICE, plain_write_rows)
    state = static.state.first(num_rows)
    state.next_token_ids.copy_(draw(-1, 152_000, (num_rows,)))
    state.next_positions.copy_(draw(0, 40 * block_size, (num_rows,)))
    state.next_positions[draw(0, 4, (num_rows,)) == 0] = PADDING
    state.block_tables.copy_(draw(0, 2**31 - 1, state.block_tables.shape))
    for stale in (state.token_ids, state.positions, state.slot_mapping, state.context_lens):
        stale.fill_(77)
    return state


@pytest.mark.parametrize("num_rows", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_a_step_begins_as_by_the_reference(num_rows: int, block_size: int) -> None:
    """Twice in a row: the second step starts from what the first has left."""
    found, expected = (filled(num_rows, block_size, seed=num_rows) for _ in range(2))
    backend = TritonBackend(DEVICE)
    for _ in range(2):
        backend.advance(found)
        plain_advance(expected)
        for each in fields(DecodeState):
            if isinstance(getattr(found, each.name), torch.Tensor):
                assert torch.equal(getattr(found, each.name), getattr(expected, each.name)), (
                    each.name
                )
        assert torch.equal(found.sampling.position, expected.sampling.position)
        for state in (found, expected):
            state.next_positions.clamp_(max=40 * block_size - 1)


def test_nothing_past_the_rows_is_written() -> None:
    """A smaller graph leaves the rows behind its own alone."""
    static = StaticRows(200, 3, 16, DEVICE, plain_write_rows)
    static.state.next_positions.fill_(5)
    TritonBackend(DEVICE).advance(static.state.first(130))
    assert static.state.next_positions.tolist() == [6] * 130 + [5] * 70
    assert static.state.slot_mapping[130:].tolist() == [0] * 70


@pytest.mark.parametrize("num_pending", [1, 3, TILE, TILE + 1])
def test_the_kernel_fills_the_rows_that_the_reference_fills(num_pending: int) -> None:
    """Wherever they lie, whatever the others hold; none chosen becomes 0."""
    numbers = torch.Generator().manual_seed(num_pending)
    token_ids = torch.randint(5, 100, (2 * num_pending,), generator=numbers)
    sampled = torch.randint(-1, 4, (num_pending + 5,), generator=numbers)
    sampled[0] = -1
    rows = torch.randperm(2 * num_pending, generator=numbers)[:num_pending]
    places = torch.randperm(num_pending + 5, generator=numbers)[:num_pending]
    expected, found = token_ids.clone(), token_ids.clone().to(DEVICE)
    TorchBackend(torch.device("cpu")).fill_pending(expected, rows, sampled, places)
    TritonBackend(DEVICE).fill_pending(
        found, rows.to(DEVICE), sampled.to(DEVICE), places.to(DEVICE)
    )
    assert torch.equal(found.cpu(), expected)


def test_a_sample_of_random_rows() -> None:
    assert [
        line
        for case in cases(seed=77, num_rows=40)
        for line in differences(case, by_triton(DEVICE))
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
    near = (
        -torch.arange(43.0).double()[:, None] + torch.linspace(-1e-6, 1e-6, 101).double()
    ).flatten()
    logits = torch.cat((exact, near.clamp(max=0))).float()
    logits = torch.nn.functional.pad(logits, (0, 2**16 - len(logits)), value=-torch.inf).to(DEVICE)
    rate = float(2**FRACTION_BITS)
    found = torch.empty(len(logits), dtype=torch.int64, device=DEVICE)
    weigh_kernel[(1,)](found, logits, rate, SIZE=len(logits), enable_fp_fusion=False)
    highest = torch.zeros(1, device=DEVICE)
    assert torch.equal(found, draws.weigh(logits, highest, highest + rate))
    assert (found[0], found[-1]) == (WHOLE, 0)


VOCABS = (67, 300)
TILE = 128  # so that rows, and entries of a kind, are more than one
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_edits(
    rng: np.random.Generator, num_rows: int, vocab: int, adds: bool
) -> tuple[LogitEdits, Tensor]:
    """Edits of some rows, and the tokens that are pending; few tokens, so that one has several kinds."""
    rows = np.sort(rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)])
    parts, few = EditParts(), rng.integers(2, vocab + 1)
    masks = [
        token_mask(rng.integers(0, few, 40).tolist(), size)
        for size in (vocab, max(vocab // 2, few))
    ]
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
            parts.penalize(
                place, (presence, frequency, float(rng.choice((1.0, 0.4, 1.7)))), entries
            )
    for place in range(len(rows)):  # as those of min_tokens, behind all others
        parts.banned.append((place, tokens(4).astype(np.int64)))
    return parts.joined(rows), sampled


def edit_by_kernel(logits: Tensor, edits: LogitEdits, sampled: Tensor | None) -> Tensor:
    on_device = None if sampled is None else sampled.to(DEVICE)
    return by_kernel(logits.to(DEVICE), edits, on_device, tile=TILE).cpu()


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
    logits = (
        torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    )
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
