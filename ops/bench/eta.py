"""How near `tokenmill status` comes to a run's end: five runs of skewed lengths, with real workers.

    OMP_NUM_THREADS=1 python -m ops.bench.eta --cases 0 1 2
    OMP_NUM_THREADS=1 python -m ops.bench.eta --cases 3 4

Rows sorted by length, few long answers, equal rows at temperature 0, a worker that joins and one that
leaves, a run that is cancelled and resumed. What is told from a quarter of each run on, until a twentieth of
it is left, is compared with the time that then was left. Runs last about half a minute: a worker holds a
shard for some seconds, and what is fixed (its start, the last rows of the last shard) must be a small part,
as it is in runs of hours.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from jobs.runs.control import cancel_run, submit_run
from jobs.runs.snapshot import read_snapshot
from ops.bench.dry_run import QUEUE, WORDS, _worker
from ops.bench.report import print_machine
from tests.redis_server import running_redis_server

LOOK_S = 0.25


@dataclass(frozen=True)
class Case:
    """A run. at: shares of its rows after which something happens."""

    name: str
    make: Callable[[random.Random, int], dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    joins_at: float | None = None
    leaves_at: float | None = None
    cancelled_at: float | None = None


def by_length(rng: random.Random, rows: int) -> dict[str, Any]:
    lengths = sorted(min(200, int(rng.lognormvariate(2.5, 1)) + 1) for _ in range(rows))
    return {"prompt": [_text(rng, each) for each in lengths], "limit": [4 + each // 4 for each in lengths]}


def few_long(rng: random.Random, rows: int) -> dict[str, Any]:
    limits = [200 if rng.random() < 0.02 else rng.randint(4, 16) for _ in range(rows)]
    return {"prompt": [_text(rng, 12) for _ in limits], "limit": limits}


def repeated(rng: random.Random, rows: int) -> dict[str, Any]:
    texts = [_text(rng, rng.randint(5, 60)) for _ in range(rows // 3)]
    return {"prompt": rng.choices(texts, k=rows), "limit": [24] * rows}


CASES: Sequence[Case] = (
    Case("sorted by length", by_length),
    Case("few long answers", few_long),
    Case("equal greedy rows", repeated, {"sampling": {"temperature": 0}}),
    Case("one joins, one leaves", by_length, {}, 2, 0.15, 0.4),
    Case("cancelled and resumed", few_long, {}, 1, None, None, 0.3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="ops/demo/model")
    parser.add_argument(
        "--rows", type=int, default=40_000, help="of a worker that is alone; of two, twice that"
    )
    parser.add_argument("--rows-per-shard", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers, from 0")
    args = parser.parse_args()
    print_machine()
    print(f"{'run':26} {'seconds':>8} {'looks':>6} {'median off by':>14} {'nine in ten':>12}")
    medians = []
    with running_redis_server() as url, tempfile.TemporaryDirectory() as folder, Redis.from_url(url) as redis:
        start = partial(_worker, args.model, 1, url, folder)
        for number in args.cases:
            case = CASES[number]
            began_at, end, told = _run(redis, Path(folder) / str(number), case, args, start)
            quarter, last = began_at + (end - began_at) / 4, end - (end - began_at) / 20
            off = sorted(abs(left - (end - at)) / (end - at) for at, left in told if quarter <= at <= last)
            medians.append(statistics.median(off))
            most = off[int(0.9 * (len(off) - 1))]
            print(
                f"{case.name:26} {end - began_at:>8.1f} {len(off):>6} {medians[-1]:>14.1%} {most:>12.1%}",
                flush=True,
            )
    print(f"median over the runs {statistics.median(medians):.1%}")


def _run(
    redis: Redis, folder: Path, case: Case, args: argparse.Namespace, start: Callable[[], Popen[bytes]]
) -> tuple[float, float, list[tuple[float, float]]]:
    """Return when the run began and ended, and at which times how many seconds were said to be left."""
    folder.mkdir()
    table = pa.table(case.make(random.Random(args.seed), args.rows * case.workers))
    pq.write_table(table, folder / "in.parquet")
    arguments = {
        "input": str(folder / "in.parquet"),
        "output": str(folder / "out"),
        "rows_per_shard": args.rows_per_shard,
        "sampling_columns": {"max_tokens": "limit"},
        **case.arguments,
    }
    arguments["sampling"] = {**arguments.get("sampling", {}), "ignore_eos": True}
    workers = [start() for _ in range(case.workers)]
    events = sorted((at, what) for what, at in _events(case).items() if at is not None)
    told: list[tuple[float, float]] = []
    try:
        while redis.scard(f"rq:workers:{QUEUE}") < case.workers:
            time.sleep(0.1)
        run, began_at = submit_run(redis, QUEUE, **arguments), time.time()
        while not (folder / "out" / "_SUCCESS").exists():
            time.sleep(LOOK_S)
            snapshot, now = read_snapshot(redis, run), time.time()
            if snapshot.left_s is not None and snapshot.state == "running":
                told.append((now, snapshot.left_s))
            if events and snapshot.rows and snapshot.rows_done >= events[0][0] * snapshot.rows:
                _, what = events.pop(0)
                if what == "joins":
                    workers.append(start())
                elif what == "leaves":
                    workers[0].terminate()
                else:
                    cancel_run(redis, run)
                    time.sleep(3)
                    submit_run(redis, QUEUE, **arguments)
                    began_at, told = time.time(), []
        return began_at, time.time(), told
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def _events(case: Case) -> dict[str, float | None]:
    return {"joins": case.joins_at, "leaves": case.leaves_at, "cancelled": case.cancelled_at}


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


if __name__ == "__main__":
    main()
