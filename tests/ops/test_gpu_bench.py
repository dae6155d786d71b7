"""The one command for a GPU machine: its dry run, and that a failing or hanging section stops no other."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench import gpu
from ops.bench.floor import Ceilings, floor_of
from ops.bench.gpu import Section, sections
from ops.bench.make import SHAPES, mixed_256
from ops.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]


def test_the_dry_run_writes_a_table_and_a_file(tmp_path: Path) -> None:
    """Through the shell script, two sections of it; the others run in this process below."""
    command = ["bash", str(ROOT / "ops/bench/gpu.sh"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "kernels", "tests"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: each["status"] for name, each in found["sections"].items()} == {
        "kernels": "ok",
        "tests": "ok",
    }
    assert len(found["kernels"]["kernels"]) == 6
    assert dict(found["summary"])["GPU tests"] == "1 passed"
    assert "| section kernels" in done.stdout


@pytest.mark.parametrize("name", ["throughput", "accuracy", "host time"])
def test_each_other_section_runs_dry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the very arguments of the dry run."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    section = next(each for each in sections(tmp_path) if each.name == name)
    module, *arguments = section.dry_run
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    assert not importlib.import_module(module).main()
    assert "\n| " in capsys.readouterr().out
    rows = dict(gpu.summarize(tmp_path, {}))
    assert name != "throughput" or "times" in rows["graphs ÷ eager, overlap"]


def test_a_section_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the hanging one wrote before its time was up is kept."""
    kernel = {"name": "a kernel", "seconds": 2.0, "floor_s": 1.0, "bandwidth": 1.0}
    text = json.dumps({"ceilings": {"bandwidth": 1e9, "flops": 1e12}, "kernels": [kernel]})
    write = f"open({str(tmp_path / 'kernels.json')!r}, 'w').write({text!r})"
    hang = f"exec({write + '; import signal; signal.pause()'!r})"
    (tmp_path / "hang.py").write_text(hang)
    (tmp_path / "well.py").write_text("print('well')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = [
        Section("fails", 60, ("no_such_module",), ()),
        Section("hangs", 1, ("hang",), ()),
        Section("well", 60, ("well",), ()),
    ]
    monkeypatch.setattr(gpu, "sections", lambda out: made)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    statuses = [each["status"] for each in found["sections"].values()]
    assert statuses == ["failed (1)", "failed (-9)", "ok"]
    assert dict(found["summary"])["a kernel"] == "50% of its floor's speed"
    assert "No module named no_such_module" in capsys.readouterr().out


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in ("xxhash", "jinja2") else True)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "lacks the packages xxhash, jinja2" in capsys.readouterr().out


def test_the_floor_is_the_bytes_and_operations_of_the_run() -> None:
    """By hand on one sequence; and the H200's run has nano-vLLM's number of tokens."""
    shape, workload = SHAPES["tiny"], Workload("one", "tiny", [[1, 2, 3]], [3])
    floor = floor_of(workload, shape, Ceilings(bandwidth=1.0, flops=1.0), itemsize=2)
    # K and V of one layer with one head of 16; the second and third token read 4 and 5 tokens
    assert floor.kv_reads == (2 * 16 * 2) * (4 + 5)
    # queries 32 x 32, keys and values 16 x 32, output 32 x 32, three of 64 x 32; the head 512 x 32
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32
    assert floor.weight_reads == 2 * 2 * (layer + 512 * 32)
    assert floor.prefill == 2 * layer * 3 + 4 * 2 * 16 * (1 + 2 + 3)
    assert sum(mixed_256().lengths) == 133_966
