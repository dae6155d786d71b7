"""A deep queue, drained by one worker and by several: every prompt once, and no slower for the depth."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ops.load.report import Report
from ops.load.site import MIB, Sample, Site, audit, enqueue_prompts, site, unended

#: A queued prompt job may take this much of Redis beyond its prompt: RQ's own hash, and no more of ours.
MAX_QUEUED_BYTES = 2048

#: And a finished one, with its answer of a few words.
MAX_FINISHED_BYTES = 4096


def queued(jobs: int = 100_000, worker_counts: Sequence[int] = (1, 4)) -> Report:
    """Drain `jobs` prompts once for each number of workers."""
    report = Report(f"queued: {jobs:,} prompts")
    for workers in worker_counts:
        with site() as place:
            _drain(place, report, jobs, workers)
    return report


def _drain(place: Site, report: Report, jobs: int, workers: int) -> None:
    queue, redis = place.queue("bulk"), place.redis
    prompts = [f"prompt {number:08d}" for number in range(jobs)]
    before = redis.info("memory")["used_memory"]
    started = time.monotonic()
    ids = enqueue_prompts(queue, prompts, result_ttl=-1, timeout=-1)
    enqueue_s = time.monotonic() - started
    queued_bytes = (redis.info("memory")["used_memory"] - before) / jobs
    with place.sampled(lambda: redis.zcard("rq:finished:bulk")) as samples:
        for number in range(workers):
            place.start(f"w{number}", "--burst")
        last = place.join(timeout_s=3600)
    finished_bytes = (redis.info("memory")["used_memory"] - before) / jobs
    found = audit(queue, zip(ids, prompts, strict=True))
    who = f"{workers} worker{'s' * (workers > 1)}: "
    if workers == 1 or not report.lines:
        report.tell("enqueued per second", jobs / enqueue_s)
        report.at_most("Redis bytes per queued job", queued_bytes, MAX_QUEUED_BYTES)
    report.at_most(f"{who}Redis bytes per finished job", finished_bytes, MAX_FINISHED_BYTES)
    report.equal(f"{who}jobs finished", redis.zcard("rq:finished:bulk"), jobs)
    report.equal(f"{who}jobs without an answer", found.unanswered, 0)
    report.equal(f"{who}jobs answered twice", found.doubled, 0)
    report.equal(f"{who}wrong answers", found.wrong, 0)
    report.equal(f"{who}prompts computed", sum(each.get("answered", 0) for each in last.values()), jobs)
    report.equal(f"{who}workers that took part", len(found.by_worker), workers, measured=True)
    report.equal(f"{who}executions left", unended(place, "bulk"), 0)
    _tell_speed(report, who, samples, jobs)
    peaks = [each.get("peak_rss_bytes", 0) / MIB for each in last.values()]  # nothing of one that took no job
    report.tell(f"{who}peak RSS of a worker, MiB", max(peaks))


def _tell_speed(report: Report, who: str, samples: Sequence[Sample], jobs: int) -> None:
    """jobs/s in the first and in the last third: what the depth costs, and what finished jobs cost."""
    busy = [each for each in samples if 0 < each.done < jobs]
    if len(busy) < 6:
        return
    third = len(busy) // 3
    rates = [_rate(part[0], part[-1]) for part in (busy[:third], busy[third:-third], busy[-third:])]
    report.tell(f"{who}jobs/s by thirds", ", ".join(f"{rate:,.0f}" for rate in rates))
    report.at_least(f"{who}jobs/s, last third ÷ first", rates[2] / rates[0], 0.5, measured=True)
    growth = busy[-1].rss_bytes / busy[third].rss_bytes
    report.at_most(f"{who}RSS at the end ÷ after a third", growth, 1.1, measured=True)


def _rate(first: Sample, last: Sample) -> float:
    return (last.done - first.done) / max(1e-9, last.seconds - first.seconds)
