"""One run with its workers and people, on a real Redis and real files; time passes when a test says so."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq.utils import now

from jobs.common.keys import held_key, run_key, run_lock_key, worker_key
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext, Lease
from jobs.runs import control as run_control
from jobs.runs.plans.names import part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.watching.snapshot import RunSnapshot, failure_text, read_snapshot
from jobs.table import own_function
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, feed, opened_task, refuse, shout
from tests.thaws.freezing import Killed, traced_files
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob, Wanted
from worker.store.records.function_call import parse_call
from worker.store.records.outcome import Outcome
from worker.store.records.results import printable

ROWS, ROWS_PER_SHARD, SHARDS = 5, 2, 3
QUEUE = "bulk"


class Stopped(Exception):
    """Raised where a job asks whether it was interrupted, and was."""


class Worker:
    """Claims jobs and runs them one by one, with the real scripts; `client`: what the jobs use."""

    def __init__(self, world: World, name: str, client: Redis) -> None:
        self.world, self.name, self.client = world, name, client
        self.store = JobStore(world.redis, name, 60, models=MODEL.names)
        self.commands = world.redis.pubsub()
        self.commands.subscribe(f"rq:pubsub:{name}")
        self.commands.get_message(timeout=5)
        self.stopped: set[str] = set()
        self.refused: set[str] = set()
        world.redis.set(worker_key(name), "{}")
        world.workers.append(self)

    def claim(self) -> ClaimedJob | None:
        token = f"{next(self.world.numbers):024x}"
        (claim,) = self.store.claim([Wanted(QUEUE, 1, token, True)], 4)
        return claim.jobs[0] if claim.jobs else None

    def run(self, claimed: ClaimedJob) -> Any:
        """What a worker's thread does for a job; raises what that raises."""
        context = self.context(claimed)
        call = parse_call(claimed.record.payload(), claimed.record.max_job_bytes)
        own = own_function(call.name)
        if own is not None:
            return own(context, *call.args, **call.kwargs)
        opened = opened_task(context, call.name, call.args, call.kwargs)
        try:
            feed(opened, self._answer)
            return opened.result()
        except Killed:
            opened.close = lambda: None  # type: ignore[method-assign]
            raise
        finally:
            opened.close()

    def _answer(self, request: Request) -> FakeCompletion:
        fails = self.world.all_fail or request.prompt in self.refused
        return refuse("too long") if fails else shout(request)

    def context(self, claimed: ClaimedJob) -> JobContext:
        def check() -> None:
            if claimed.execution_id in self.stopped:
                raise Stopped

        return JobContext(
            self.client,
            QUEUE,
            claimed.job_id,
            claimed.execution_id,
            (self.world.data_root,),
            MODEL,
            check_interrupted=check,
            lease=Lease(executions_key(claimed.job_id), claimed.execution_id),
        )

    def end(self, claimed: ClaimedJob, value: Any, error: BaseException | None) -> None:
        """Write the end of a job, which is dropped where the job is another's by now."""
        status, told = ("failed", printable(error)) if error is not None else ("finished", value)
        (reply,) = self.store.finish([Outcome(claimed, status, told, now(), 0.0)])
        assert reply in ("done", "lost"), reply

    def heed(self, claimed: ClaimedJob) -> None:
        """Hear the commands that came in the meantime; renew the lease, or learn that it is lost."""
        while (message := self.commands.get_message(ignore_subscribe_messages=True)) is not None:
            command = json.loads(message["data"])
            is_meant = command["job_id"] == claimed.job_id
            if is_meant and command.get("execution_id") in (None, claimed.execution_id):
                self.store.finish([Outcome(claimed, "stopped", "stopped", now(), 0.0)])
                self.stopped.add(claimed.execution_id)
        if self.store.renew([claimed]):
            self.stopped.add(claimed.execution_id)

    def drain(self) -> None:
        """Run jobs until none waits."""
        while (claimed := self.claim()) is not None:
            self.run_to_its_end(claimed)

    def run_to_its_end(self, claimed: ClaimedJob) -> None:
        """Run a job and write its end."""
        try:
            value, error = self.run(claimed), None
        except Exception as raised:  # noqa: BLE001  # what a job raises is that job's end
            value, error = None, raised
        self.end(claimed, value, error)


