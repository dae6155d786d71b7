"""What one Redis carries: jobs per second up to its knee, and what a job costs it.

    python -m ops.bench.knee

First real `rq worker` processes, whose engine computes nothing, work off a queue that was filled before: on a
machine of few cores they are the limit. Redis' own processor time per job says where the knee of a Redis
with a core of its own lies. So that this is no mere sum, the commands of a job are recorded then, and sent
again by a client that costs next to nothing: as fast as Redis answers, and at shares of that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psutil
from redis import Redis

from ops.bench.report import print_machine
from ops.bench.table import print_table
from ops.load.raw_jobs import enqueue_raw, job_ids
from ops.load.redis_usage import Usage, look, since
from ops.load.replay import Replay, record, replay
from ops.load.site import Site, site
from tests.redis_server import running_redis_server

QUEUE = "bulk"
SLOTS = 256
SAMPLE = 2000
"""Jobs whose time in the queue is looked at."""

SHARES = (0.25, 0.5, 0.75, 0.9)
"""Of the highest rate, at which the replay is paced."""

PACED_SHARE, PACED_S, TICK_S = 0.5, 3.0, 0.02
"""Of what the workers reached: the rate at which they are given jobs to tell the time in the queue, for so
long, and how often some are enqueued."""


@dataclass(frozen=True)
class Point:
    """Some workers at a full queue. wait_s: sorted seconds in the queue of jobs that came at a pace."""

    workers: int
    jobs: int
    usage: Usage
    worker_cpu_s: float
    round_trips: int
    wait_s: list[float]

    def row(self) -> list[str]:
        usage, jobs = self.usage, self.jobs
        return [
            str(self.workers),
            f"{jobs / usage.seconds:,.0f}",
            f"{usage.share:.0%}",
            f"{1e6 * usage.cpu_s / jobs:.0f}",
            f"{usage.commands / jobs:.1f}",
            f"{self.round_trips / jobs:.3f}",
            f"{usage.num_bytes / jobs:,.0f}",
            f"{1e6 * self.worker_cpu_s / jobs:.0f}",
            f"{1000 * quantile(self.wait_s, 0.5):.0f} / {1000 * quantile(self.wait_s, 0.99):.0f}",
        ]


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest rank; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def measure(workers: int, jobs: int) -> Point:
    """Let so many workers serve a queue that is full when they begin, then jobs that come at a pace."""
    with site() as place:
        redis = place.redis
        for number in range(workers):
            place.start(
                f"w{number}", settings={"TOKENMILL_MAX_NUM_SEQS": str(SLOTS), "TOKENMILL_LEASE_S": "60"}
            )
        place.wait_until_ready()
        redis.set("rq:suspended", "1")
        time.sleep(0.2)  # a claim that is on its way
        enqueue_raw(place.url, QUEUE, job_ids("full", jobs))
        cpu_s, round_trips = _worker_cpu_s(place), _round_trips(redis)
        before = look(redis)
        redis.delete("rq:suspended")
        _wait_for(place, jobs)
        usage = since(redis, before)
        cpu_s, round_trips = _worker_cpu_s(place) - cpu_s, _round_trips(redis) - round_trips
        wait_s = _paced(place, PACED_SHARE * jobs / usage.seconds, jobs)
        place.stop()
    return Point(workers, jobs, usage, cpu_s, round_trips, wait_s)


def _paced(place: Site, jobs_per_s: float, done_before: int) -> list[float]:
    """Enqueue some every few milliseconds; return seconds in the queue of a sample, sorted."""
    began, enqueued = time.monotonic(), 0
    total = max(1, int(PACED_S * jobs_per_s))
    while enqueued < total:
        due = min(total, int((time.monotonic() - began) * jobs_per_s) + 1)
        enqueue_raw(place.url, QUEUE, job_ids("paced", due - enqueued, enqueued))
        enqueued = due
        time.sleep(TICK_S)
    redis = place.redis
    _wait_for(place, done_before + total)
    with redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids("paced", total)[:: max(1, total // SAMPLE)]:
            pipe.hmget(f"rq:job:{job_id}", "enqueued_at", "started_at")
        found = pipe.execute()
    return sorted(_moment(started) - _moment(enqueued_at) for enqueued_at, started in found)


def _wait_for(place: Site, jobs: int) -> None:
    """Return once so many have ended. Raises AssertionError where one has failed."""
    place.wait(lambda: place.redis.zcard(f"rq:finished:{QUEUE}") + _failed(place) >= jobs)
    assert not _failed(place), "jobs of the bench failed"


def _failed(place: Site) -> int:
    return int(place.redis.zcard(f"rq:failed:{QUEUE}"))


def _moment(text: bytes) -> float:
    return datetime.fromisoformat(text.decode()).timestamp()


def _worker_cpu_s(place: Site) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in place.processes()]
    return float(sum(each.user + each.system for each in times))


def _round_trips(redis: Redis) -> int:
    """Reads from sockets: a pipeline that comes in one piece counts once."""
    return int(redis.info("stats")["total_reads_processed"])


def replayed(clients: int, jobs: int, batch: int) -> list[list[str]]:
    """The rows of the replay's table: as fast as may be, then paced."""
    with running_redis_server() as url:
        recordings = record(url, clients, jobs, batch)
        fastest = replay(url, recordings)
        rows = [_replay_row("none", fastest)]
        for share in SHARES:
            paced = replay(url, recordings, share * fastest.jobs_per_s)
            rows.append(_replay_row(f"{share:.0%}", paced))
    return rows


def _replay_row(pace: str, found: Replay) -> list[str]:
    batch_s = sorted(found.batch_s)
    return [
        pace,
        f"{found.jobs_per_s:,.0f}",
        f"{found.usage.share:.0%}",
        f"{1e6 * found.usage.cpu_s / found.jobs:.0f}",
        f"{found.jobs / found.usage.cpu_s:,.0f}",
        f"{found.usage.commands / found.jobs:.1f}",
        f"{1000 * quantile(batch_s, 0.5):.1f} / {1000 * quantile(batch_s, 0.99):.1f}",
    ]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--jobs", type=int, default=20_000, help="for each number of workers")
    parser.add_argument("--clients", type=int, default=4, help="of the replay")
    parser.add_argument("--replayed-jobs", type=int, default=5000, help="of each client")
    parser.add_argument(
        "--batch", type=int, default=64, help="jobs that a client of the replay claims at once"
    )
    options = parser.parse_args()
    print_machine()
    points = [measure(count, options.jobs) for count in options.workers]
    print(f"\n{options.jobs:,} queued prompts, then half of that rate at a pace; {SLOTS} places a worker\n")
    header = ["workers", "jobs/s", "Redis' core", "Redis µs/job", "commands/job", "reads/job", "bytes/job"]
    print_table([*header, "workers µs/job", "ms in queue, p50 / p99"], [point.row() for point in points])
    print(f"\nreplay by {options.clients} clients, {options.batch} jobs a batch\n")
    header = ["pace", "jobs/s", "Redis' core", "Redis µs/job", "jobs/s of a core", "commands/job"]
    rows = replayed(options.clients, options.replayed_jobs, options.batch)
    print_table([*header, "ms a batch, p50 / p99"], rows)
    print_machine()


if __name__ == "__main__":
    main()
