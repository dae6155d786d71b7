"""Runs the sections of gpu.sh one after the other and gathers what they found in one table and one file.

A section is a command of its own with its own time limit: one that fails or hangs does not stop the next, and
what it wrote before it ended is kept. The exit status is 1 if any failed, 2 if packages are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ops.bench.table import print_table, spread

OUT = Path("ops/out/gpu")
TOTAL_S = 465  # under eight minutes, with what starting and gathering take
PACKAGES = (
    "torch", "triton", "numpy", "xxhash", "transformers", "tokenizers", "safetensors", "jinja2", "pyarrow",
    "pytest", "hypothesis", "psutil",
)  # fmt: skip
GPU_TESTS = (
    "tests/engine/test_gpu.py",
    "tests/engine/test_kernels_attention.py",
    "tests/engine/test_kernels_layers.py",
    "tests/engine/test_moe.py",
)
DRY_RUN_PATIENCE = 4  # times as long: a CPU may be any, and busy
NOT_ON_GPU = "not slip_in_a_kernel"  # faulty on purpose: one may take the device down with it
TEST_PROCESSES = 6
# The suite turns every warning into an error, for the versions it is developed with; others warn of more.
PYTEST = ("pytest", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", "-rs")


@dataclass(frozen=True)
class Section:
    """One command: its module and arguments, its seconds at most, and the arguments of a dry run."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    dry_run: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def sections(out: Path) -> list[Section]:
    """What is run, the most wanted first."""
    kernels = ("ops.bench.kernels", "--json", str(out / "kernels.json"))
    throughput = ("ops.bench.throughput", "--json", str(out / "throughput.json"))
    processes = ("-n", str(TEST_PROCESSES)) if find_spec("xdist") else ()
    one_test = f"{GPU_TESTS[0]}::test_bfloat16_heads_of_128_follow_float32"
    return [
        Section("kernels", 80, kernels, (*kernels, "--dry-run")),
        Section(
            "throughput", 220, (*throughput, "--seconds", "170"), (*throughput, "--dry-run", "--rounds", "1")
        ),
        Section(
            "tests", 150, (*PYTEST, *processes, "-k", NOT_ON_GPU, *GPU_TESTS),
            (*PYTEST, one_test), {"GPU_TESTS_ON_CPU": "1"},
        ),
        Section(
            "accuracy", 60,
            ("ops.bench.accuracy", "--rows", "300", "--device", "cuda", "--attention-backend", "triton"),
            ("ops.bench.accuracy", "--rows", "3", "--batches", "1", "2", "--device", "cpu"),
        ),
        Section("host time", 60, ("ops.bench.host_time",), ("ops.bench.host_time", "--cases", "8x40")),
    ]  # fmt: skip


def run_section(section: Section, out: Path, limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Run one section; return its status and seconds. Its output goes to a log and to the terminal."""
    log = out / f"{section.name.replace(' ', '-')}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", **section.environment}
    print(f"\n== {section.name} (at most {limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *(section.dry_run if dry_run else section.command)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the test processes it started
                process.wait()
    seconds = time.monotonic() - started
    print(log.read_text(errors="replace"), flush=True)
    status = process.returncode
    return {"status": "ok" if status == 0 else f"failed ({status})", "seconds": round(seconds, 1)}


def summarize(out: Path, ran: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Rows of the last table: what was found, whatever else failed."""
    for name, found in ran.items():
        yield f"section {name}", f"{found['status']}, {found['seconds']:.0f} s"
    kernels, throughput = (_read(out / f"{name}.json") for name in ("kernels", "throughput"))
    for found in (kernels, throughput):
        if found:
            bandwidth, flops = found["ceilings"]["bandwidth"], found["ceilings"]["flops"]
            yield "copies, products", f"{bandwidth / 1e9:,.0f} GB/s, {flops / 1e12:,.0f} TFLOP/s"
            break
    for kernel in kernels.get("kernels", ()):
        yield kernel["name"], f"{kernel['floor_s'] / kernel['seconds']:.0%} of its floor's speed"
    yield from _summarize_runs(throughput)
    tests = re.findall(r"\d+ (?:passed|failed|error|skipped)", _last_line(out / "tests.log"))
    yield "GPU tests", ", ".join(tests) or "no result"


def _summarize_runs(throughput: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs = throughput.get("runs", [])
    speeds: dict[tuple[str, float], dict[int, float]] = {}
    for run in runs:
        speeds.setdefault((run["variant"], run["temperature"]), {})[run["turn"]] = run["tok_s"]
    for (variant, temperature), by_turn in speeds.items():
        share = (
            statistics.median(by_turn.values()) * throughput["floor"]["seconds"] / throughput["out_tokens"]
        )
        kind = f"temperature {temperature}" if temperature else "greedy"
        yield (
            f"256 sequences, {variant}, {kind}",
            f"{spread(list(by_turn.values()), 0)} tok/s, {share:.0%} of the floor's",
        )
    for what, faster, slower in (
        ("graphs ÷ eager, overlap", "graphs, overlap", "eager, overlap"),
        ("graphs ÷ eager, no overlap", "graphs", "eager"),
        ("overlap ÷ none, graphs", "graphs, overlap", "graphs"),
        ("overlap ÷ none, eager", "eager, overlap", "eager"),
    ):
        ratios = [
            speeds[faster, t][turn] / tok_s
            for (variant, t), by_turn in speeds.items()
            if variant == slower and (faster, t) in speeds
            for turn, tok_s in by_turn.items()
            if turn in speeds[faster, t]
        ]
        if ratios:
            yield what, f"{spread(ratios)} times"


def _read(path: Path) -> dict[str, Any]:
    """What a section wrote, {} if it did not get so far."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def main() -> int:
    """Run the sections; print the table. Returns 1 if one failed, 2 if packages are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    names = [section.name for section in sections(OUT)]
    parser.add_argument("--only", nargs="+", choices=names, help="sections to run")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, Triton's interpreter")
    options = parser.parse_args()
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"{sys.executable} lacks the packages {', '.join(missing)}: install them, or set PYTHON")
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("*.json"), *out.glob("*.log")):
        stale.unlink()
    started, patience = time.monotonic(), DRY_RUN_PATIENCE if options.dry_run else 1
    ran: dict[str, dict[str, Any]] = {}
    for section in sections(out):
        if options.only and section.name not in options.only:
            continue
        left_s = patience * TOTAL_S - (time.monotonic() - started)
        if left_s < 5:
            ran[section.name] = {"status": "not run: the time is up", "seconds": 0.0}
        else:
            ran[section.name] = run_section(
                section, out, min(patience * section.limit_s, left_s), dry_run=options.dry_run
            )
        found = {name: _read(out / f"{name}.json") for name in ("kernels", "throughput")}
        rows = list(summarize(out, ran))
        (out / "gpu.json").write_text(json.dumps({"sections": ran, **found, "summary": rows}, indent=1))
    print()
    print_table(["", "found"], rows)
    print(f"{time.monotonic() - started:.0f} s in all; logs and gpu.json are in {options.out}")
    return int(any(found["status"] != "ok" for found in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
