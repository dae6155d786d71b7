"""Keys of a run that hold something else: the run alone fails, by name, and goes on once they are deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import run_folder_key, run_key, run_lock_key, run_parts_key
from jobs.context import JobContext
from jobs.errors import RunKeyDamaged
from jobs.runs.redis_state import state as run_state
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.snapshot import read_snapshot
from tests.jobs.answering import feed, opened_task, queued_jobs, refuse, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


@pytest.fixture
def submit(invoke: Invoke, tmp_path: Path) -> Callable[[], str]:
    """Submit a run of three shards; return what that printed."""
    pq.write_table(pa.table({"prompt": [*"abc"]}), tmp_path / "in.parquet")

    def run() -> str:
        done = invoke("submit", tmp_path / "in.parquet", tmp_path / "out", "--rows-per-shard", 1)
        return f"{done.output}{done.exit_code}"

    return run


def put(redis: Redis, key: str, kind: str) -> None:
    redis.delete(key)
    if kind == "list":
        redis.rpush(key, "x")
    else:
        redis.set(key, "x")


@pytest.mark.parametrize(
    ("key_of", "kind", "told"),
    [
        (run_key, "string", "a string in this Redis, expected a hash"),
        (run_parts_key, "string", "a string in this Redis, expected a hash"),
        (run_lock_key, "list", "a list in this Redis, expected a string"),
        (run_lock_key, "string", "a string without an end in this Redis, expected a string that ends"),
    ],
)
def test_a_runs_key_of_another_type_fails_that_run_at_once_by_name(
    redis: Redis,
    invoke: Invoke,
    submit: Callable[[], str],
    make_context: MakeContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key_of: Callable[[str], str],
    kind: str,
    told: str,
) -> None:
    monkeypatch.setattr(run_state, "LOCK_WAIT_S", 0.01)  # nobody waits for such a lock
    run = submit().splitlines()[0]
    key = key_of(run)
    work_off(redis, make_context)
    first, second, _ = queued_jobs(redis)
    begun = opened_task(make_context(), first.func_name, first.args)
    feed(begun)

    put(redis, key, kind)
    names = f"the key {key} is {told}"
    if key_of is not run_lock_key:
        with pytest.raises(RunKeyDamaged, match=names):
            begun.result()
        assert names in invoke("status", run).output
    if key_of is run_key:
        with pytest.raises(RunKeyDamaged, match=names):
            run_task(make_context(), second.func_name, *second.args)
    if key_of is not run_parts_key:
        assert names in submit()
    assert names in invoke("cancel", run).output
    with pytest.raises(RunKeyDamaged, match=names):
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1)
    begun.close()

    redis.delete(key)
    assert submit().endswith("0")
    work_off(redis, make_context)
    work_off(redis, make_context)
    assert read_snapshot(redis, run).finished
    assert pq.read_table(tmp_path / "out")["completion"].to_pylist() == [*"ABC"]


@pytest.mark.parametrize("value", [None, b"\xff", b"no run"])
def test_a_folders_key_that_names_no_run_is_said(
    redis: Redis, invoke: Invoke, tmp_path: Path, value: bytes | None
) -> None:
    key = run_folder_key(str(tmp_path.resolve()))
    if value is None:
        redis.rpush(key, "x")
        told = f"the key {key} is a list in this Redis, expected a string"
    else:
        redis.set(key, value)
        told = "this Redis knows no run"
    assert told in invoke("status", tmp_path).output


def test_a_parts_errors_count_once_however_often_it_is_recorded(
    redis: Redis, submit: Callable[[], str], make_context: MakeContext
) -> None:
    run = submit().splitlines()[0]
    work_off(redis, make_context)
    redis.hset(run_key(run), "max_errors", "1")
    first, second, _ = queued_jobs(redis)
    state = RunState(redis, run)
    for _ in range(3):  # another execution, or the same again after its worker was killed
        run_task(make_context(), first.func_name, *first.args, answer=lambda request: refuse("x"))
    assert state.judge() is None
    assert not state.is_cancelled()
    run_task(make_context(), second.func_name, *second.args, answer=lambda request: refuse("x"))
    assert state.is_cancelled()


@pytest.mark.parametrize(("key_of", "field"), [(run_key, "judged_rows"), (run_parts_key, "total")])
def test_a_count_that_is_none_keeps_no_part_from_being_counted(
    redis: Redis,
    submit: Callable[[], str],
    make_context: MakeContext,
    key_of: Callable[[str], str],
    field: str,
) -> None:
    run = submit().splitlines()[0]
    work_off(redis, make_context)
    redis.hset(key_of(run), field, b"\xff")  # type: ignore[arg-type]
    work_off(redis, make_context)
    assert read_snapshot(redis, run).finished
