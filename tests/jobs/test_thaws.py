"""Whoever is at a run may freeze before any step and thaw after others have gone on: the end holds."""

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from redis import Redis

from jobs.common.keys import run_key
from jobs.context import JobContext
from jobs.errors import JobsError
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.planner import plan_run
from jobs.runs.control import cancel_run
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import Submission
from tests.jobs.killing import (
    Executions,
    Fuse,
    FusedRedis,
    FusedStorage,
    Killed,
    Sleeper,
    finish,
    open_work,
)
from tests.jobs.local_runs import Runs

pytestmark = pytest.mark.long

ROWS, SHARDS = 5, 3


class Site(Executions):
    """A run of three shards, and those who are at it."""

    def __init__(self, runs: Runs, redis: Redis) -> None:
        source = runs.write([f"p{row}" for row in range(ROWS)], row_group_size=2)
        options = {"sampling": {"temperature": 0}, "rows_per_shard": 2}
        super().__init__(runs, RunSpec.from_arguments(str(source), str(runs.output), **options))
        self.redis = redis

    def begin(self, shards_done: int | None) -> None:
        """Forget all that was, and have so many shards done; None: nothing is planned."""
        self.redis.flushall()
        shutil.rmtree(self.runs.output, ignore_errors=True)
        if shards_done is not None:
            self.plan()
            for shard in range(shards_done):
                finish(self.open(shard))

    def fused(self, fuse: Fuse) -> tuple[JobContext, Storage]:
        context = self.runs.context()
        return replace(context, connection=FusedRedis(self.redis, fuse)), FusedStorage(
            context.data_roots, fuse
        )

    def end(self, *, cancels: bool) -> None:
        """What others do."""
        if cancels and self.redis.exists(run_key(self.spec.run)):
            cancel_run(self.redis, self.spec.run)
        self.plan()
        self.runs.work()

    def files(self) -> dict[str, tuple[bytes, int]]:
        """Return what each file holds and when it was written, but for those not yet put in place."""
        found = (
            path
            for path in self.runs.output.rglob("*")
            if path.is_file() and "_tmp." not in path.name
        )
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def plans(site: Site, fuse: Fuse) -> None:
    plan_run(*site.fused(fuse), site.spec, Submission("bulk"))


def scores(shard: int) -> Callable[[Site, Fuse], None]:
    def act(site: Site, fuse: Fuse) -> None:
        context, storage = site.fused(fuse)
        finish(open_work(context, site.spec, shard, storage), journalled=True)

    return act


#: How many shards are done before, and who sleeps.
ACTORS: dict[str, tuple[int | None, Callable[[Site, Fuse], None]]] = {
    "planner of a new run": (None, plans),
    "planner of a run that goes on": (SHARDS - 1, plans),
    "first shard": (0, scores(0)),
    "last shard": (SHARDS - 1, scores(SHARDS - 1)),
}


@pytest.mark.parametrize("way", ["finished", "finished, then dies", "cancelled and finished"])
@pytest.mark.parametrize("actor", ACTORS)
def test_an_end_that_comes_while_somebody_sleeps_stays_as_it_is_when_he_wakes(
    redis: Redis, runs: Runs, actor: str, way: str
) -> None:
    shards_done, act = ACTORS[actor]
    site = Site(runs, redis)
    for step in itertools.count():
        site.begin(shards_done)
        ended: list[object] = []

        def others(ended: list[object] = ended) -> None:
            site.end(cancels=way.startswith("cancelled"))
            ended.append(site.files())

        sleeper = Sleeper(step, others, dies=way.endswith("dies"))
        with suppress(JobsError, Killed):  # an error by which it says that it is late
            act(site, sleeper)
        if sleeper.left >= 0:
            break
        runs.work()
        assert [site.files()] == ended
        assert way.endswith("dies") or not (runs.output / "_journal").exists()
        assert [(row["id"], row["completion"]) for row in runs.rows()] == [
            (row, f"P{row}") for row in range(ROWS)
        ]
        assert (runs.manifest["rows"], len(runs.manifest["parts"])) == (ROWS, SHARDS)
        assert "finished" in RunState(redis, site.spec.run).facts()
    assert step > 10
