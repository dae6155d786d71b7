"""Kills an execution before or after its n-th file operation or Redis call, and recovers its run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis import Redis

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.planning.planner import plan_run
from jobs.parquet.shards.rows_task import trusted_plan
from jobs.parquet.shards.shard_work import ShardWork
from jobs.runs.plans.names import PLAN
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import Submission
from tests.jobs.answering import Answer, queued_jobs, shout
from tests.jobs.local_runs import Runs


class Killed(BaseException):
    """Stands for SIGKILL: no handler for errors may catch it."""


class Fuse:
    """Raises Killed at step `burns_at`, counted from 0; None never burns."""

    def __init__(self, burns_at: int | None) -> None:
        self._left = burns_at
        self.burnt = False

    def tick(self) -> None:
        if self._left is None or self.burnt:
            return
        if self._left == 0:
            self.burnt = True
            raise Killed
        self._left -= 1

    @contextmanager
    def step(self) -> Iterator[None]:
        self.tick()
        yield
        self.tick()


class Sleeper(Fuse):
    """Lets others go on before its n-th step, counted from 0, then takes that step. dies: and no other."""

    def __init__(self, sleeps_at: int, meanwhile: Callable[[], None], dies: bool = False) -> None:
        super().__init__(None)
        self.left, self._meanwhile, self._dies = sleeps_at, meanwhile, dies

    def tick(self) -> None:
        self.left -= 1
        if self.left == -1:
            self._meanwhile()
        elif self._dies and self.left < -1:
            self.burnt = True
            raise Killed


def _step(operation: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(storage: "FusedStorage", *arguments: Any) -> Any:
        with storage._fuse.step():
            return operation(storage, *arguments)

    return stepped


class FusedStorage(Storage):
    """Storage whose changing operations are steps; after the kill nothing is cleaned up any more."""

    def __init__(self, roots: tuple[str, ...], fuse: Fuse) -> None:
        super().__init__(roots)
        self._fuse = fuse

    make_folder = _step(Storage.make_folder)
    publish = _step(Storage.publish)
    create = _step(Storage.create)

    def open_output(self, path: str) -> Any:
        self._fuse.tick()
        opened = super().open_output(path)
        try:
            self._fuse.tick()
        except Killed:
            with opened:  # as the system does for a process that was killed
                raise
        return opened

    def remove(self, path: str) -> None:
        if not self._fuse.burnt:
            with self._fuse.step():
                super().remove(path)


class FusedRedis(Redis):
    """A client whose commands and transactions are steps."""

    def __init__(self, client: Redis, fuse: Fuse) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._fuse = fuse

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        with self._fuse.step():
            return super().execute_command(*arguments, **options)

    def pipeline(self, *arguments: Any, **options: Any) -> Any:
        pipe = super().pipeline(*arguments, **options)
        execute = pipe.execute

        def fused_execute(*args: Any, **kwargs: Any) -> Any:
            with self._fuse.step():
                return execute(*args, **kwargs)

        pipe.execute = fused_execute
        return pipe


def open_work(
    context: JobContext, spec: RunSpec, shard: int, storage: Storage, queue: str | None = None
) -> ShardWork:
    plan = trusted_plan(context, storage, f"{spec.output}/{PLAN}", spec.run)
    state = RunState(context.connection, spec.run)
    return ShardWork(context, RunFolder(storage, plan, state, context.execution_id), shard, queue)


def finish(work: ShardWork, journalled: bool = False, answer: Answer = shout) -> None:
    """Bring a shard to its end. journalled: with an entry after each answer."""
    for index, request in enumerate(work.requests()):
        work.deliver(index, [answer(request)])
        if journalled and (write := work.keep({})) is not None:
            write()
    work.result()
    work.close()


class Executions:
    """Executions of a run, each of which may see its files in a way of its own."""

    def __init__(self, runs: Runs, spec: RunSpec) -> None:
        self.runs, self.spec = runs, spec

    def plan(self, storage: Callable[[tuple[str, ...]], Storage] = Storage) -> dict[str, Any]:
        context = self.runs.context()
        return plan_run(context, storage(context.data_roots), self.spec, Submission("bulk"))

    def open(
        self, shard: int, storage: Callable[[tuple[str, ...]], Storage] = Storage
    ) -> ShardWork:
        context = self.runs.context()
        return open_work(context, self.spec, shard, storage(context.data_roots))


def run_until_killed(context: JobContext, spec: RunSpec, fuse: Fuse) -> int | None:
    """Plan, then score all shards, as one process; return how many were finished if it was killed."""
    finished = 0
    fused = replace(context, connection=FusedRedis(context.connection, fuse))
    storage = FusedStorage(context.data_roots, fuse)
    try:
        plan_run(fused, storage, spec, Submission("bulk"))
        for shard in range(3):
            finish(open_work(fused, spec, shard, storage))
            finished += 1
    except Killed:
        fused.files.close_idle()  # as the system does for a process that was killed
        return finished
    return None


RECOVERIES = ("unfinished jobs run again", "planned again", "planned again without redis")


def recover(redis: Redis, runs: Runs, spec: RunSpec, recovery: str, finished: int) -> None:
    """End the run of a dead process."""
    for job in queued_jobs(redis)[:finished]:
        job.delete()
    if recovery == "planned again without redis":
        redis.flushall()
    planned_whole = finished > 0 or len(queued_jobs(redis)) == 3
    if recovery != "unfinished jobs run again" or not planned_whole:
        plan_run(
            runs.context(), Storage((str(Path(spec.output).parent),)), spec, Submission("bulk")
        )
    runs.work()
