"""Everything at once for an hour: memory, files, threads and Redis stay flat, and what is done expires."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rq import Callback, Retry
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from ops.load.report import Report
from ops.load.rows import write_rows
from ops.load.site import MIB, Sample, Site, site, unended
from ops.load.stub_engine import REFUSED

FUNCTIONS = "tests.worker.functions."
QUEUES = ("high", "bulk")
TTL_S = 3
RUN_ROWS, ROWS_PER_SHARD, NUM_RUNS = 2000, 100, 4
KEYS_OF_A_RUN = 2 + 2 * RUN_ROWS // ROWS_PER_SHARD
"""Of the run, and of each shard's job and result, which are kept for a day."""
OTHER_KEYS, MAX_REST_MIB = 40, 3.0
"""What Redis may hold at rest: keys of queues, registries, workers and schedulers, and the last claims."""
WORKERS = 2
MAX_GROWTH = 0.05
"""Of what is held, over the second half; in an hour a leak of one part in a thousand a minute shows."""


@dataclass
class Asked:
    """How much was asked of each kind."""

    prompts: int = 0
    functions: int = 0
    failures: int = 0
    retries: int = 0
    cancels: int = 0
    stops: int = 0
    runs: int = 0
    live: list[str] = field(default_factory=list)


def soak(minutes: float = 60.0, seed: int = 1) -> Report:
    """Ask for jobs of every kind for `minutes`; then let everything end and expire."""
    report = Report(f"soak: {minutes:g} minutes, {WORKERS} workers, seed {seed}")
    with site() as place:
        _soak(place, report, minutes * 60, random.Random(seed))
    return report


def _soak(place: Site, report: Report, seconds: float, rng: random.Random) -> None:
    write_rows(place.folder / "in.parquet", RUN_ROWS, row_group_rows=500)
    for number in range(WORKERS):
        settings = {"STUB_STEP_S": "0.002", "TOKENMILL_MAX_WORKER_DEATHS": "2"}
        place.start(f"w{number}", "--maintenance-interval", "2", "--with-scheduler", settings=settings)
    place.wait_until_ready()
    asked, until = Asked(), time.monotonic() + seconds
    with place.sampled(lambda: 0, period_s=max(0.25, seconds / 1000)) as samples:
        while time.monotonic() < until:
            _ask(place, asked, rng)
            time.sleep(0.1)
        kinds = place.keys_by_kind()
    place.wait(lambda: _is_over(place), timeout_s=120)
    with suppress(AssertionError):  # told below
        place.wait(lambda: not _unexpired(place), timeout_s=60)
    at_rest = place.sample(time.monotonic(), 0)
    last = place.stop()
    for name in ("prompts", "functions", "failures", "retries", "cancels", "stops", "runs"):
        report.at_least(f"{name} asked", getattr(asked, name), 1)
    report.at_least(
        "jobs ended", sum(each["jobs_finished"] + each["jobs_failed"] for each in last.values()), 1
    )
    left = _unexpired(place)
    report.equal("jobs, results and executions left", len(left), 0)
    for key in left[:10]:
        status = place.redis.hget(key, "status") if place.redis.type(key) == b"hash" else None
        report.tell(f"left: {key}", f"status {status!r}, expires in {place.redis.ttl(key)} s")
    report.equal("Redis keys that never expire", len(place.eternal_keys()), 0)
    most = min(asked.runs, NUM_RUNS) * KEYS_OF_A_RUN + OTHER_KEYS
    report.at_most("Redis keys, once all has expired", at_rest.redis_keys, most)
    report.at_most("Redis, MiB, once all has expired", at_rest.redis_bytes / MIB, MAX_REST_MIB, measured=True)
    _tell_flatness(report, samples)
    for kind, count in kinds.most_common(6):
        report.tell(f"Redis keys at the end of the load: {kind}", count)


def _ask(place: Site, asked: Asked, rng: random.Random) -> None:
    """Ask for a few jobs of every kind, unless more wait than the workers keep up with."""
    high, bulk = (place.queue(name) for name in QUEUES)
    if len(high) + len(bulk) > 2000:
        return
    ttls = {"result_ttl": TTL_S, "failure_ttl": TTL_S}
    for number in range(20):
        queue = high if number % 3 == 0 else bulk
        job = queue.enqueue(
            "jobs.complete", f"{rng.random()}" * rng.randint(1, 40), max_tokens=rng.randint(1, 9), **ttls
        )
        asked.live.append(job.id)
    asked.prompts += 20
    bulk.enqueue(FUNCTIONS + "add", 1, 2, on_success=Callback(FUNCTIONS + "ignore"), **ttls)
    asked.functions += 1
    bulk.enqueue("jobs.complete", REFUSED, on_failure=Callback(FUNCTIONS + "ignore"), **ttls)
    high.enqueue(FUNCTIONS + "boom", "again", **ttls)
    asked.failures += 2
    bulk.enqueue("jobs.complete", REFUSED, retry=Retry(max=2, interval=rng.choice((0, 1))), **ttls)
    high.enqueue(FUNCTIONS + "ask_for_retry", 1, **ttls)
    asked.retries += 2
    _interrupt(place, asked, rng)
    if rng.random() < 0.03 or not asked.runs:
        _run(place, asked)


