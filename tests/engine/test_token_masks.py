"""Masks of tokens: how those of a step are computed by its rows' grammars, and what a CPU makes of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import GrammarFailed
from engine.sampling.edit_logits import edit_logits
from engine.sampling.logit_edits import EditParts, token_mask
from engine.structured import masks
from engine.structured.matcher import Matcher, Vocabulary
from tests.engine.checkpoints import SHAPES, make_checkpoint


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_two_threads")
def test_a_cpu_masks_logits_as_the_reference_does(dtype: torch.dtype) -> None:
    """Vocabularies of no whole words, masks that are shorter and longer than those, rows that lie apart."""
    pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")
    from engine.attention.cpu_backend import CpuBackend

    backend, rng, rows = CpuBackend(torch.device("cpu")), np.random.default_rng(3), np.array([0, 2, 3, 5, 8])
    for vocab, longest in ((1, 1), (31, 90), (32, 32), (33, 33), (70, 32), (300, 320)):
        for kind in ("masks alone", "banned", "biased"):
            parts = EditParts()
            for place, share in enumerate((0.0, 0.5, 0.9, 1.0)):
                size = longest if place % 2 else min(longest, vocab)
                allowed = np.flatnonzero(rng.random(size) < share)
                parts.allow(place, token_mask(allowed.tolist(), size))
            if kind == "banned":
                parts.banned.append((4, np.array([0])))
            if kind == "biased":
                parts.biased.append((4, np.array([vocab - 1])))
                parts.biases.append(np.array([0.3], np.float32))
            edits = parts.joined(rows)
            logits = torch.from_numpy(rng.normal(size=(9, 2 * vocab))).to(dtype)
            logits[5, 0] = torch.nan
            expected = edit_logits(logits.clone()[:, :vocab], edits)
            found = backend.edit(logits.clone()[:, :vocab], edits, None)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("masks") / "model", SHAPES[0])


class Machine:
    """A grammar that allows all tokens; a mask of it takes as long as is said, on a clock of the test's."""

    def __init__(self, clock: list[float], took_s: float) -> None:
        self._clock, self._took_s = clock, took_s

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._clock[0] += self._took_s
        ctypes.memset(address, 255, num_bytes)

    def is_accepting(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


class Executor:
    """In the place of llguidance's."""

    def unsafe_compute_mask_ptr(
        self, machines: list[tuple[Machine, int]], address: int, num_bytes: int, num_masks: int
    ) -> None:
        assert len(machines) == num_masks
        for machine, row in machines:
            machine.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


@pytest.mark.parametrize("large", [False, True])
def test_a_row_whose_mask_takes_too_long_fails_alone(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a large vocabulary are timed together: there it is found in the step after that."""
    clock = [0.0]
    monkeypatch.setattr(masks.time, "monotonic", lambda: clock[0])
    executor: Any = Executor() if large else None
    eos_words, eos_bits = np.array([0]), np.array([1], np.int32)
    vocabulary = Vocabulary(
        2, eos_words, eos_bits, frozenset([0]), lambda text: [], is_canonical=True, executor=executor
    )
    rows: list[Any] = [
        Matcher(machine, machine, vocabulary, frozenset(), None)  # type: ignore[arg-type]
        for machine in (Machine(clock, 0.1), Machine(clock, 3.0), Machine(clock, 1.5), Machine(clock, 0.1))
    ]
    for step in range(2 if large else 1):
        assert not any(row.error for row in rows), step
        words = np.zeros((4, 2), np.int32)
        masks.StepMasks(rows, words).fill()
    assert [row.error for row in rows] == [
        None, "its next token takes too long to find (3.0 s)", None, None
    ]  # fmt: skip
    assert words.tolist() == [[-2, -1], [0, 0], [-2, -1], [-2, -1]], "the end is no token of theirs"
    with pytest.raises(GrammarFailed, match="too long"):
        rows[1].accept(-1)
