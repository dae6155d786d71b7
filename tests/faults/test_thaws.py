"""Whoever is at a run may freeze before any step and thaw after others have gone on: the end holds."""

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import run_key
from jobs.context import JobContext
from jobs.errors import JobsError
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.planning.planner import plan_run
from jobs.parquet.shards.rows_task import trusted_plan
from jobs.parquet.shards.shard_work import ShardWork
from jobs.runs.control import cancel_run
from jobs.runs.plans.names import PLAN, keys_name, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.end_calls import Submission
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import MODEL, keep, shout, work_off
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed, Sleeper

pytestmark = pytest.mark.long

ROWS, SHARDS = 5, 3


class Scene:
    """A run of three shards, and those who are at it."""

    def __init__(self, redis: Redis, folder: Path) -> None:
        self.redis, self.folder, self._numbers = redis, folder, itertools.count()
        self.output, source = folder / "out", folder / "in.parquet"
        table = pa.table({"prompt": [f"p{row}" for row in range(ROWS)], "id": range(ROWS)})
        pq.write_table(table, source, row_group_size=2)
        greedy = {"temperature": 0}
        self.spec = RunSpec.from_arguments(str(source), str(self.output), sampling=greedy, rows_per_shard=2)

    def begin(self) -> None:
        """Forget all that was."""
        self.redis.flushall()
        shutil.rmtree(self.output, ignore_errors=True)

    def context(self) -> JobContext:
        number = next(self._numbers)
        roots = (str(self.folder.resolve()),)
        return JobContext(self.redis, "bulk", f"job-{number}", f"execution{number}", roots, MODEL)

    def _fused(self, fuse: Fuse) -> tuple[JobContext, Storage]:
        context = self.context()
        fused = replace(context, connection=FusedRedis(self.redis, fuse))
        return fused, FusedStorage(context.data_roots, fuse)

    def plan(self, fuse: Fuse) -> None:
        context, storage = self._fused(fuse)
        plan_run(context, storage, self.spec, Submission("bulk"))

    def score(self, shard: int, fuse: Fuse) -> None:
        context, storage = self._fused(fuse)
        plan = trusted_plan(context, storage, f"{self.spec.output}/{PLAN}", self.spec.run)
        folder = RunFolder(storage, plan, RunState(context.connection, plan.run), context.execution_id)
        work = ShardWork(context, folder, shard)
        for index, request in enumerate(work.requests()):
            work.deliver(index, [shout(request)])
            keep(work, {})
        work.result()
        work.close()

    def finish(self) -> None:
        """What others do."""
        self.plan(Fuse(None))
        work_off(self.redis, self.context)

    def files(self) -> dict[str, tuple[bytes, int]]:
        """Return what each file holds and when it was written, but for those not yet put in place."""
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in self.output.rglob("*")
            if path.is_file() and not path.name.startswith("_tmp.")
        }

    def check_finished(self) -> None:
        """Every row once, and the marks of the end in files and in Redis."""
        parts = {part_name(number) for number in range(SHARDS)}
        keys = {Path(keys_name(number)).name for number in range(SHARDS)}
        assert self.files().keys() == parts | keys | {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}
        rows = [(row["id"], row["completion"]) for row in pq.read_table(self.output).to_pylist()]
        assert rows == [(row, f"P{row}") for row in range(ROWS)]
        manifest = json.loads((self.output / "_manifest.json").read_text())
        assert (manifest["rows"], len(manifest["parts"])) == (ROWS, SHARDS)
        assert "finished" in RunState(self.redis, self.spec.run).facts()


def new_run(scene: Scene) -> None:
    """Nothing comes before."""


def planned(scene: Scene) -> None:
    scene.plan(Fuse(None))


def all_but_one_scored(scene: Scene) -> None:
    planned(scene)
    for shard in range(SHARDS - 1):
        scene.score(shard, Fuse(None))


def finished(scene: Scene) -> None:
    scene.finish()


def cancelled_and_finished(scene: Scene) -> None:
    if scene.redis.exists(run_key(scene.spec.run)):
        cancel_run(scene.redis, scene.spec.run)
    scene.finish()


ACTORS = {
    "planner of a new run": (new_run, Scene.plan),
    "planner of a run that goes on": (all_but_one_scored, Scene.plan),
    "first shard": (planned, lambda scene, fuse: scene.score(0, fuse)),
    "last shard": (all_but_one_scored, lambda scene, fuse: scene.score(SHARDS - 1, fuse)),
}


@pytest.mark.parametrize(
    ("meanwhile", "dies"),
    [(finished, False), (finished, True), (cancelled_and_finished, False)],
    ids=["finished", "finished, then dies", "cancelled and finished"],
)
@pytest.mark.parametrize("actor", ACTORS)
def test_an_end_that_comes_while_somebody_sleeps_stays_as_it_is_when_he_wakes(
    redis: Redis, tmp_path: Path, actor: str, meanwhile: Callable[[Scene], None], dies: bool
) -> None:
    prepare, act = ACTORS[actor]
    scene = Scene(redis, tmp_path)
    for step in itertools.count():
        scene.begin()
        prepare(scene)
        ended: list[Any] = []

        def sleep(ended: list[Any] = ended) -> None:
            meanwhile(scene)
            ended.append(scene.files())

        sleeper = Sleeper(step, sleep, dies)
        with suppress(JobsError, Killed):  # an error by which it says that it is late
            act(scene, sleeper)
        if sleeper.left >= 0:
            break
        work_off(redis, scene.context)
        scene.check_finished()
        assert [scene.files()] == ended
        assert dies or not (scene.output / "_journal").exists()
    assert step > 10
