"""Every kernel compiles for a Hopper GPU and fits it: what the interpreter cannot show, and needs no GPU.

`python -m ops.bench.static` compiles all cases; the suite those of two models, and asks all of them for their
variants.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot be compiled")

from ops.bench.static.compiled import programs_per_processor
from ops.bench.static.kernel_cases import KERNELS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
COMPILED = ("Qwen3-0.6B, bfloat16", "gpt-oss-20b")
FAULTS = {
    "specialized_kernel": ("3 variants, at most 1 wanted; they differ in num_rows",),
    "unlisted_kernel": ("it has no line in KERNELS",),
    "missing_kernel": ("no case launches it",),
    "spilling_kernel": ("spills ",),
    "narrow_kernel": ("0% of its loads' bytes by 16, 75% wanted",),
    "crowded_kernel": (
        "warps on a multiprocessor, 32 warps wanted",
        "no mma instruction",
        "copy to [] buffers, 2 of each",
    ),
}


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


def test_products_have_a_buffer_for_every_stage(compiled: dict[str, Any]) -> None:
    """With one less, as Triton plans it where registers read a tile too, copies overtake wgmma."""
    names = ("fused_product_kernel", "project_heads_kernel")
    products = [each for each in compiled["kernels"] if each["kernel"] in names]
    assert len(products) == 4 * 3  # of a layer, by the class of rows
    for each in products:
        constants, stages = each["constants"], each["options"]["num_stages"]
        columns = (
            constants["COLUMNS"] * (1 + constants["GATED"]) if "GATED" in constants else 2 * constants["HALF"]
        )
        assert each["products"].get("wgmma" if constants["ROWS"] >= 64 else "mma"), each
        wanted = stages * (constants["ROWS"] + columns) * constants["DEPTH"] * 2
        # tiles of 16 rows are read by registers alone, which have read them before the next copy begins
        assert each["shared_bytes"] >= (
            wanted if constants["ROWS"] >= 64 else wanted * (stages - 1) // stages
        )


def test_five_decode_programs_have_160_kib_on_their_way(compiled: dict[str, Any]) -> None:
    """For heads of 64 and 128, on one multiprocessor: two buffers of 8 KiB for keys and for values each."""
    decodes = [each for each in compiled["kernels"] if each["kernel"] == "decode_kernel"]
    assert {each["constants"]["HEAD_DIM"] for each in decodes} == {64, 128}
    for each in decodes:
        assert each["programs"] >= 5, each
        assert each["buffers"] == [2, 2], each
        assert each["constants"]["TILE"] * each["constants"]["DIM_PAD"] * 2 == 8 * 1024, each
        assert 32 * 1024 < each["shared_bytes"] < 40 * 1024, each


def test_sampler_and_edits_round_each_product_and_sum(compiled: dict[str, Any]) -> None:
    """As torch does, so that both weigh a token alike; other kernels fuse them."""
    fused = {each["kernel"]: each["fused"] for each in compiled["kernels"]}
    assert fused["choose_token_kernel"] == fused["edit_kernel"] == 0
    assert fused["decode_kernel"] > 0


def test_no_step_compiles_a_variant_of_its_own(tmp_path: Path) -> None:
    """Whatever the row count, of every model; and every kernel with a line in KERNELS is launched."""
    assert static(tmp_path, "--no-compile")["problems"] == []


def test_every_kernel_that_is_launched_has_a_line() -> None:
    """`name[grid](...)` in engine/kernels, whatever calls it."""
    launched = {
        node.func.value.id
        for path in (ROOT / "engine/kernels").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    assert launched == set(KERNELS)


def test_each_fault_is_found(tmp_path: Path) -> None:
    """Kernels that spill, crowd a multiprocessor, load by 2 bytes, or compile for each row count."""
    problems = static(tmp_path, "--cases", "tests.engine.faulty_kernels")["problems"]
    for name, faults in FAULTS.items():
        for fault in faults:
            assert [text for text in problems if text.startswith(name) and fault in text], (name, problems)
    assert {problem.split(",")[0].split(":")[0] for problem in problems} == set(FAULTS)


def test_programs_that_share_a_multiprocessor() -> None:
    """By what is scarce: room for programs, warps, registers, shared memory; or one that cannot start."""
    assert programs_per_processor(registers=16, shared_bytes=0, num_warps=1) == 32
    assert programs_per_processor(registers=32, shared_bytes=0, num_warps=4) == 16
    assert programs_per_processor(registers=96, shared_bytes=0, num_warps=4) == 5
    assert programs_per_processor(registers=97, shared_bytes=0, num_warps=4) == 4
    assert programs_per_processor(registers=255, shared_bytes=0, num_warps=8) == 1
    assert programs_per_processor(registers=32, shared_bytes=227 * 1024, num_warps=4) == 1
    assert programs_per_processor(registers=32, shared_bytes=113 * 1024, num_warps=4) == 2
    assert programs_per_processor(registers=32, shared_bytes=227 * 1024 + 1, num_warps=4) == 0
