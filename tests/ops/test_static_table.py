"""The table of what kernels take, from files that runs of ops.bench.static wrote. Nothing is compiled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed, so kernels cannot be listed")

from ops.bench.static.kernel_cases import KERNELS, Kernel
from ops.bench.static.table import UnusableReport, table_lines
from tests.rq_workers import ROOT

LISTED = {
    "decode_kernel": Kernel(launches="1 a layer"),
    "unused_kernel": Kernel(launches="never"),
    "store_kernel": Kernel(launches="1 a layer of some models"),
}

#: A kernel's name, its registers, bytes that spill and bytes of shared memory.
Variant = tuple[str, int, int, int]


def write_report(
    folder: Path, target: int, triton: str, *variants: Variant, num_variants: int = 2
) -> Path:
    """A file as `--json` writes it, as far as the table reads it."""
    fields = ("kernel", "registers", "spill_bytes", "shared_bytes")
    kernels = [dict(zip(fields, variant, strict=True)) for variant in variants]
    path = folder / f"{triton}-{target}.json"
    path.write_text(
        json.dumps(
            {"target": target, "triton": triton, "variants": num_variants, "kernels": kernels}
        )
    )
    return path


def test_a_cell_has_the_most_of_a_kernels_variants_under_each_version(tmp_path: Path) -> None:
    paths = [
        write_report(tmp_path, 90, "3.9.0", ("decode_kernel", 40, 0, 1025), ("decode_kernel", 96, 0, 9)),
        write_report(tmp_path, 90, "3.6.0", ("decode_kernel", 40, 8, 1025), ("decode_kernel", 97, 0, 9)),
        write_report(tmp_path, 86, "3.9.0", ("decode_kernel", 50, 0, 0), ("store_kernel", 20, 0, 0), num_variants=1),
    ]  # fmt: skip
    assert list(table_lines(paths, LISTED)) == [
        "A cell has the most registers of a thread under Triton 3.9.0 / 3.6.0, and in parentheses the most bytes "
        "that spill. KiB: the most shared memory of a program.",
        "Variants: 2 on sm_90; 1 on sm_86.",
        "Spills under Triton 3.9.0: none.",
        "Spills under Triton 3.6.0: `decode`.",
        "",
        "| kernel | launches | sm_86 | sm_90 | KiB |",
        "|---|---|---|---|---|",
        "| `decode` | 1 a layer | 50 / - | 96 / 97 (+8) | 2 |",
        "| `store` | 1 a layer of some models | 20 / - | - / - | 0 |",
    ]


def test_a_kernel_without_a_line_is_named(tmp_path: Path) -> None:
    path = write_report(tmp_path, 90, "3.9.0", ("new_kernel", 40, 0, 0))
    with pytest.raises(
        UnusableReport, match=r"3\.9\.0-90\.json: it has new_kernel, without a line in KERNELS"
    ):
        list(table_lines([path], LISTED))


def test_a_second_file_of_a_target_and_version_is_refused(tmp_path: Path) -> None:
    path = write_report(tmp_path, 90, "3.9.0", ("decode_kernel", 40, 0, 0))
    copy = tmp_path / "copy.json"
    copy.write_text(path.read_text())
    with pytest.raises(
        UnusableReport,
        match=r"copy\.json: it is of sm_90 and Triton 3\.9\.0, as .*3\.9\.0-90\.json is",
    ):
        list(table_lines([path, copy], LISTED))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ("| a table |", "is no JSON"),
        ('{"kernels": []}', "has no 'target'"),
        ('{"kernels": [{"kernel": "decode_kernel"}]}', "has no 'registers'"),
        ("[]", "is not as this command writes it"),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnusableReport, match=rf"report\.json: it {problem}"):
        list(table_lines([path], LISTED))


@pytest.mark.long
@pytest.mark.processes
def test_the_command_prints_the_table_and_compiles_nothing(tmp_path: Path) -> None:
    """Of the kernels that there are; a file it cannot use is its error."""
    path = write_report(tmp_path, 90, "3.9.0", *((name, 40, 0, 0) for name in KERNELS))
    command = [sys.executable, "-m", "ops.bench.static", "--table", str(path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = ran.stdout.splitlines()[-len(KERNELS) :]
    assert rows[0] == "| `decode` | 1 a layer | 40 | 0 |"

    refused = subprocess.run(
        [*command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "give one of them" in refused.stderr
