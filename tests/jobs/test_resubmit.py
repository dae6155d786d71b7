"""A finished run that is submitted again: what is still right stays, what is not is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from jobs import errors
from jobs.cli import commands as cli
from jobs.context import JobContext
from jobs.parquet.fingerprint import WHOLE_BYTES, file_fingerprint
from jobs.parquet.storage import Storage
from jobs.runs.control import submit_run
from jobs.runs.watching.snapshot import read_snapshot
from jobs.watch.runs import list_runs
from tests.jobs.answering import feed, opened_task, queued_jobs, run_task, score_parquet, work_off

MakeContext = Callable[[], JobContext]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [*"abcdef"]}), path)
    return path


@pytest.fixture
def submit(make_context: MakeContext, source: Path, tmp_path: Path) -> Callable[..., dict[str, object]]:
    def run(**options: object) -> dict[str, object]:
        return score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2, **options)

    return run


@pytest.fixture
def run(redis: Redis, make_context: MakeContext, submit: Callable[..., dict[str, object]]) -> str:
    """A run of three parts that has finished."""
    planned = submit()
    work_off(redis, make_context)
    return str(planned["run"])


def truncate(part: Path) -> None:
    os.truncate(part, part.stat().st_size // 2)


def replace_by_another_table(part: Path) -> None:
    part.unlink()
    pq.write_table(pa.table({"x": [1, 2]}), part)


def replace_by_fewer_rows(part: Path) -> None:
    table = pq.read_table(part)
    part.unlink()
    pq.write_table(table.slice(1), part)


def cut_out_data(part: Path) -> None:
    """Keep mark and footer, as a copy that skipped a block may."""
    whole = part.read_bytes()
    part.unlink()
    part.write_bytes(whole[:4] + whole[50:])


def link_to_nowhere(part: Path) -> None:
    part.unlink()
    part.symlink_to("unmounted")


@pytest.mark.parametrize(
    "damage",
    [truncate, replace_by_another_table, replace_by_fewer_rows, cut_out_data, link_to_nowhere],
)
def test_a_damaged_part_of_a_finished_run_is_named_and_redone_on_wish(
    redis: Redis,
    make_context: MakeContext,
    submit: Callable[..., dict[str, object]],
    run: str,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    output = tmp_path / "out"
    damage(output / "part-00001.parquet")
    with pytest.raises(errors.PartDamaged, match=r"part-00001\.parquet.*--redo-damaged"):
        submit()
    assert not read_snapshot(redis, run).finished
    assert list_runs(redis)[0].rows_done == read_snapshot(redis, run).rows_done < 6
    assert not (output / "_SUCCESS").exists()
    assert submit(redo_damaged=True)["shards_enqueued"] == 1
    work_off(redis, make_context)
    assert read_snapshot(redis, run).finished
    assert (output / "_SUCCESS").exists()
    assert pq.read_table(output)["completion"].to_pylist() == [*"ABCDEF"]


def test_a_refused_submission_leaves_nothing_that_seems_to_wait(
    redis: Redis, redis_url: str, submit: Callable[..., dict[str, object]], run: str, tmp_path: Path
) -> None:
    truncate(tmp_path / "out" / "part-00001.parquet")
    with pytest.raises(errors.PartDamaged):
        submit()
    redis.hset(f"rq:job:{run}-plan", mapping={"status": "failed", "data": b""})
    redis.hset(f"tokenmill:run:{run}", "plan_job", f"{run}-plan")
    told = click.testing.CliRunner().invoke(cli.main, ["--url", redis_url, "status", run]).stdout
    assert f"run {run}: failed" in told
    assert "1 left for another submit" in told


def test_a_wish_to_redo_parts_reaches_a_planning_that_waits_and_is_refused_by_one_that_runs(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    arguments = {"input": str(source), "output": str(tmp_path / "new")}
    name = submit_run(redis, "bulk", **arguments)

    def redoes() -> bool:
        job = Job.fetch(f"{name}-plan", redis, JSONSerializer)
        return bool(job.kwargs["redo_damaged"])

    assert not redoes()
    redis.zadd(f"rq:executions:{name}-plan", {"e": 1})
    with pytest.raises(errors.PlanningUnderWay, match="without redoing damaged parts"):
        submit_run(redis, "bulk", redo_damaged=True, **arguments)
    redis.delete(f"rq:executions:{name}-plan")
    submit_run(redis, "bulk", redo_damaged=True, **arguments)
    assert redoes()
    submit_run(redis, "bulk", **arguments)
    assert redoes(), "who only wants to follow the run takes no wish back"
    assert redis.lrange("rq:queue:bulk", 0, -1) == [f"{name}-plan".encode()]


def test_a_part_of_another_run_is_no_part_of_this_one(
    redis: Redis,
    make_context: MakeContext,
    submit: Callable[..., dict[str, object]],
    run: str,
    source: Path,
    tmp_path: Path,
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "other"), rows_per_shard=2)
    work_off(redis, make_context)
    os.replace(tmp_path / "other" / "part-00000.parquet", tmp_path / "out" / "part-00000.parquet")
    with pytest.raises(errors.PartDamaged, match="belongs to shard 0 of run"):
        submit()


def test_a_part_that_no_shard_of_the_run_has_is_named_and_removed_on_wish(
    submit: Callable[..., dict[str, object]], run: str, tmp_path: Path
) -> None:
    foreign = tmp_path / "out" / "part-00007.parquet"
    shutil.copy(tmp_path / "out" / "part-00000.parquet", foreign)
    with pytest.raises(
        errors.PartDamaged, match=r"part-00007\.parquet.*this run has 3 shards.*--redo-damaged"
    ):
        submit()
    again = submit(redo_damaged=True)
    assert (again["run_finished"], again["shards_enqueued"]) == (True, 0)
    assert not foreign.exists()


def test_a_wish_to_redo_that_is_none_is_refused_and_not_logged(
    submit: Callable[..., dict[str, object]], run: str
) -> None:
    with pytest.raises(
        errors.InvalidValue, match=r"redo_damaged is 'my prompt'.*redo_damaged:=true"
    ) as refused:
        submit(redo_damaged="my prompt")
    assert "my prompt" not in refused.value.log_text


def test_a_finished_run_that_is_whole_is_finished(
    redis: Redis, submit: Callable[..., dict[str, object]], run: str
) -> None:
    again = submit()
    assert (again["run_finished"], again["shards_enqueued"]) == (True, 0)
    assert read_snapshot(redis, run).finished


def test_a_refused_submission_leaves_a_finished_run_finished(
    redis: Redis,
    redis_url: str,
    make_context: MakeContext,
    submit: Callable[..., dict[str, object]],
    run: str,
    source: Path,
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"prompt": ["new"]}), source)
    arguments = ["--url", redis_url, "submit", str(source), str(tmp_path / "out"), "--rows-per-shard", "2"]
    result = click.testing.CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert read_snapshot(redis, run).state == "planning", (
        "nobody who waits takes the former end for this one's"
    )
    with pytest.raises(errors.InputChanged):
        work_off(redis, make_context)
    queued_jobs(redis)[0].delete()
    snapshot = read_snapshot(redis, run)
    assert snapshot.finished
    assert snapshot.state == "finished"
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_run_whose_parts_are_gone_has_not_finished(
    redis: Redis, submit: Callable[..., dict[str, object]], run: str, tmp_path: Path
) -> None:
    for name in ("part-00002.parquet", "_SUCCESS"):
        (tmp_path / "out" / name).unlink()
    assert submit()["shards_enqueued"] == 1
    assert not read_snapshot(redis, run).finished


def test_a_touched_input_is_the_same_input(
    redis: Redis,
    make_context: MakeContext,
    submit: Callable[..., dict[str, object]],
    source: Path,
    tmp_path: Path,
) -> None:
    submit()
    first, second, third = queued_jobs(redis)
    os.utime(source)
    run_task(make_context(), first.func_name, *first.args)
    task = opened_task(make_context(), second.func_name, second.args)
    source.write_bytes(source.read_bytes())  # copied anew while a shard runs
    feed(task)
    task.result()
    task.close()
    assert submit()["shards_missing"] == 1
    assert run_task(make_context(), third.func_name, *third.args)["run_finished"]
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["rows"] == 6


def test_a_replaced_input_of_the_same_size_is_another_one(
    redis: Redis, make_context: MakeContext, submit: Callable[..., dict[str, object]], source: Path
) -> None:
    submit()
    size = source.stat().st_size
    pq.write_table(pa.table({"prompt": [*"abxdef"]}), source)
    assert source.stat().st_size == size
    first = queued_jobs(redis)[0]
    with pytest.raises(errors.InputChanged, match="other contents"):
        run_task(make_context(), first.func_name, *first.args)
    with pytest.raises(errors.InputChanged, match="other contents"):
        submit()


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
    path.write_bytes(content)
    assert file_fingerprint(storage, str(path)) == original


def test_an_input_that_is_no_regular_file_any_more_is_not_called_gone(
    redis: Redis,
    make_context: MakeContext,
    submit: Callable[..., dict[str, object]],
    source: Path,
) -> None:
    submit()
    shard = queued_jobs(redis)[0]
    source.unlink()
    with pytest.raises(errors.InputChanged, match="it is gone"):
        run_task(make_context(), shard.func_name, *shard.args)
    os.mkfifo(source)
    with pytest.raises(errors.InputChanged, match="it is no regular file any more"):
        run_task(make_context(), shard.func_name, *shard.args)
