"""A run is followed until it ends, on a terminal or in a log, whatever becomes of its shards and workers."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis import exceptions as redis_errors
from rq import Queue
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from jobs.cli.status_text import LINE_EVERY_S, Bar, Lines
from jobs.common.keys import SILENT_S, WORKER_STATS_TTL_S, run_key
from jobs.runs.plans.names import shard_job_id
from jobs.runs.watching.follow import End, Watch, follow
from jobs.runs.watching.progress_bar import speed_text
from jobs.runs.watching.reading import MAX_ENTRIES, read_snapshot
from jobs.runs.watching.run_reader import BETWEEN_SHARDS_S
from jobs.runs.watching.snapshot import RunSnapshot
from tests.jobs.answering import add_worker, fail
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs


def snapshot(**changed: Any) -> RunSnapshot:
    """A run of 100 rows on which one worker works."""
    nothing = dict.fromkeys(
        ("plan_job", "plan_status", "awaited_model", "stopped", "too_many_errors")
    )
    counts = {
        "rows": 100,
        "shards": 10,
        "shards_started": 1,
        "workers": 1,
        "queue_length": 9,
        "failed_jobs": (),
    }
    zeros = dict.fromkeys(("shards_done", "rows_done", "tokens"), 0)
    facts = {
        "run": "r",
        "output": "/out",
        "queue": "bulk",
        "cancelled": False,
        "finished": False,
        "is_held": False,
    }
    return RunSnapshot(**{**nothing, **counts, **zeros, **facts, **changed})  # type: ignore[arg-type]


PLANNING = snapshot(rows=None, shards=None, shards_started=0, plan_status=JobStatus.QUEUED)


def test_a_bar_names_the_state_rows_speed_and_time_left() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(PLANNING)
    bar.show(snapshot())
    bar.show(snapshot(rows_done=40, failed_jobs=("x",), left_s=3725.0, tokens_per_s=7.4))
    bar.close()
    frames = [frame.strip() for frame in screen.getvalue().split("\r")]
    assert any(frame.startswith("planning:") for frame in frames)
    assert ": :" not in screen.getvalue()
    last = frames[-1]
    assert last.startswith("running:  40%")
    assert "40/100" in last
    assert "7 tok/s, 1 h 2 min left, 1 shard failed" in last
    assert speed_text(snapshot(quiet_s=1.0)) == "estimating"
    assert speed_text(snapshot(quiet_s=45.0, left_s=60.0)) == "stalled for 45 s"


def test_a_log_gets_a_line_for_each_state_and_every_few_seconds() -> None:
    log, now = io.StringIO(), 0.0
    lines = Lines(log, lambda: now)
    lines.show(PLANNING)
    for step in range(int(LINE_EVERY_S * 4)):
        now = step / 2
        lines.show(snapshot(rows_done=step, left_s=60.4 - step / 2, tokens_per_s=3.0))
    lines.show(snapshot(finished=True, rows_done=100, tokens_per_s=5.0))
    lines.close()
    assert log.getvalue().splitlines() == [
        "planning",
        "running: 0 of 100 rows, 3 tok/s, 1 min 0 s left",
        "running: 20 of 100 rows, 3 tok/s, 50 s left",
        "finished: 100 of 100 rows, 5 tok/s",
    ]


def test_a_run_on_which_nobody_works_has_no_rate(runs: Runs, redis: Redis, source: Path) -> None:
    add_worker(redis, "w")
    run = runs.plan(source, rows_per_shard=2)["run"]
    runs.run(runs.jobs[0])
    between = read_snapshot(redis, run)
    assert between.rows_per_s is not None, "its worker is about to begin another shard"
    then = time.time() - BETWEEN_SHARDS_S
    redis.hset(run_key(run), mapping={"began_at": str(then - 5), "ended_at": str(then)})
    stalled = read_snapshot(redis, run)
    assert (stalled.rows_done, stalled.tokens_per_s, stalled.rows_per_s) == (2, None, None)
    log = io.StringIO()
    Lines(log, lambda: 0.0).show(stalled)
    assert log.getvalue() == "running: 2 of 5 rows\n"

    # The only worker is dead and still has a shard, which is in RQ's list of running jobs.
    begun = runs.jobs[1]
    redis.zadd("rq:wip:bulk", {f"{begun.id}:e": 9e12})
    redis.hset(begun.key, "worker_name", "w")
    redis.set("tokenmill:worker:w", '{"state": "busy"}', ex=WORKER_STATS_TTL_S - 2 * SILENT_S)
    stalled = read_snapshot(redis, run)
    assert (stalled.shards_started, stalled.rows_per_s, stalled.left_s) == (1, None, None)
    redis.set("tokenmill:worker:w", '{"state": "busy"}', ex=WORKER_STATS_TTL_S)
    assert read_snapshot(redis, run).rows_per_s is not None
    redis.delete("rq:wip:bulk", "tokenmill:worker:w")
    runs.work()
    assert read_snapshot(redis, run).tokens_per_s is not None


class WorkersClock:
    """Its sleep lets one thing happen at a time, as workers would meanwhile."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self._events: Iterator[Callable[[], object]] = iter(events)

    def sleep(self, seconds: float) -> None:
        next(self._events)()


