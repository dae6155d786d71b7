"""Kills of workers whose runs read other formats than Parquet, or write one file of all rows in the end."""

from __future__ import annotations

import csv
import gzip
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.faults.harness import Harness
from tests.faults.ledger import ROWS

#: Around what these runs do otherwise: their files are looked through, opened, and put together.
STEPS = [
    "plan written",
    "shard open",
    "part published",
    "part counted",
    "output opened",
    "manifest text",
    "manifest renamed",
    "leftover deleted",
]


def other_formats(faults: Harness, count: int) -> None:
    """SIGKILL, and SIGSTOP past the lease, while such runs go on."""
    for turn in range(count):
        name, write, options = _KINDS[turn % len(_KINDS)]
        folder = faults.folder / "data"
        source = write(folder / f"{sum(faults.faults.values())}-{name}")
        run = faults.ledger.ask_run(source=source, options=options)
        action = faults.rng.choice(("kill", "kill", "freeze"))
        worker = faults.start(faults.random_strike(action, STEPS))
        while faults.is_alive(worker) and not faults.plan_of(worker).has_work.exists():
            time.sleep(0.01)
        deadline = time.monotonic() + faults.rng.uniform(0.1, 1.0)
        while faults.is_alive(worker) and not run.has_ended and time.monotonic() < deadline:
            time.sleep(0.01)
        faults.end(worker, signal.SIGKILL)
        faults.count(f"SIGKILL, {name}")
    faults.settle("other formats")


def _prompts() -> list[str]:
    return [f"row {number}" for number in range(ROWS)]


def _write_csv(path: Path) -> Path:
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "prompt"])
        writer.writerows(enumerate(_prompts()))
    return path


def _write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(_prompts())))
    return path


def _write_stream(path: Path) -> Path:
    table = pa.table({"id": range(ROWS), "prompt": _prompts()})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return path


def _write_batch(path: Path) -> Path:
    post = {"method": "POST", "url": "/v1/completions"}
    lines = [
        {"custom_id": str(i), **post, "body": {"prompt": p, "max_tokens": 2}}
        for i, p in enumerate(_prompts())
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


_KINDS: list[tuple[str, Callable[[Path], Path], dict[str, Any]]] = [
    ("in.jsonl", _write_jsonl, {"single_file": True}),
    ("batch.jsonl", _write_batch, {"input_format": "openai-batch"}),
    ("in.csv.gz", _write_csv, {}),
    ("in.arrows", _write_stream, {"single_file": True}),
]
