"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# The same cases in every run, and no verdict by the clock: a busy machine is slow.
settings.register_profile(
    "tokenmill", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tokenmill")

if not torch.cuda.is_available():
    # Triton reads this when it is imported, which transformers does: our kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
