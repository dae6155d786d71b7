"""Tests that need a CUDA GPU. With GPU_TESTS_ON_CPU=1 Triton's interpreter runs them, in smaller sizes."""

import os
from typing import TypeVar

import pytest
import torch

ON_CPU = os.environ.get("GPU_TESTS_ON_CPU") == "1"
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() and not ON_CPU, reason="needs a CUDA GPU, or GPU_TESTS_ON_CPU=1"
)
Size = TypeVar("Size")


def sized(on_gpu: Size, in_interpreter: Size) -> Size:
    """The size for where the tests run."""
    return in_interpreter if ON_CPU else on_gpu
