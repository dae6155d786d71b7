"""Load on real workers and a real Redis: `python -m ops.load <scenario>`.

Prints what it found and exits with 1 when a bound is broken. The engine is a stub that computes nothing,
but for `urgent` and `hostile`.
Needs the test suite's dependencies and a Redis server's executable, and runs from the repository's root.
"""

from __future__ import annotations

import argparse
import signal
import sys

from ops.load.attacks import ATTACKS
from ops.load.deep import deep
from ops.load.flood import flood
from ops.load.hostile import hostile
from ops.load.inflight import inflight
from ops.load.many_shards import many_shards
from ops.load.queued import queued
from ops.load.repeats import repeats
from ops.load.report import Report
from ops.load.rows import SIZES, rows
from ops.load.sharing import workers
from ops.load.soak import soak
from ops.load.stored_rows import SIZES as STORED_SIZES
from ops.load.stored_rows import stored_rows
from ops.load.tail import tail
from ops.load.urgent import urgent


def main() -> int:
    """Run one scenario; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ops.load", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="scenario", required=True)
    command = commands.add_parser("queued", help="a deep queue, drained by one worker and by several")
    command.add_argument("--jobs", type=int, default=100_000)
    command.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    command = commands.add_parser("workers", help="many workers on one Redis")
    command.add_argument("--count", type=int, default=8)
    command.add_argument("--jobs", type=int, default=8000)
    command.add_argument("--shards", type=int, default=240)
    command = commands.add_parser("tail", help="the last jobs of a queue, fewer than there are places")
    command.add_argument("--workers", type=int, default=3)
    command.add_argument("--jobs", type=int, default=60)
    command = commands.add_parser("deep", help="a queue of millions of jobs")
    command.add_argument("--jobs", type=int, default=1_000_000)
    command.add_argument("--seconds", type=float, default=10.0)
    command.add_argument("--most-mib", type=int, default=8192, help="of Redis; ten million jobs take 15,600")
    command = commands.add_parser("shards", help="a run of as many shards as there may be")
    command.add_argument("--shards", type=int, default=100_000)
    command.add_argument("--others", type=int, default=100_000)
    command.add_argument("--seconds", type=float, default=60.0)
    command = commands.add_parser("rows", help="Parquet runs of growing size")
    command.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    command.add_argument("--row-group-rows", type=int, default=10_000)
    command.add_argument("--rows-per-shard", type=int, default=1000)
    command.add_argument("--workers", type=int, default=1)
    command = commands.add_parser("stored-rows", help="the same from and to an object store")
    command.add_argument("--sizes", type=int, nargs="+", default=STORED_SIZES)
    command.add_argument("--row-group-rows", type=int, default=10_000)
    command.add_argument("--rows-per-shard", type=int, default=1000)
    command.add_argument("--workers", type=int, default=1)
    command = commands.add_parser("repeats", help="a greedy run whose prompts repeat")
    command.add_argument("--rows", type=int, default=200_000)
    command.add_argument("--distinct", type=int, default=2772)
    command.add_argument("--workers", type=int, default=1)
    command.add_argument("--memo-bytes", type=int, help="the worker's setting; 0 keeps no answers")
    command = commands.add_parser("inflight", help="jobs in flight for longer than every time to live")
    command.add_argument("--jobs", type=int, default=500)
    command.add_argument("--seconds", type=float, default=90.0)
    command = commands.add_parser("flood", help="two lanes under pressure")
    command.add_argument("--bulk", type=int, default=20_000)
    command.add_argument("--intervals", type=int, default=20)
    command = commands.add_parser("urgent", help="high prompts into a full bulk batch, timed")
    command.add_argument("--prompts", type=int, default=300)
    command = commands.add_parser("hostile", help="small prompts beside each attack on their worker")
    command.add_argument("--attacks", type=int, nargs="+", default=range(1, len(ATTACKS) + 1))
    command.add_argument("--seconds", type=float, default=20.0)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("soak", help="everything at once")
    command.add_argument("--minutes", type=float, default=60.0)
    command.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    report = _run(options)
    print(report.table(), flush=True)
    # What time and memory an attack costs depends on the machine's load; that others get answers does not.
    return 1 if report.broken(measured=options.scenario != "hostile") else 0


def _run(options: argparse.Namespace) -> Report:
    if options.scenario == "queued":
        return queued(options.jobs, options.workers)
    if options.scenario == "workers":
        return workers(options.count, options.jobs, options.shards)
    if options.scenario == "deep":
        return deep(options.jobs, options.seconds, options.most_mib)
    if options.scenario == "shards":
        return many_shards(options.shards, options.others, options.seconds)
    if options.scenario == "tail":
        return tail(options.workers, options.jobs)
    if options.scenario == "repeats":
        return repeats(options.rows, options.distinct, options.workers, options.memo_bytes)
    if options.scenario == "inflight":
        return inflight(options.jobs, options.seconds)
    if options.scenario == "flood":
        return flood(options.bulk, options.intervals)
    if options.scenario == "urgent":
        return urgent(options.prompts)
    if options.scenario == "hostile":
        attacks = [ATTACKS[number - 1] for number in options.attacks]
        return hostile(attacks, options.seconds, options.rounds, seed=options.seed)
    if options.scenario == "soak":
        return soak(options.minutes, options.seed)
    if options.scenario == "stored-rows":
        return stored_rows(options.sizes, options.row_group_rows, options.rows_per_shard, options.workers)
    return rows(options.sizes, options.row_group_rows, options.rows_per_shard, options.workers)


if __name__ == "__main__":
    sys.exit(main())