class World:
    """A folder, a server, a second worker that never freezes, and people who submit, cancel and delete."""

    #: What makes each call to its files one before which somebody may freeze.
    traced = staticmethod(traced_files)

    def __init__(self, redis: Redis, folder: Path) -> None:
        self.redis, self.folder, self.numbers = redis, folder, itertools.count(1)
        redis.flushall()
        folder.mkdir(parents=True)
        self.all_fail, self.is_damaged = False, False
        self.workers: list[Worker] = []
        self.unanswered: set[int] = set()
        self.num_rows, self.num_shards = ROWS, SHARDS
        self.place_files(folder)
        self.other = Worker(self, "other", redis)

    def place_files(self, folder: Path) -> None:
        """Write the input, and say where all is."""
        self.output, self.data_root = folder / "out", str(folder)
        table = pa.table({"prompt": [f"p{row}" for row in range(ROWS)], "id": range(ROWS)})
        self.input = folder / "in"
        self.input.mkdir()
        pq.write_table(table, self.input / "a.parquet", row_group_size=2)
        self.arguments: dict[str, Any] = {
            "input": str(self.input),
            "output": str(self.output),
            "rows_per_shard": ROWS_PER_SHARD,
            "sampling": {"temperature": 0},
        }
        self.run = RunSpec.from_arguments(**self.arguments).run

    def submit(self, redis: Redis | None = None, **options: Any) -> None:
        options = {"redo_damaged": self.is_damaged, "extend": self.num_rows > ROWS, **options}
        assert run_control.submit_run(redis or self.redis, QUEUE, **self.arguments, **options) == self.run

    def close(self) -> None:
        """Remove the folder, and let go of the server."""
        for worker in self.workers:
            worker.commands.close()
        shutil.rmtree(self.folder)

    def is_known(self) -> bool:
        """Whether anybody has submitted the run."""
        return bool(self.redis.exists(run_key(self.run)))

    def holds_jobs(self) -> bool:
        """Whether a worker has a job of which the end is not written."""
        return bool(self.redis.hlen(held_key(QUEUE)))

    def cancel(self, redis: Redis | None = None) -> None:
        run_control.cancel_run(redis or self.redis, self.run)

    def finish(self) -> None:
        """From nothing to a finished run."""
        self.submit()
        self.other.drain()
        self.check_finished()

    def finish_with_errors(self) -> None:
        """From nothing to a finished run of which these rows have errors."""
        self.unanswered = {0, 2, 3}
        self.other.refused = {f"p{row}" for row in self.unanswered}
        self.finish()
        self.other.refused = set()

    def retry(self) -> None:
        run_control.retry_run(self.redis, self.run)

    def names(self) -> set[str]:
        """What the output holds."""
        return {path.name for path in self.output.iterdir()}

    def read(self, name: str) -> bytes:
        """A file of the output."""
        return (self.output / name).read_bytes()

    def has_mark(self) -> bool:
        """Whether the output says that it is whole."""
        return (self.output / "_SUCCESS").is_file()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all parts that are there, in order."""
        parts = sorted(self.output.glob("part-*.parquet"))
        return [row for part in parts for row in pq.read_table(part).to_pylist()]

    def note_answers(self) -> None:
        """Rows that have an answer by now have it for ever."""
        if self.unanswered:
            self.unanswered -= {row["id"] for row in self.rows() if row["completion"] is not None}

    def grow(self) -> None:
        """The input gains two rows, which a shard has; it is submitted so from now on."""
        self.num_rows, self.num_shards = ROWS + 2, SHARDS + 1
        self.add_input(range(ROWS, self.num_rows))

    def add_input(self, rows: range) -> None:
        table = pa.table({"prompt": [f"p{row}" for row in rows], "id": rows})
        pq.write_table(table, self.input / "b.parquet")

    def remove_input(self) -> None:
        (self.input / "b.parquet").unlink()

    def shrink(self) -> None:
        """As if it had not grown."""
        self.num_rows, self.num_shards = ROWS, SHARDS
        self.remove_input()

    def delete_part(self, shard: int = 1) -> None:
        (self.output / part_name(shard)).unlink()

    def damage_part(self, shard: int = 1) -> None:
        self.is_damaged = True
        path = self.output / part_name(shard)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])

    def let_locks_lapse(self) -> None:
        """Whoever holds a run's lock and sleeps has lost it."""
        self.redis.delete(run_lock_key(self.run))

    def take_over(self, claimed: ClaimedJob) -> None:
        """The worker that has the job is silent for longer than its lease: another puts the job back."""
        self.let_locks_lapse()
        self.redis.delete(f"rq:execution:{claimed.job_id}:{claimed.execution_id}")
        self.redis.delete(f"tokenmill:maintenance:{QUEUE}")
        assert self.other.store.reclaim_abandoned([QUEUE], 10, 5) == []

    def snapshot(self) -> RunSnapshot:
        return read_snapshot(self.redis, self.run)

    def check_finished(self) -> None:
        """Every row once and right, the marks of the end in files and in Redis, and nothing left to run."""
        snapshot = self.snapshot()
        assert snapshot.state == "finished", self.why()
        assert snapshot.done == self.num_shards, f"{snapshot.done} of {self.num_shards} parts are recorded"
        names = {name for name in self.names() if not name.startswith("_tmp.")}
        expected = {part_name(shard) for shard in range(self.num_shards)} | {
            "_plan.json",
            "_manifest.json",
            "_report.html",
            "_SUCCESS",
        }
        assert names == expected, names ^ expected
        assert self.read("_SUCCESS") == b""
        rows = self.rows()
        assert [row["id"] for row in rows] == list(range(self.num_rows))
        for number, row in enumerate(rows):
            may_fail = self.all_fail or number in self.unanswered
            assert row["completion"] == f"P{number}" or (may_fail and row["error"]), row
        errors = sum(row["error"] is not None for row in rows)
        assert snapshot.errors == errors, f"{snapshot.errors} errors are recorded, the parts have {errors}"
        manifest = json.loads(self.read("_manifest.json"))
        found = (manifest["rows"], manifest["errors"], len(manifest["parts"]))
        assert found == (self.num_rows, errors, self.num_shards), found
        assert self.redis.llen(f"rq:queue:{QUEUE}") == 0
        assert not self.holds_jobs()

    def check_ended(self, may_be_stale: bool) -> None:
        """The run has ended, or says what keeps it.

        may_be_stale: a former end may still stand, of which a part was deleted and nobody has planned since.
        """
        snapshot = self.snapshot()
        if snapshot.state == "failed":
            assert ": " in self.why()
        elif snapshot.state not in ("cancelled", "stopped") and not (may_be_stale and snapshot.finished):
            self.check_finished()

    def why(self) -> str:
        """What the run says of itself."""
        snapshot = self.snapshot()
        failed = [*snapshot.failed_jobs, *([snapshot.plan_job] if snapshot.plan_status == "failed" else [])]
        told = [f"{job_id}: {failure_text(self.redis, job_id)}" for job_id in failed if job_id]
        success = self.has_mark()
        return f"{snapshot.state}, {snapshot.done} done, mark {success}: {'; '.join(told)}"
