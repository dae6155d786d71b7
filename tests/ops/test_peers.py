"""The bench beside other engines: where our own seconds go."""

import time
from itertools import count

import pytest
import torch

from engine.attention.cpu_backend import CpuBackend
from engine.sampling.parameter_values import brief
from ops.bench.kernels import packed
from ops.bench.parts import seconds_by_part


def test_a_librarys_seconds_are_those_of_the_engines_file_that_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count()
    monkeypatch.setattr(
        time, "process_time", lambda: float(next(calls))
    )  # a second for each look at the clock
    parts = seconds_by_part(lambda: brief("text"))
    shown = next(calls)
    assert list(parts) == ["sampling/parameter_values.py", "other"]
    assert (
        shown - 6 <= parts["sampling/parameter_values.py"] < shown
    )  # the rest is the lambda's and the profiler's
    assert parts["other"] == 0


def test_packed_weights_are_timed_beside_bfloat16() -> None:
    """A table's row; what it holds depends on the machine."""
    layer_kernels = CpuBackend(torch.device("cpu")).layer_kernels
    assert layer_kernels is not None
    kernels = layer_kernels.packed
    if kernels is None or kernels.block("int4", 32) is None:
        pytest.skip("this processor has no vectors of 64 bytes: weights are unpacked")
    ratios = packed.ratios_of(packed.Kind("int4", 32), 64, 64, all_rows=[1, 8], rounds=1)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)
