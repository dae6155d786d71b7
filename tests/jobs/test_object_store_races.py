"""Runs in an object store that are killed, or met by another execution, at any step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from redis import Redis

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

import obstore
from obstore.store import MemoryStore

from jobs.context import JobContext
from jobs.parquet import object_files
from jobs.parquet.listing_child import listing
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.storage import Storage
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed
from tests.jobs.stored_runs import ROOT, MakeContext, in_store, rows, run_all, spec_of, whole_run
from tests.jobs.test_kills import finish, open_work, release_lock


@pytest.fixture
def context(make_context: MakeContext, tmp_path: Path) -> JobContext:
    return in_store(make_context(), tmp_path)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """In the place of a server: obstore's own store, for many runs in little time."""
    store = MemoryStore()
    monkeypatch.setattr(object_files, "opened_store", lambda *each: store)
    monkeypatch.setattr(
        object_files, "listed", lambda kind, folder, _: listing(store, kind, folder.split("/", 3)[3])
    )
    return store


def test_no_kill_point_strands_a_run_in_a_store(
    memory: MemoryStore, redis: Redis, context: JobContext, tmp_path: Path
) -> None:
    pq.write_table(rows(6), tmp_path / "in.parquet", row_group_size=2)
    spec, step = spec_of(str(tmp_path / "in.parquet")), 0
    while was_killed(context, spec, Fuse(step)):
        release_lock(redis, spec)
        assert run_all(context, spec)["run_finished"]
        names = [each["path"] for page in obstore.list(memory) for each in page]
        assert {name.removeprefix("data/out/") for name in names} == whole_run(3)
        assert "finished" in RunState(redis, spec.run).facts()
        redis.flushall()
        obstore.delete(memory, names)
        step += 7
    assert step > 60


def test_an_end_that_was_withdrawn_while_its_files_are_written_puts_none_in_place(
    memory: MemoryStore, context: JobContext, tmp_path: Path
) -> None:
    pq.write_table(rows(4), tmp_path / "in.parquet", row_group_size=2)
    spec = spec_of(str(tmp_path / "in.parquet"), single_file=True)

    class Withdrawn(Storage):
        left = 1

        def rewrite(self, path: str, contents: bytes) -> bool:
            written = super().rewrite(path, contents)
            if self.left:
                self.left -= 1
                names = [name for name in self.names(f"{ROOT}/out") if name.startswith("_tmp.")]
                for name in names:
                    self.remove(f"{ROOT}/out/{name}")
                super().open_output(path).close()  # a write that was on its way brings the claim back
                super().open_output(path.replace("_manifest.json", "output.parquet")).close()
            return written

        def replace(self, temporary: str, target: str) -> bool:
            if not target.endswith("_SUCCESS"):
                assert self.stat(mark) is not None, "put in place without the claim for the mark"
            return super().replace(temporary, target)

    mark = f"{ROOT}/out/_tmp.{context.execution_id}._SUCCESS.tmp"
    assert run_all(context, spec, Withdrawn(context.data_roots))["run_finished"]


def was_killed(context: JobContext, spec: RunSpec, fuse: Fuse) -> bool:
    fused = replace(context, connection=FusedRedis(context.connection, fuse))
    storage = FusedStorage(context.data_roots, fuse)
    try:
        plan_run(fused, storage, spec, Submission("bulk"))
        for shard in range(3):
            finish(open_work(fused, spec, shard, storage))
    except Killed:
        return True
    return False


def test_whoever_withdraws_an_end_too_late_ends_the_run_again(
    memory: MemoryStore, context: JobContext, tmp_path: Path
) -> None:
    """Its store can take a mark away on no condition: here another execution ends the run just before."""
    pq.write_table(rows(4), tmp_path / "in.parquet", row_group_size=2)
    spec = spec_of(str(tmp_path / "in.parquet"))
    run_all(context, spec)
    obstore.delete(memory, "data/out/part-00001.parquet")

    class Frozen(Storage):
        frozen = False

        def rename(self, path: str, target: str) -> bool:
            if not self.frozen:
                self.frozen = True
                run_all(replace(context, execution_id="other"), spec)
            return super().rename(path, target)

    done = plan_run(context, Frozen(context.data_roots), spec, Submission("bulk"))
    assert done["run_finished"]
    assert bytes(obstore.get(memory, "data/out/_SUCCESS").bytes()) == b""
