"""A run that is submitted again, or whose input changes: what is right stays, what is not is named."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.common.rq_jobs import QueueKeys
from jobs.parquet.files.fingerprint import WHOLE_BYTES, file_fingerprint
from jobs.parquet.files.storage import Storage
from jobs.runs import control
from jobs.runs.control import submit_run
from jobs.runs.plans.names import JOURNAL, PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from tests.jobs.killing import Executions, finish
from tests.jobs.local_runs import Runs


def write(path: Path, letters: str, row_group_size: int = 1) -> None:
    pq.write_table(pa.table({"prompt": list(letters)}), path, row_group_size=row_group_size)


@pytest.fixture
def submit(runs: Runs) -> Callable[..., dict[str, Any]]:
    write(runs.source, "abcdef")
    return lambda **options: runs.plan(rows_per_shard=2, **options)


@pytest.fixture
def run(runs: Runs, submit: Callable[..., dict[str, Any]]) -> str:
    """A run of three parts that has finished."""
    planned = submit()
    runs.work()
    return str(planned["run"])


def test_a_part_of_another_run_is_no_part_of_this_one(
    runs: Runs, submit: Callable[..., dict[str, Any]], run: str, tmp_path: Path
) -> None:
    runs.plan(output=tmp_path / "other", rows_per_shard=2)
    runs.work()
    os.replace(tmp_path / "other" / part_name(0), runs.output / part_name(0))
    with pytest.raises(errors.PartDamaged, match="belongs to shard 0 of run"):
        submit()


def test_a_touched_input_is_the_same_input(
    runs: Runs, submit: Callable[..., dict[str, Any]]
) -> None:
    submit()
    first, second, third = runs.jobs
    os.utime(runs.source)
    runs.run(first)
    task = runs.answered(second)
    runs.source.write_bytes(runs.source.read_bytes())  # copied anew while a shard runs
    task.result()
    task.close()
    assert submit()["shards_missing"] == 1
    assert runs.run(third)["run_finished"]


def test_a_replaced_input_of_the_same_size_is_another_one_and_finished_parts_stay(
    runs: Runs, redis: Redis, submit: Callable[..., dict[str, Any]]
) -> None:
    submit()
    size = runs.source.stat().st_size
    first, second, _ = runs.jobs
    runs.run(first)
    write(runs.source, "abxdef")
    assert runs.source.stat().st_size == size
    with pytest.raises(errors.InputChanged, match="other contents"):
        runs.run(second)
    for lost in (False, True):
        if lost:
            redis.flushall()
        with pytest.raises(errors.InputChanged, match=r"in\.parquet"):
            submit()
    assert (runs.output / part_name(0)).exists()
    assert not list(runs.output.glob("_tmp.*"))


@pytest.mark.parametrize("change", [lambda path: write(path, "abxdef"), Path.unlink])
def test_an_input_that_changes_while_its_shard_runs_is_noticed(
    runs: Runs, submit: Callable[..., dict[str, Any]], change: Callable[[Path], None]
) -> None:
    submit()
    task = runs.answered(runs.jobs[0])
    change(runs.source)
    with pytest.raises(errors.InputChanged):
        task.result()
    task.close()


@pytest.mark.parametrize(
    "row_group_size", [1, 6]
)  # like the planned file's, so that reading works, or not
def test_an_input_that_is_replaced_while_its_part_is_written_is_not_published(
    runs: Runs, submit: Callable[..., dict[str, Any]], row_group_size: int
) -> None:
    class ReplacedMeanwhile(Storage):
        def open_output(self, path: str) -> Any:
            write(runs.source, "xbcdef", row_group_size)
            return super().open_output(path)

    submit()
    spec = RunSpec.from_arguments(str(runs.source), str(runs.output), rows_per_shard=2)
    work = Executions(runs, spec).open(0, ReplacedMeanwhile)
    with pytest.raises(errors.InputChanged):
        finish(work)
    work.close()
    assert sorted(path.name for path in runs.output.iterdir()) == [JOURNAL, PLAN]


def test_a_large_files_fingerprint_depends_on_its_footer_and_on_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"x": list(range(20 * WHOLE_BYTES))}), path)
    content = path.read_bytes()
    storage = Storage([str(tmp_path)])
    original = file_fingerprint(storage, str(path))
    for place in (10, len(content) // 3, len(content) - 200):
        changed = bytearray(content)
        changed[place : place + 8] = bytes(8) if any(changed[place : place + 8]) else b"x" * 8
        path.write_bytes(changed)
        assert file_fingerprint(storage, str(path)) != original, f"byte {place} of {len(content)}"


def test_a_planning_that_a_worker_of_rqs_own_takes_meanwhile_is_not_enqueued_twice(
    runs: Runs, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"input": str(runs.write(["p"])), "output": str(runs.output)}
    keys, enqueue = QueueKeys("bulk"), control._enqueue_planning
    submit_run(redis, "bulk", **names)

    def enqueue_as_it_is_taken(*arguments: Any) -> None:
        redis.lmove(keys.waiting, keys.popped, "LEFT", "RIGHT")
        enqueue(*arguments)

    monkeypatch.setattr(control, "_enqueue_planning", enqueue_as_it_is_taken)
    submit_run(redis, "bulk", **names)
    assert (redis.llen(keys.popped), redis.llen(keys.waiting)) == (1, 0)
