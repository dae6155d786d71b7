"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported, which transformers does: our kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
