"""Kernels compile for a Hopper GPU and fit it, of two models here: `python -m ops.bench.static` compiles all."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

from ops.bench.static.kernel_cases import KERNELS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
COMPILED = ("Qwen3-0.6B, bfloat16", "gpt-oss-20b")


def static(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the command reports, from a process that does not interpret; its status says if all is well."""
    report = folder / "static.json"
    done = subprocess.run(
        [sys.executable, "-m", "ops.bench.static", "--json", str(report), *arguments],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert done.returncode == int(bool(found["problems"]))
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The kernels of a small dense model, and of one with experts, windows and sinks."""
    return static(tmp_path_factory.mktemp("compiled"), "--only", *COMPILED)


def test_no_kernel_spills_and_each_fits_and_loads_as_it_should(compiled: dict[str, Any]) -> None:
    """Every kernel that these models launch; KERNELS says what is asked of each."""
    assert compiled["problems"] == []
    assert {"decode_kernel", "prefill_kernel", "grouped_product_kernel"} <= {
        each["kernel"] for each in compiled["kernels"]
    }
    for each in compiled["kernels"]:
        assert each["spill_bytes"] == 0, each


@pytest.mark.parametrize("target", ["80", "86", "89", "100", "120"])
def test_attention_of_heads_of_each_size_fits_every_gpu(tmp_path: Path, target: str) -> None:
    """Heads of 64, 128 and 256. What a Hopper GPU holds need not fit another one, and spills elsewhere."""
    models = ("Qwen3-0.6B, bfloat16", "gpt-oss-20b", "Gemma-2-9B")
    kernels = ("decode_kernel", "prefill_kernel", "prefix_kernel", "shared_prefill_kernel")
    found = static(tmp_path, "--target", target, "--only", *models, "--kernels", *kernels)
    assert found["problems"] == []
    dims = {each["constants"]["DIM_PAD"] for each in found["kernels"]}
    assert dims == {64, 128, 256}


@pytest.mark.long
@pytest.mark.parametrize("target", ["80", "86", "89", "90", "100", "120"])
def test_products_with_packed_weights_fit_every_gpu(tmp_path: Path, target: str) -> None:
    found = static(tmp_path, "--target", target, "--only", "packed")
    assert found["problems"] == []
    assert {each["kernel"] for each in found["kernels"]} == {
        "packed_product_kernel",
        "grouped_packed_product_kernel",
    }


@pytest.mark.long
@pytest.mark.parametrize("target", ["80", "86", "89", "90", "100", "120"])
def test_products_of_adapters_fit_every_gpu(tmp_path: Path, target: str) -> None:
    found = static(tmp_path, "--target", target, "--only", "adapters")
    assert found["problems"] == []
    kernels = {each["kernel"] for each in found["kernels"]}
    assert kernels == {"group_kernel", "narrow_kernel", "widen_kernel"}


@pytest.mark.parametrize("target", ["80", "86", "89", "90", "100", "120"])
def test_delta_nets_fit_every_gpu(tmp_path: Path, target: str) -> None:
    kernels = ("convolve_kernel", "correct_kernel", "solve_kernel", "chunk_kernel", "gate_kernel")
    found = static(tmp_path, "--target", target, "--only", "Qwen3.5", "--kernels", *kernels)
    assert found["problems"] == []
    assert {each["kernel"] for each in found["kernels"]} == set(kernels)


def test_no_step_compiles_a_variant_of_its_own(tmp_path: Path) -> None:
    """Whatever the row count, of every model; and every kernel with a line in KERNELS is launched."""
    assert static(tmp_path, "--no-compile")["problems"] == []


def test_every_kernel_that_is_launched_has_a_line() -> None:
    """`name[grid](...)` in engine/kernels, whatever calls it."""
    launched = {
        node.func.value.id
        for path in (ROOT / "engine/kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    assert launched == set(KERNELS)
