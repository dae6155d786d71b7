"""A run of as many shards as there may be: what planning, looks, a resubmission and a cancel take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from redis import Redis
from rq.job import JobStatus

from jobs.common.keys import run_parts_key
from jobs.runs.control import cancel_run
from jobs.runs.names import PLAN
from jobs.runs.snapshot import read_snapshot
from jobs.runs.state import RunState
from jobs.watch.runs import list_runs, list_shards, read_run
from ops.load.raw_jobs import enqueue_raw, job_ids
from ops.load.redis_usage import Usage, look, memory_bytes, since
from ops.load.report import Report
from ops.load.rows import write_rows
from ops.load.site import MIB, Site, site

QUEUE = "bulk"

QUEUE_KEY = f"rq:queue:{QUEUE}"

#: What one shard may take, however many there are: milliseconds in all, and microseconds of Redis.
MAX_MS, MAX_US = 5.0, 1000.0


def many_shards(shards: int = 100_000, others: int = 100_000, seconds: float = 60.0) -> Report:
    """Plan a run of `shards` shards of one row, work on it for some seconds, then put `others` prompts before
    its shards and as many behind them, submit it again, and cancel it."""
    report = Report(f"shards: a run of {shards:,} shards of a row, {others:,} prompts before and behind them")
    with site() as place:
        redis = place.redis
        run = _planned(place, report, shards)
        _worked_on(place, report, run, seconds)
        enqueue_raw(place.url, QUEUE, job_ids("before", others), at_front=True)
        enqueue_raw(place.url, QUEUE, job_ids("behind", others))
        _looks(redis, report, run, "some done: ")
        again = _plan(place)
        report.at_most("submitted again, ms a shard", 1000 * again.seconds / shards, MAX_MS, measured=True)
        report.at_most("submitted again, Redis µs a shard", 1e6 * again.cpu_s / shards, MAX_US, measured=True)
        _done_but_for_a_tenth(redis, run, shards)
        _looks(redis, report, run, "nine of ten done: ")
        waiting = redis.llen(QUEUE_KEY)
        cancelled = _timed(redis, lambda: cancel_run(redis, run))
        removed = waiting - redis.llen(QUEUE_KEY)
        report.at_least("jobs that a cancel takes from the queue", removed, shards // 20)
        per_job = 1e6 * cancelled.cpu_s / max(1, removed)
        report.tell("cancel, seconds", cancelled.seconds)
        report.at_most("cancel, Redis µs a job", per_job, MAX_US, measured=True)
    return report


def _planned(place: Site, report: Report, shards: int) -> str:
    redis, plan = place.redis, place.folder / "out" / PLAN
    write_rows(place.folder / "in.parquet", shards, row_group_rows=1000)
    before = memory_bytes(redis)
    took = _plan(place)
    content = json.loads(plan.read_text())
    report.equal("shards in the queue", redis.llen(QUEUE_KEY), shards)
    report.at_most("planning, ms a shard", 1000 * took.seconds / shards, MAX_MS, measured=True)
    report.tell("planning, Redis µs a shard", 1e6 * took.cpu_s / shards)
    report.tell("plan, MiB", plan.stat().st_size / MIB)
    report.tell("Redis bytes a queued shard", (memory_bytes(redis) - before) / shards)
    return str(content["run"])


def _plan(place: Site) -> Usage:
    """Submit the run to a worker that plans it and leaves; return what Redis did from its claim on."""
    redis, folder = place.redis, place.folder
    job = place.queue("high").enqueue(
        *("jobs.score_parquet", str(folder / "in.parquet"), str(folder / "out")),
        sampling={"max_tokens": 1},
        rows_per_shard=1,
        queue=QUEUE,
        job_timeout=-1,
    )
    place.start("planner", "--max-jobs", "1")
    place.wait(lambda: job.get_status() != JobStatus.QUEUED)
    before = look(redis)
    place.wait(lambda: job.get_status() != JobStatus.STARTED, timeout_s=3000)
    usage = since(redis, before)
    assert job.is_finished, job.latest_result()
    place.join()
    return usage


def _worked_on(place: Site, report: Report, run: str, seconds: float) -> None:
    """Let a worker answer shards for some seconds."""
    state = RunState(place.redis, run)
    place.start("w")
    place.wait(lambda: len(state.records()) > 0)
    before, began = len(state.records()), look(place.redis)
    over = time.monotonic() + seconds
    place.wait(lambda: time.monotonic() > over)
    usage, done = since(place.redis, began), len(state.records()) - before
    place.stop()
    report.tell("shards/s of one worker", done / usage.seconds)
    report.tell("Redis µs a shard, from claim to end", 1e6 * usage.cpu_s / max(1, done))


def _looks(redis: Redis, report: Report, run: str, when: str) -> None:
    """What each way to look at the run takes."""
    ways: dict[str, Callable[[], object]] = {
        "status of the run": lambda: read_snapshot(redis, run),
        "list of runs": lambda: list_runs(redis),
        "page of the run": lambda: read_run(redis, run),
        "page of its shards": lambda: list_shards(redis, run),
        "whether it is complete": lambda: redis.hlen(run_parts_key(run)),
    }
    for what, way in ways.items():
        took = _timed(redis, way)
        report.tell(
            f"{when}{what}, ms / ms of Redis", f"{1000 * took.seconds:,.0f} / {1000 * took.cpu_s:,.0f}"
        )


def _done_but_for_a_tenth(redis: Redis, run: str, shards: int) -> None:
    """Record parts as their workers do, so that what looks at them meets as many as there would be."""
    state = RunState(redis, run)
    known = next(iter(state.parts().values()))
    done = range(shards - shards // 10)
    for start in range(0, len(done), 1000):
        found = {shard: replace(known, shard=shard) for shard in done[start : start + 1000]}
        state.amend_parts(found, {}, shards)
    state.count_anew()


def _timed(redis: Redis, work: Callable[[], object]) -> Usage:
    before = look(redis)
    work()
    return since(redis, before)
