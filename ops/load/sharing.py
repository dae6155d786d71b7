"""Many workers on one Redis: work is spread, nothing doubled, and their maintenance does not add up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from ops.load.report import Report
from ops.load.rows import count_rows, write_rows
from ops.load.site import Site, audit, enqueue_prompts, site, unended

SLOTS, PREFETCH, LEASE_S = 8, 4, 4
SWEEP_PERIOD_S = LEASE_S / 4


def workers(count: int = 8, jobs: int = 8000, shards: int = 240, rows_per_shard: int = 20) -> Report:
    """Let `count` workers share prompts on one queue and a run's shards on another."""
    report = Report(f"workers: {count} workers, {jobs:,} prompts, {shards} shards of {rows_per_shard} rows")
    with site() as place:
        _share(place, report, count, jobs, shards, rows_per_shard)
    return report


def _share(place: Site, report: Report, count: int, jobs: int, shards: int, rows_per_shard: int) -> None:
    redis, high = place.redis, place.queue("high")
    source, output, size = place.folder / "in.parquet", place.folder / "out", shards * rows_per_shard
    write_rows(source, size, row_group_rows=1000)
    settings = {"TOKENMILL_MAX_NUM_SEQS": str(SLOTS), "TOKENMILL_PREFETCH": str(PREFETCH)}
    settings |= {"TOKENMILL_LEASE_S": str(LEASE_S), "STUB_STEP_S": "0.02"}
    most_held: Counter[str] = Counter()
    with _sweeps(redis) as sweeps:
        for number in range(count):
            place.start(f"w{number}", settings=settings)
        place.wait_until_ready()
        began, sweeps_before = time.monotonic(), sweeps[0]
        prompts = [f"prompt {number}" for number in range(jobs)]
        ids = enqueue_prompts(high, prompts, result_ttl=-1, timeout=-1)
        arguments = ("jobs.score_parquet", str(source), str(output))
        place.queue("bulk").enqueue(
            *arguments, sampling={"max_tokens": 1}, rows_per_shard=rows_per_shard, job_timeout=-1
        )

        def over() -> bool:
            for name, held in place.held().items():
                most_held[name] = max(most_held[name], held)
            return redis.zcard("rq:finished:high") == jobs and (output / "_SUCCESS").exists()

        place.wait(over)
        seconds, swept = time.monotonic() - began, sweeps[0] - sweeps_before
        place.wait(lambda: unended(place, "high", "bulk") == 0)
        last = place.stop()
    found = audit(high, zip(ids, prompts, strict=True))
    by_shard = shard_workers(place)
    report.equal("prompts without an answer", found.unanswered, 0)
    report.equal("prompts answered twice", found.doubled, 0)
    report.equal("wrong answers", found.wrong, 0)
    report.equal("rows missing or doubled", int((count_rows(output, size) != 1).sum()), 0)
    report.equal("sequences computed", sum(each["answered"] for each in last.values()), jobs + size)
    report.equal("workers that answered prompts", len(found.by_worker), count, measured=True)
    # A worker's slots are full again before others' are: on a busy machine shares differ, hoarding is more.
    for what, by_worker in (("prompts", found.by_worker), ("shards", by_shard)):
        share = max(by_worker.values()) / by_worker.total() * count
        report.at_most(f"{what} of the busiest worker ÷ fair share", share, 2.5, measured=True)
    report.tell("shards by worker", ", ".join(str(each) for each in sorted(by_shard.values())))
    # Slots and reserve of both lanes; the reserve grows where a busy machine lets steps pass between refills.
    report.at_most("jobs held by one worker at once", max(most_held.values()), 6 * (SLOTS + PREFETCH))
    allowed = seconds / SWEEP_PERIOD_S + 2
    report.at_most(f"looks for abandoned jobs in {seconds:.0f} s", swept, allowed)
    report.tell("jobs/s", (jobs + shards) / seconds)


def shard_workers(place: Site, other_than: str = "") -> Counter[str]:
    """Which worker answered each shard, from the results of jobs other than this one."""
    found: Counter[str] = Counter()
    ids = place.queue("bulk").finished_job_registry.get_job_ids(cleanup=False)
    for job_id in (each for each in ids if each != other_than):
        job = Job(job_id, connection=place.redis, serializer=JSONSerializer)
        found.update(str(result.worker_name) for result in job.results())
    return found


@contextmanager
def _sweeps(redis: Redis) -> Iterator[list[int]]:
    """Count how often any worker took the lock to look for abandoned jobs."""
    redis.config_set("notify-keyspace-events", "K$")
    taken, over = [0], threading.Event()
    listener: Any = redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    listener.subscribe("__keyspace@0__:tokenmill:maintenance:bulk")

    def listen() -> None:
        while not over.is_set():
            if listener.get_message(timeout=0.1):
                taken[0] += 1

    thread = threading.Thread(target=listen, name="sweeps")
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
        listener.close()
