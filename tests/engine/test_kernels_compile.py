"""Every kernel compiles for a Hopper GPU and fits it: what the interpreter cannot show, and needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024  # what one program may take on compute capability 9.0
KERNELS = {
    "decode_kernel", "merge_kernel", "prefill_kernel", "store_kernel", "rms_norm_kernel",
    "norm_rotate_store_kernel", "gate_and_mul_kernel", "grouped_product_kernel", "choose_kernel",
    "group_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One line for each kernel and case, from a process that does not interpret."""
    cache = tmp_path_factory.mktemp("triton_cache")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    output = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_kernels"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


def test_every_kernel_compiles_and_fits(compiled: list[dict[str, Any]]) -> None:
    """Shared memory stays within a multiprocessor's, and no tile spills from registers to the stack.

    A few bytes there are the assembler's choice; tiles that are too large take hundreds to thousands.
    """
    assert {line["kernel"] for line in compiled} == KERNELS
    for line in compiled:
        assert line["stack_bytes"] <= 64, line
        assert line["shared_bytes"] <= SHARED_BYTES, line


def test_attention_multiplies_on_tensor_cores_and_copies_ahead(compiled: list[dict[str, Any]]) -> None:
    """In 16-bit dtypes: prefill with warp-group instructions, decode, whose tiles have 16 rows, with warp's.

    The loops load block tables and tiles asynchronously: for Qwen3's heads of 128, five decode programs and
    two prefill programs share a multiprocessor's 228 KiB.
    """
    for line in compiled:
        if line["kernel"] in ("decode_kernel", "prefill_kernel") and "float32" not in line["case"]:
            assert line["async_copies"] > 0, line
            assert line["wgmma" if line["kernel"] == "prefill_kernel" else "mma"] > 0, line
        if line["case"] == "bfloat16 128 x2" and line["kernel"] != "merge_kernel":
            assert line["shared_bytes"] <= (44 if line["kernel"] == "decode_kernel" else 112) * 1024, line


def test_experts_multiply_on_tensor_cores_and_copy_ahead(compiled: list[dict[str, Any]]) -> None:
    """Few rows for each expert with a warp's instructions, three programs to a multiprocessor; many with a
    warp group's, two of them."""
    lines = [line for line in compiled if line["kernel"] == "grouped_product_kernel"]
    by_case = {line["case"]: line for line in lines}
    few, many = by_case["bfloat16 experts x16"], by_case["bfloat16 experts x128"]
    assert few["mma"] > 0
    assert many["wgmma"] > 0
    assert min(few["async_copies"], many["async_copies"]) > 0
    assert few["shared_bytes"] <= 75 * 1024
    assert many["shared_bytes"] <= 112 * 1024
