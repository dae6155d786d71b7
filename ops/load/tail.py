"""The last jobs of a queue, fewer than there are places: every worker gets its share of them.

A step of the stub engine takes longer the more runs in it, as one of a GPU does: whoever holds all that is
left answers it later than several would.
"""

from __future__ import annotations

import time
from collections import Counter

from ops.load.report import Report
from ops.load.rows import count_rows, write_rows
from ops.load.sharing import shard_workers
from ops.load.site import Site, audit, enqueue_prompts, site, unended

SLOTS = 256
STEP_S, SEQUENCE_S = 0.01, 0.0005
"""Seconds of a step, and of each sequence in it."""


def tail(
    workers: int = 3, jobs: int = 60, tokens: int = 300, shards: int = 3, rows_per_shard: int = 40
) -> Report:
    """Give idle workers fewer prompts than one of them has places for, then fewer rows."""
    report = Report(f"tail: {workers} workers of {SLOTS} places, {jobs} prompts, then {shards} small shards")
    settings = {"TOKENMILL_MAX_NUM_SEQS": str(SLOTS), "TOKENMILL_LEASE_S": "30"}
    settings |= {"STUB_STEP_S": str(STEP_S), "STUB_SEQUENCE_S": str(SEQUENCE_S)}
    with site() as place:
        for number in range(workers):
            place.start(f"w{number}", settings=settings)
        place.wait_until_ready()
        heard_by = time.monotonic() + 5.0  # they hear of each other every two seconds
        place.wait(lambda: time.monotonic() > heard_by)
        _prompts(place, report, workers, jobs, tokens)
        _shards(place, report, workers, shards, rows_per_shard, tokens)
        place.wait(lambda: unended(place, "high", "bulk") == 0)
        place.stop()
    return report


def _prompts(place: Site, report: Report, workers: int, jobs: int, tokens: int) -> None:
    queue, redis = place.queue("high"), place.redis
    prompts = [f"prompt {number}" for number in range(jobs)]
    began = time.monotonic()
    ids = enqueue_prompts(queue, prompts, {"max_tokens": tokens}, result_ttl=-1, timeout=-1)
    place.wait(lambda: redis.zcard("rq:finished:high") == jobs)
    seconds = time.monotonic() - began
    found = audit(queue, zip(ids, prompts, strict=True))
    report.equal("prompts without an answer", found.unanswered, 0)
    report.equal("prompts answered twice", found.doubled, 0)
    _judge(report, "prompts", found.by_worker, jobs, workers)
    ideal_s = tokens * (STEP_S + SEQUENCE_S * -(-jobs // workers))
    report.tell("seconds to the last answer", seconds)
    report.tell("seconds to the last answer ÷ ideal", seconds / ideal_s)
    report.tell("ideal with one worker ÷ ideal", tokens * (STEP_S + SEQUENCE_S * jobs) / ideal_s)


def _shards(place: Site, report: Report, workers: int, shards: int, rows_per_shard: int, tokens: int) -> None:
    source, output, size = place.folder / "in.parquet", place.folder / "out", shards * rows_per_shard
    write_rows(source, size, row_group_rows=1000)
    planning = place.queue("bulk").enqueue(
        *("jobs.score_parquet", str(source), str(output)),
        sampling={"max_tokens": tokens},
        rows_per_shard=rows_per_shard,
        job_timeout=-1,
    )
    place.wait((output / "_SUCCESS").exists)
    place.wait(lambda: unended(place, "bulk") == 0)
    report.equal("rows missing or doubled", int((count_rows(output, size) != 1).sum()), 0)
    by_worker = shard_workers(place, other_than=planning.id)
    _judge(report, "shards", by_worker, shards, workers)


def _judge(report: Report, what: str, by_worker: Counter[str], num_jobs: int, workers: int) -> None:
    report.tell(f"{what} by worker", ", ".join(str(each) for each in sorted(by_worker.values())))
    # One more than its share: a worker that is slow to look leaves its part to the others. Not of shards.
    most = -(-num_jobs // workers) + (num_jobs > workers)
    report.at_most(f"{what} of the busiest worker", max(by_worker.values()), most, measured=True)
