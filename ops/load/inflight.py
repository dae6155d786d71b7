"""Jobs in flight for longer than every time to live there is: none lost, none done twice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rq.job import Job

from ops.load.report import Report
from ops.load.site import Site, audit, enqueue_prompts, site, unended
from ops.load.stub_engine import HELD

LEASE_S = 3
WORKER_TTL_S = 3
"""RQ keeps a worker's hash for this and another minute."""


@dataclass(frozen=True)
class Pulse:
    """What was seen of the jobs' signs of life, at the worst moment."""

    fewest_leases: int
    oldest_beat_s: float
    looks: int


def inflight(jobs: int = 500, hold_s: float = 90.0, busy_s: Sequence[float] = (0.0, 0.05)) -> Report:
    """Hold `jobs` in one worker for `hold_s` seconds, beside another worker that would take them over.

    Once for each of busy_s: how long the holder's main thread computes between two waits.
    """
    report = Report(f"inflight: {jobs:,} jobs for {hold_s:g} s, lease {LEASE_S} s")
    for seconds in busy_s:
        who = f"{'busy' if seconds else 'idle'} main thread: "
        with site() as place:
            _hold(place, report, who, {"STUB_BUSY_S": str(seconds)}, jobs, hold_s)
    return report


def _hold(place: Site, report: Report, who: str, settings: dict[str, str], jobs: int, hold_s: float) -> None:
    redis, queue, gate = place.redis, place.queue("bulk"), place.folder / "go"
    arguments = (
        "--worker-ttl",
        str(WORKER_TTL_S),
        "--job-monitoring-interval",
        "1",
        "--maintenance-interval",
        "2",
    )
    common = {"TOKENMILL_LEASE_S": str(LEASE_S), "TOKENMILL_MAX_NUM_SEQS": str(jobs), "STUB_STEP_S": "0.01"}
    # As short as an answer must last to be counted here; a queued job's own ttl ends when it is claimed.
    options: dict[str, Any] = {"result_ttl": 60, "ttl": max(1, int(hold_s / 2)), "timeout": -1}
    place.start("holder", *arguments, settings={**common, **settings, "STUB_HOLD": str(gate)})
    place.wait_until_ready()
    prompts = [HELD] * jobs
    ids = enqueue_prompts(queue, prompts, **options)
    place.wait(lambda: place.held()["holder"] == jobs)
    place.start("idle", *arguments, settings={**common, "STUB_HOLD": str(gate)})
    place.wait_until_ready()
    pulse = _watch(place, ids, hold_s)
    report.equal(f"{who}leases at the worst of {pulse.looks} looks", pulse.fewest_leases, jobs)
    report.at_most(f"{who}oldest heartbeat of a job, s", pulse.oldest_beat_s, LEASE_S, measured=True)
    gate.touch()
    place.wait(lambda: redis.zcard("rq:finished:bulk") == jobs)
    found = audit(queue, zip(ids, prompts, strict=True))
    with redis.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.exists(f"tokenmill:deaths:{job_id}")
        given_up = sum(pipe.execute())
    place.wait(lambda: unended(place, "bulk") == 0)
    last = place.stop()
    report.equal(f"{who}jobs without an answer", found.unanswered, 0)
    report.equal(f"{who}jobs answered twice", found.doubled, 0)
    report.equal(f"{who}jobs that anybody gave up", given_up, 0)
    report.equal(f"{who}jobs computed by their first worker", last["holder"]["answered"], jobs)
    report.equal(f"{who}jobs computed by the other one", last["idle"]["answered"], 0)


def _watch(place: Site, ids: list[str], hold_s: float) -> Pulse:
    """Look at every lease while RQ's own `rq info` looks too, which cleans up what it takes for abandoned."""
    fewest, oldest_s, looks = len(ids), 0.0, 0
    until = time.monotonic() + hold_s
    while time.monotonic() < until or not looks:
        place.rq("info")
        leases = sum(1 for _ in place.redis.scan_iter("rq:execution:*", count=1000))
        beat = Job.fetch(ids[0], place.redis, "json").last_heartbeat
        assert beat is not None
        fewest, oldest_s, looks = (
            min(fewest, leases),
            max(oldest_s, time.time() - beat.timestamp()),
            looks + 1,
        )
    return Pulse(fewest, oldest_s, looks)
