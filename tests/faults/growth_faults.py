"""Kills of workers whose runs gain files and rows while they are computed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.faults.harness import Harness
from tests.faults.ledger import ROWS, Run

#: The plan is put in its place by the same call as the manifest.
STEPS = ["plan written", "shard open", "part published", "part counted", "manifest renamed"]

#: Rows of the first file at first, and when it has grown; the rest are in a file that sorts before it.
FIRST, GROWN = ROWS // 3, ROWS // 2


def growing_inputs(faults: Harness, count: int) -> None:
    """SIGKILL, and SIGSTOP past the lease, before and after a run is extended; half of them while it runs."""
    for _ in range(count):
        source = faults.folder / "data" / f"{sum(faults.faults.values())}-growing"
        source.mkdir()
        _write(source / "b.jsonl", 0, FIRST)
        run = faults.ledger.ask_run(source=source, rows=FIRST, options={"extend": True})
        if faults.rng.random() < 0.5:
            faults.settle("growing inputs", resume=True)
            run = faults.ledger.follow(run)
        else:
            _kill_one(faults, run)
        _write(source / "b.jsonl", FIRST, GROWN)
        _write(source / "a.jsonl", GROWN, ROWS)
        run.rows = ROWS
        faults.ledger.submit(run)
        _kill_one(faults, run)
    faults.settle("growing inputs", resume=True)


def _kill_one(faults: Harness, run: Run) -> None:
    """Start a worker and kill it, at a step or some time after it has work."""
    worker = faults.start(faults.random_strike(faults.rng.choice(("kill", "kill", "freeze")), STEPS))
    while faults.is_alive(worker) and not faults.plan_of(worker).has_work.exists():
        time.sleep(0.01)
    deadline = time.monotonic() + faults.rng.uniform(0.1, 1.0)
    while faults.is_alive(worker) and not run.has_ended and time.monotonic() < deadline:
        time.sleep(0.01)
    faults.end(worker, signal.SIGKILL)
    faults.count("SIGKILL, growing inputs")


def _write(path: Path, begin: int, end: int) -> None:
    """Write rows behind those that are there, all at once: a reader sees whole lines."""
    lines = [json.dumps({"id": row, "prompt": f"row {row}"}) + "\n" for row in range(begin, end)]
    with path.open("a") as file:
        file.write("".join(lines))