class Shown:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.warnings: list[str] = []

    def show(self, snapshot: RunSnapshot) -> None:
        self.rows.append(snapshot.rows_done)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_following_shows_rows_until_the_run_ends(runs: Runs, redis: Redis, source: Path) -> None:
    add_worker(redis, "w")
    run = runs.plan(source, rows_per_shard=2)["run"]
    clock, shown = WorkersClock(*[lambda job=job: runs.run(job) for job in runs.jobs]), Shown()
    followed = follow(lambda: read_snapshot(redis, run), clock.sleep, shown.show, shown.warn)
    assert followed.end is End.FINISHED
    assert shown.rows == [0, 2, 4, 5]
    assert shown.warnings == []


def test_following_keeps_waiting_and_says_that_no_worker_listens(
    runs: Runs, redis: Redis, source: Path
) -> None:
    run = runs.plan(source)["run"]
    redis.sadd("rq:workers", "rq:worker:dead")  # killed: its key has expired
    events = [
        lambda: None,
        lambda: add_worker(redis, "w"),
        lambda: redis.delete("rq:worker:w"),
        lambda: runs.work(),
    ]
    clock, shown = WorkersClock(*events), Shown()
    assert (
        follow(lambda: read_snapshot(redis, run), clock.sleep, shown.show, shown.warn).end
        is End.FINISHED
    )
    assert ["no worker" in text for text in shown.warnings] == [True, True]
    assert "rq worker" in shown.warnings[0]


def test_a_second_model_that_nobody_serves_is_told_once_each_time() -> None:
    lacking = snapshot(awaited_second="large", second_queue="big")
    looks = [lacking, lacking, snapshot(), lacking, snapshot(finished=True)]
    shown = Shown()
    follow(lambda: looks.pop(0), lambda _: None, shown.show, shown.warn)
    (text,) = {each for each in shown.warnings if "wait for the second model" in each}
    assert "'big'" in text
    assert shown.warnings.count(text) == 2
    assert lacking.to_object()["awaited_second"] == "large"


def test_following_ends_when_only_failed_shards_are_left(
    runs: Runs, redis: Redis, source: Path
) -> None:
    run = runs.plan(source, rows_per_shard=3)["run"]
    first, second = runs.jobs
    redis.zadd("rq:failed:bulk", {f"another's {number}": 9e12 for number in range(MAX_ENTRIES + 1)})
    clock = WorkersClock(lambda: fail(redis, first, "DiskFull"), lambda: runs.run(second))
    followed = follow(lambda: read_snapshot(redis, run), clock.sleep)
    assert followed.end is End.SHARDS_FAILED
    assert followed.snapshot.failed_jobs == (shard_job_id(run, 0),)


def test_following_ends_when_someone_emptied_the_queue(
    runs: Runs, redis: Redis, source: Path, tmp_path: Path, invoke: Invoke
) -> None:
    run = runs.plan(source)["run"]
    planned = invoke("submit", source, tmp_path / "other").stdout.strip()
    clock = WorkersClock(
        Queue("bulk", redis, serializer=JSONSerializer).empty, lambda: None, lambda: None
    )
    for name in (run, planned):
        followed = follow(lambda name=name: read_snapshot(redis, name), clock.sleep)
        assert followed.end is End.STRANDED


def test_a_watch_says_what_a_run_waits_for() -> None:
    looks = [
        snapshot(),
        snapshot(workers=0),
        snapshot(is_suspended=True),
        redis_errors.ConnectionError("refused"),
        snapshot(),
    ]

    def look() -> RunSnapshot:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    watch, told = Watch(look), []
    while looks:
        with suppress(redis_errors.ConnectionError):
            watch()
        told.append(watch.waits_for)
    assert told[0] is None
    assert "no worker listens on queue 'bulk'" in str(told[1])
    assert "`rq resume` lets them go on" in str(told[2])
    assert told[3] == "no answer from Redis (refused)"
    assert told[4] is None


def test_following_outlives_an_outage_of_redis(runs: Runs, redis: Redis, source: Path) -> None:
    add_worker(redis, "w")
    run = runs.plan(source)["run"]
    away = False

    def look() -> RunSnapshot:
        if away:
            raise redis_errors.ConnectionError("refused")
        return read_snapshot(redis, run)

    def goes() -> None:
        nonlocal away
        away = True

    def comes_back() -> None:
        nonlocal away
        away = False
        runs.work()

    clock, shown = WorkersClock(goes, lambda: None, comes_back), Shown()
    assert follow(look, clock.sleep, shown.show, shown.warn).end is End.FINISHED
    assert ["no answer" in text for text in shown.warnings] == [True]
    assert "goes on" not in shown.warnings[0]