def _interrupt(place: Site, asked: Asked, rng: random.Random) -> None:
    """Cancel one of the latest jobs and stop another, whatever has become of them; forget the older ones."""
    connection = place.redis
    with suppress(NoSuchJobError, InvalidJobOperation, ValueError):  # as in _delete
        job = Job.fetch(rng.choice(asked.live), connection, JSONSerializer)
        job.cancel()
        asked.cancels += 1
        _delete(job)
    with suppress(NoSuchJobError, InvalidJobOperation):
        job = place.queue("high").enqueue("jobs.complete", "long", max_tokens=2000, failure_ttl=TTL_S)
        place.wait(lambda: job.get_status() == "started", timeout_s=60)
        send_stop_job_command(connection, job.id, serializer=JSONSerializer)
        asked.stops += 1
    del asked.live[:-100]


def _delete(job: Job) -> None:
    """Delete a cancelled job, which RQ keeps for ever."""
    for _ in range(100):
        with suppress(ValueError):  # RQ's client looks at a job's executions one by one, and one has ended
            job.delete()
            return
    raise AssertionError(f"job {job.id} cannot be deleted")


def _run(place: Site, asked: Asked) -> None:
    """Submit one of a few runs again, into a folder that was emptied, once it has finished."""
    output = place.folder / f"out-{asked.runs % NUM_RUNS}"
    if output.exists():
        if not (output / "_SUCCESS").exists():
            return
        shutil.rmtree(output)
    arguments = (str(place.folder / "in.parquet"), str(output))
    sampling = {"max_tokens": 1}
    place.queue("bulk").enqueue(
        "jobs.score_parquet", *arguments, sampling=sampling, rows_per_shard=ROWS_PER_SHARD, result_ttl=TTL_S
    )
    asked.runs += 1


def _is_over(place: Site) -> bool:
    """Whether nothing waits, runs, or is scheduled."""
    for name in QUEUES:
        queue = place.queue(name)
        if len(queue) or unended(place, name):
            return False
        registries = (queue.scheduled_job_registry, queue.deferred_job_registry)
        if any(registry.get_job_count(cleanup=False) for registry in registries):
            return False
    return True


def _unexpired(place: Site) -> list[str]:
    """Keys of jobs that should have expired; shards keep theirs for a day, so that a run can be looked at."""
    keys = [key.decode() for key in place.redis.scan_iter("rq:*", count=1000)]
    job_keys = ("rq:job:", "rq:results:", "rq:execution")
    return [key for key in keys if key.startswith(job_keys) and place.redis.ttl(key) not in range(60, 10**8)]


def _tell_flatness(report: Report, samples: Sequence[Sample]) -> None:
    """RSS, files and threads must not grow; what Redis holds under load follows the rate of the jobs."""
    for what, values, is_bounded in (
        ("RSS, MiB", [each.rss_bytes / MIB for each in samples], True),
        ("open files", [each.open_files for each in samples], True),
        ("threads", [each.threads for each in samples], True),
        ("Redis, MiB", [each.redis_bytes / MIB for each in samples], False),
        ("Redis keys", [each.redis_keys for each in samples], False),
    ):
        half, tenth = len(values) // 2, -(-len(values) // 10)
        means = (sum(part) / tenth for part in (values[:tenth], values[half:][:tenth], values[-tenth:]))
        report.tell(f"{what}: at the start, in the middle, at the end", ", ".join(f"{m:,.3g}" for m in means))
        if not is_bounded:
            continue
        mean = sum(values[half:]) / (len(values) - half)
        growth = slope([each.seconds for each in samples[half:]], values[half:])
        growth *= (samples[-1].seconds - samples[half].seconds) / mean
        report.tell(f"{what}: mean of the second half", float(mean))
        report.at_most(f"{what}: growth over it", float(growth), MAX_GROWTH, measured=True)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rise of the least-squares line through the points."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
