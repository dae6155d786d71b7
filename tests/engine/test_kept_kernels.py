"""Machine code of CPU kernels that is kept between starts: used again, and never run where it is damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

import numba

import engine.cpu_kernels.kernel as kernel_module
from engine.attention import load_backend
from engine.attention.torch_backend import TorchBackend
from engine.cpu_kernels.kernel import next_task
from engine.cpu_kernels.scalars import pointer_to
from engine.cpu_kernels.sealed_files import SEAL
from engine.errors import ConfigError


def count_task(parameters: Any) -> None:
    """Each task adds 1 to its own cell."""
    counts = pointer_to(parameters[3], numba.int64)
    task = next_task(parameters)
    while task >= 0:
        counts[task] += 1
        task = next_task(parameters)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which count_task has been compiled."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel_module._compile(count_task).cache_hits == 0
    assert kernel_module._compile(count_task).cache_hits == 1
    assert str(tmp_path) == numba.config.CACHE_DIR, "the user's own cache moved"
    return tmp_path


def zeros_inside(contents: bytes) -> bytes:
    """It still unpickles: LLVM refuses it, or the process crashes when it runs, by where they are."""
    middle = len(contents) // 2
    return contents[: middle - 268] + bytes(536) + contents[middle + 268 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "machine code with a page of zeros": ("nbc", zeros_inside),
    "machine code cut short": ("nbc", lambda contents: contents[: len(contents) // 2]),
    "an empty index, as after a loss of power": ("nbi", lambda contents: b""),
    "an index of zeros": ("nbi", lambda contents: bytes(len(contents))),
    "a worker killed before the checksum": ("nbc", lambda contents: contents[:-SEAL]),
}


def test_a_damaged_file_is_compiled_anew_once(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    for what, (kind, damage) in DAMAGES.items():
        (damaged,) = kept.rglob(f"*.{kind}")
        damaged.write_bytes(damage(damaged.read_bytes()))
        with caplog.at_level(logging.WARNING):
            assert kernel_module._compile(count_task).cache_hits == 0, what
        assert [record.getMessage() for record in caplog.records] == [
            f"a CPU kernel is compiled anew: damaged, or not written to its end: {damaged}"
        ], what
        caplog.clear()
        counts = torch.zeros(3, dtype=torch.int64)
        kernel_module.Kernel(count_task)(2, counts)
        assert counts.tolist() == [1, 1, 0], what
        assert kernel_module._compile(count_task).cache_hits == 1, what
    assert not caplog.records
    assert {path.suffix for path in kept.rglob("*") if path.is_file()} == {".nbi", ".nbc"}


def test_a_numba_that_compiles_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    cpu = torch.device("cpu")
    with caplog.at_level(logging.INFO):
        assert isinstance(load_backend("auto", cpu, torch.float32), TorchBackend)
    assert "NUMBA_DISABLE_JIT" in caplog.text
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set; unset it"):
        load_backend("cpu", cpu, torch.float32)
