"""Output tokens per second on W1, W2 and W3, ours and others' in turns, with ratios and peak memory.

    python -m ops.bench.make
    python -m ops.bench.peers --workloads W1 W2 --rounds 5 --peers peers.json

Tokenmill and transformers' padded batch are built in. peers.json names others by a shell command that prints
a line `RESULT {"tok_s": ..., ...}` as ops/bench/workload.py does (of several, the last counts) and may write
its result with all output tokens to {out}:

    {"vllm": "venv/bin/python run_vllm.py --model {model} --workload {workload} --out {out}"}
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from ops.bench.make import OUT
from ops.bench.report import gemm_ms, print_machine
from ops.bench.table import print_table, spread
from ops.bench.workload import Workload

OURS = "tokenmill"
PYTHON = shlex.quote(sys.executable)
ARGUMENTS = "--model {model} --workload {workload} --threads {threads} --out {out}"
BUILT_IN = {
    OURS: f"{PYTHON} -m ops.bench.engine {ARGUMENTS}",
    "transformers": f"{PYTHON} -m ops.bench.padded {ARGUMENTS}",
}
SAMPLE_S = 0.2


def tree_rss_mib(process: psutil.Process) -> float:
    """Resident memory of a process and all below it; pages they share count for each."""
    total = 0
    for each in [process, *_children(process)]:
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def run_peer(command: str, log: Path, timeout_s: float) -> dict[str, Any]:
    """Run a peer's command to its end; return its last RESULT, or its error, with the tree's peak memory."""
    started, peak_mib = time.monotonic(), 0.0
    with log.open("w") as output:
        process = subprocess.Popen(
            command, shell=True, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        tree = psutil.Process(process.pid)
        while process.poll() is None and time.monotonic() - started < timeout_s:
            peak_mib = max(peak_mib, tree_rss_mib(tree))
            time.sleep(SAMPLE_S)  # memory is sampled: no event tells of its peak
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    if process.returncode or not results:
        return {"error": f"status {process.returncode} after {time.monotonic() - started:.0f} s, see {log}"}
    return {**json.loads(results[-1]), "tree_peak_mib": round(peak_mib)}


def run_rounds(
    peers: dict[str, str], workload: Path, folder: Path, *, rounds: int, threads: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Run all peers in each round, each round beginning with another one; return a record of each run."""
    model = workload.parent / Workload.read(workload).model
    records = []
    for number in range(rounds):
        names = list(peers)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            stem = folder / f"{workload.stem}-{name}-{number}"
            values = {"model": model, "workload": workload, "out": f"{stem}.json", "threads": threads}
            command = peers[name]
            for key, value in values.items():
                command = command.replace(f"{{{key}}}", shlex.quote(str(value)))
            gemm = gemm_ms(threads)
            found = run_peer(command, Path(f"{stem}.log"), timeout_s)
            record = {"name": name, "round": number, "workload": workload.stem, "gemm_ms": round(gemm, 2)}
            records.append({**record, **found, "out": f"{stem}.json"})
            shown = {key: found[key] for key in ("tok_s", "tree_peak_mib", "error") if key in found}
            print(json.dumps({**record, **shown}), flush=True)
    return records


def summarize(records: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each peer: tokens per second, our ratio to it within rounds, memory, failures, agreement."""
    runs = [record for record in records if "tok_s" in record]
    ours = {run["round"]: run for run in runs if run["name"] == OURS}
    rows = []
    for name in dict.fromkeys(record["name"] for record in records):
        own = [run for run in runs if run["name"] == name]
        failed = sum(record["name"] == name and "tok_s" not in record for record in records)
        if not own:
            rows.append([name, "-", "-", "-", "-", str(failed)])
            continue
        ratios = [ours[run["round"]]["tok_s"] / run["tok_s"] for run in own if run["round"] in ours]
        agreements = [_agreement(run, ours[run["round"]]) for run in own if run["round"] in ours]
        rows.append(
            [
                name,
                spread([run["tok_s"] for run in own], 0),
                spread(ratios) if ratios and name != OURS else "-",
                f"{statistics.median(run['tree_peak_mib'] for run in own):,.0f}",
                agreements[-1] if agreements and name != OURS else "-",
                str(failed),
            ]
        )
    return rows


def _agreement(run: dict[str, Any], ours: dict[str, Any]) -> str:
    """How many sequences have the same tokens as ours, where the peer wrote its own."""
    paths = [Path(run["out"]), Path(ours["out"])]
    if not all(path.exists() for path in paths):
        return "-"
    theirs, own = (json.loads(path.read_text())["outputs"] for path in paths)
    return f"{sum(a == b for a, b in zip(theirs, own, strict=True))} of {len(own)}"


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def main() -> int:
    """Run the rounds of each workload; print a table for each. Returns 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=OUT, help="what ops.bench.make wrote")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--peers", type=Path, help="JSON: names and commands")
    parser.add_argument("--only", nargs="+", help="names to run; ours is always run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one run")
    options = parser.parse_args()
    peers = {**BUILT_IN, **(json.loads(options.peers.read_text()) if options.peers else {})}
    if options.only:
        peers = {name: command for name, command in peers.items() if name == OURS or name in options.only}
    runs = options.folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    print_machine()
    failed = False
    for name in options.workloads:
        path = options.folder / f"{name}.json"
        if not path.exists():
            sys.exit(f"{path} is missing: run `python -m ops.bench.make --out {options.folder}` first")
        records = run_rounds(
            peers, path, runs, rounds=options.rounds, threads=options.threads, timeout_s=options.timeout
        )
        with (runs / "results.jsonl").open("a") as log:
            log.writelines(json.dumps(record) + "\n" for record in records)
        failed = failed or any("error" in record for record in records)
        print(f"\n{name}: {Workload.read(path)}; {options.rounds} rounds, {options.threads} threads")
        gemm = spread([record["gemm_ms"] for record in records])
        print(f"512 x 512 product before each run: {gemm} ms; median (least..most) throughout")
        print_table(
            ["", "tok/s", "ours / theirs", "peak MiB", "same output", "failed runs"], summarize(records)
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
