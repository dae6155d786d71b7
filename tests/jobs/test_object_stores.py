"""Runs whose files lie in an object store."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

import obstore

import jobs as tokenmill
from jobs import errors
from jobs.context import JobContext
from jobs.parquet import object_files, store_errors
from jobs.parquet.find_files import find_files
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.storage import Storage
from jobs.runs.control import retry_run
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from jobs.runs.refusals import RunNotHere
from tests.jobs.answering import queued_jobs, refuse, score_parquet, shout, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.s3_server import BUCKET, S3, Fault, FaultyProxy, failing
from tests.jobs.stored_runs import ROOT, MakeContext, in_store, rows, run_all, spec_of, whole_run
from tests.jobs.test_kills import finish, open_work


def put_rows(s3: S3, key: str, table: pa.Table) -> None:
    contents = io.BytesIO()
    pq.write_table(table, contents)
    s3.put(key, contents.getvalue())


def test_commands_read_a_run_in_a_store_and_it_may_be_extended(
    s3: S3,
    redis: Redis,
    make_context: MakeContext,
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, output = in_store(make_context(), tmp_path), f"{ROOT}/out"
    put_rows(s3, "data/in/b.parquet", rows(5))
    run = score_parquet(context, f"{ROOT}/in", output, rows_per_shard=2)["run"]
    work_off(redis, lambda: context, answer=lambda each: refuse("no") if each.prompt == "p3" else shout(each))
    told = json.loads(invoke("errors", run, "--json").stdout)
    assert [(each["row"], each["file_row"], each["reason"]) for each in told["rows"]] == [(3, 3, "no")]
    assert invoke("tail", output, "--lines", 1, "--follow").stdout == "row 4: P4\n"
    assert invoke("report", run, "--price-per-hour", 3).stdout == f"{output}/_report.html\n"
    assert b"3 an hour" in s3.get("data/out/_report.html")
    found = tokenmill.run(output, connection=redis)
    assert found.table()["completion"].to_pylist() == ["P0", "P1", "P2", None, "P4"]
    put_rows(s3, "data/in/a.parquet", rows(2, "q"))
    assert score_parquet(context, f"{ROOT}/in", output, rows_per_shard=2, extend=True)["rows_added"] == 2
    with pytest.raises(RunNotHere, match="no _SUCCESS"):
        found.table()
    work_off(redis, lambda: context)
    assert found.table()["completion"].to_pylist() == ["P0", "P1", "P2", None, "P4", "Q0", "Q1"]
    assert [row.row for row in found.errors()] == [3]

    def refused(folder: str) -> Any:
        raise store_errors.StoreRefused(folder, "no keys")

    monkeypatch.setattr("jobs.parquet.read_back.FolderReader", refused)
    result = invoke("errors", run)
    assert "no" in result.stdout
    assert "no keys" in result.stderr
    assert "no keys" in invoke("tail", run).stderr


@pytest.fixture
def context(make_context: MakeContext, tmp_path: Path) -> JobContext:
    return in_store(make_context(), tmp_path)


@pytest.mark.parametrize(
    ("places", "input_format"),
    [
        ("store to disk", "parquet"),
        ("disk to store", "parquet"),
        *(("store to store", name) for name in ("parquet", "csv", "jsonl", "arrow")),
    ],
)
def test_a_run_goes_from_any_place_to_any_other(
    s3: S3, context: JobContext, tmp_path: Path, places: str, input_format: str
) -> None:
    table, contents = rows(5), io.BytesIO()
    if input_format == "parquet":
        pq.write_table(table, contents, row_group_size=2)
    elif input_format == "arrow":
        with pa.ipc.new_file(contents, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif input_format == "csv":
        contents.write(b"prompt,id\n" + b"".join(b"p%d,%d\n" % (n, n) for n in range(5)))
    else:
        contents.write(b"".join(b'{"prompt": "p%d", "id": %d}\n' % (n, n) for n in range(5)))
    name = f"in.{input_format}"
    s3.put(f"data/{name}", contents.getvalue())
    (tmp_path / name).write_bytes(contents.getvalue())
    source = str(tmp_path / name) if places.startswith("disk") else f"{ROOT}/{name}"
    output = str(tmp_path / "out") if places.endswith("disk") else f"{ROOT}/out"
    done = run_all(context, spec_of(source, output))
    assert (done["rows"], done["run_finished"], done["output"]) == (5, True, output)
    if places.endswith("disk"):
        found = pq.read_table(tmp_path / "out").to_pylist()
        assert (tmp_path / "out" / "_SUCCESS").exists()
    else:
        found = s3.rows("data/out")
        names = {key.removeprefix("data/out/") for key in s3.names("data/out/")}
        assert names == whole_run(3)
        assert json.loads(s3.get("data/out/_manifest.json"))["rows"] == 5
        assert s3.get("data/out/_SUCCESS") == b""
    assert [(int(row["id"]), row["completion"]) for row in found] == [(n, f"P{n}") for n in range(5)]
    assert s3.uploads() == []


def test_folders_globs_and_their_keys_are_found_in_a_store(s3: S3, context: JobContext) -> None:
    s3.put("data/in/", b"")  # what a console makes of a new folder
    for day in (1, 2):
        s3.put_rows(f"data/in/day={day}/a.parquet", rows(1, f"d{day}-"))
        s3.put_rows(f"data/in/day={day}/b.parquet", rows(1, f"e{day}-"))
    s3.put_rows("data/in/_hidden/c.parquet", rows(1))
    s3.put("data/in/day=1/notes.txt", b"")
    days = {
        f"{ROOT}/in": [("1", "day=1/a"), ("1", "day=1/b"), ("2", "day=2/a"), ("2", "day=2/b")],
        f"{ROOT}/in/day=*/b.parquet": [("1", "day=1/b"), ("2", "day=2/b")],
        f"{ROOT}/in/**/[a]*.parquet": [("1", "day=1/a"), ("2", "day=2/a")],
        f"{ROOT}/in/day=2": [("day=2/a",), ("day=2/b",)],
    }
    for source, expected in days.items():
        found = find_files(Storage.of(context), [source], f"{ROOT}/out")
        assert [
            (*(value for _, value in each.keys), each.path[len(ROOT) + 4 : -len(".parquet")])
            for each in found
        ] == expected
    run_all(context, spec_of(f"{ROOT}/in"))
    assert [row["day"] for row in s3.rows("data/out")] == [1, 1, 2, 2]
    with pytest.raises(errors.InputNotFound):
        find_files(Storage.of(context), [f"{ROOT}/nothing/*.parquet"], f"{ROOT}/out")


@pytest.mark.parametrize("single_file", [True, "jsonl", "csv", "arrow"])
def test_the_one_output_file_is_put_into_the_store(s3: S3, context: JobContext, single_file: Any) -> None:
    s3.put_rows("data/in.parquet", rows(5))
    run_all(context, spec_of(f"{ROOT}/in.parquet", single_file=single_file))
    suffix = "parquet" if single_file is True else single_file
    contents = s3.get(f"data/out/output.{suffix}")
    if single_file is True:
        assert pq.read_table(io.BytesIO(contents))["completion"].to_pylist() == [f"P{n}" for n in range(5)]
    else:
        assert contents.count(b"P") >= 5
    assert not [key for key in s3.names() if "_tmp" in key]


def test_openai_batch_files_are_read_from_and_written_to_a_store(s3: S3, context: JobContext) -> None:
    body = {"model": "m", "prompt": "hello", "max_tokens": 3}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    s3.put("data/batch.jsonl", json.dumps(line).encode() + b"\n")
    run_all(
        context, RunSpec.from_arguments(f"{ROOT}/batch.jsonl", f"{ROOT}/out", input_format="openai-batch")
    )
    answer = json.loads(s3.get("data/out/output.jsonl"))
    assert (answer["custom_id"], answer["response"]["body"]["choices"][0]["text"]) == ("one", "HELLO")
    assert s3.get("data/out/errors.jsonl") == b""


@pytest.mark.parametrize(
    "path", [f"s3://{BUCKET}/data2/in", f"s3://{BUCKET}", "s3://other/data/in", f"gs://{BUCKET}/data/in"]
)
def test_what_lies_outside_the_roots_is_neither_asked_for_nor_written(
    proxy: FaultyProxy, context: JobContext, path: str
) -> None:
    with pytest.raises(errors.PathOutsideRoots, match=ROOT):
        plan_run(context, Storage.of(context), spec_of(path), Submission("bulk"))
    with pytest.raises(errors.PathOutsideRoots, match=ROOT):
        plan_run(context, Storage.of(context), spec_of(f"{path}/*"), Submission("bulk"))
    with pytest.raises(errors.PathOutsideRoots, match=ROOT):
        plan_run(context, Storage.of(context), spec_of(f"{ROOT}/in", path), Submission("bulk"))
    assert proxy.requests == 0
    with pytest.raises(errors.PathOutsideRoots):  # a worker without any store among its roots
        Storage((str(Path.cwd()),)).resolve(path)


def test_of_two_executions_of_a_shard_one_puts_its_part_in_place(
    s3: S3, context: JobContext, redis: Redis
) -> None:
    s3.put_rows("data/in.parquet", rows(2))
    spec, storage = spec_of(f"{ROOT}/in.parquet"), Storage.of(context)
    plan_run(context, storage, spec, Submission("bulk"))
    slow, fast = (
        open_work(replace(context, execution_id=each), spec, 0, storage) for each in ("slow", "fast")
    )
    finish(fast)
    before = s3.get("data/out/part-00000.parquet")
    finish(slow)
    assert s3.get("data/out/part-00000.parquet") == before
    assert not [key for key in s3.names() if "_tmp" in key]
    storage.make_void(f"{ROOT}/out/_tmp.x", "other")
    assert storage.publish(f"{ROOT}/out/_tmp.x", f"{ROOT}/out/part-00000.parquet") is False
    assert s3.get("data/out/part-00000.parquet") == before


def test_a_missing_and_a_damaged_part_are_computed_again(s3: S3, context: JobContext) -> None:
    s3.put_rows("data/in.parquet", rows(6))
    spec = spec_of(f"{ROOT}/in.parquet")
    run_all(context, spec)
    s3.delete("data/out/part-00001.parquet")
    planned = plan_run(context, Storage.of(context), spec, Submission("bulk"))
    assert (planned["shards_missing"], planned["run_finished"]) == (1, False)
    assert "data/out/_SUCCESS" not in s3.names()
    assert run_all(context, spec)["run_finished"]
    s3.put("data/out/part-00002.parquet", b"nonsense")
    storage = Storage.of(context)
    with pytest.raises(errors.PartDamaged):
        plan_run(context, storage, spec, Submission("bulk"))
    plan_run(context, storage, spec, Submission("bulk", redo_damaged=True))
    plan = object_plan(context, spec)
    finish(plan)
    assert [row["completion"] for row in s3.rows("data/out")] == [f"P{n}" for n in range(6)]
    assert "data/out/_SUCCESS" in s3.names()


def object_plan(context: JobContext, spec: RunSpec) -> Any:
    from jobs.parquet.run_folder import RunFolder
    from jobs.parquet.shard_work import ShardWork, trusted_plan

    storage = Storage.of(context)
    plan = trusted_plan(storage, f"{spec.output}/_plan.json", spec.run, context.files)
    folder = RunFolder(storage, plan, RunState(context.connection, spec.run), context.execution_id)
    return ShardWork(context, folder, 2, redo_damaged=True)


def test_an_input_that_was_replaced_is_told_and_one_that_was_put_again_is_not(
    s3: S3, context: JobContext
) -> None:
    s3.put_rows("data/in.parquet", rows(4))
    spec, storage = spec_of(f"{ROOT}/in.parquet"), Storage.of(context)
    plan_run(context, storage, spec, Submission("bulk"))
    same = s3.get("data/in.parquet")
    s3.put("data/in.parquet", same)
    finish(open_work(context, spec, 0, storage))
    other = bytearray(same)
    place = other.index(b"p3")
    other[place : place + 2] = b"x3"  # the same size, and within the same second perhaps
    s3.put("data/in.parquet", bytes(other))
    with pytest.raises(errors.InputChanged, match="other contents"):
        open_work(context, spec, 1, storage)


@pytest.mark.parametrize("fault", ["503", "cut", "lost"])
def test_a_store_that_fails_for_moments_costs_nothing(
    s3: S3, proxy: FaultyProxy, context: JobContext, fault: Fault
) -> None:
    seen: Counter[str] = Counter()

    def choose(method: str, path: str) -> Fault | None:
        kind = f"{method} {sorted(parse_qs(urlsplit(path).query, keep_blank_values=True))}"
        seen[kind] += 1
        return fault if seen[kind] in (1, 3) else None

    s3.put_rows("data/in.parquet", rows(2))
    proxy.choose = choose
    done = run_all(context, spec_of(f"{ROOT}/in.parquet"))
    assert done["run_finished"]
    assert len(seen) > 6
    assert [row["completion"] for row in s3.rows("data/out")] == ["P0", "P1"]
    assert not [name for name in s3.names() if "_tmp" in name]


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("403", store_errors.StoreRefused, "in.parquet refuses it .AccessDenied"),
        ("expired", store_errors.StoreRefused, r"refuses it .ExpiredToken\)"),
        ("503", store_errors.StoreUnreachable, "503 Service Unavailable"),
        ("cut", store_errors.StoreUnreachable, "TOKENMILL_FILE_TIMEOUT_S"),
    ],
)
def test_a_store_that_goes_on_failing_fails_the_run_by_name(
    s3: S3, proxy: FaultyProxy, context: JobContext, fault: Fault, error: type[Exception], says: str
) -> None:
    s3.put_rows("data/in.parquet", rows(2))
    spec, brief = spec_of(f"{ROOT}/in.parquet"), replace(context, file_timeout_s=0.5)
    proxy.choose = failing(fault, 10**6)
    with pytest.raises(error, match=says):
        plan_run(brief, Storage.of(brief), spec, Submission("bulk"))


def test_a_bucket_that_is_not_there_is_told(s3: S3, context: JobContext) -> None:
    elsewhere = replace(context, data_roots=("s3://no-such-bucket", ROOT))
    s3.put_rows("data/in.parquet", rows(1))
    storage = Storage.of(elsewhere)
    with pytest.raises(store_errors.BucketNotFound, match="NoSuchBucket"):
        plan_run(elsewhere, storage, spec_of("s3://no-such-bucket/in.parquet"), Submission("bulk"))
    spec = spec_of(f"{ROOT}/in.parquet", "s3://no-such-bucket/out")
    with pytest.raises(store_errors.BucketNotFound, match="NoSuchBucket"):
        plan_run(elsewhere, storage, spec, Submission("bulk"))


def test_a_store_that_overwrites_what_is_there_is_refused(
    s3: S3, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_rows("data/in.parquet", rows(1))
    monkeypatch.setattr(object_files, "_fit", set())
    copy = obstore.copy
    monkeypatch.setattr(object_files.obstore, "copy", lambda *each, overwrite=True: copy(*each))
    with pytest.raises(store_errors.StoreUnfit, match="If-None-Match"):
        plan_run(context, Storage.of(context), spec_of(f"{ROOT}/in.parquet"), Submission("bulk"))
    assert s3.names("data/out") == []


def test_failed_rows_of_a_run_in_a_store_are_tried_again(
    s3: S3, redis: Redis, context: JobContext, make_context: MakeContext
) -> None:
    def make() -> JobContext:
        return replace(make_context(), data_roots=context.data_roots, file_timeout_s=20.0)

    s3.put_rows("data/in.parquet", rows(5))
    run = score_parquet(make(), f"{ROOT}/in.parquet", f"{ROOT}/out", rows_per_shard=2)["run"]
    work_off(redis, make, answer=lambda request: refuse("no") if request.prompt == "p3" else shout(request))
    before = s3.rows("data/out/part-")
    retry_run(redis, run)
    while queued_jobs(redis):
        work_off(redis, make)
    after = s3.rows("data/out/part-")
    assert [(row["id"], row["completion"], row["error"]) for row in after] == [
        (n, f"P{n}", None) for n in range(5)
    ]
    assert [row for row in after if row["id"] != 3] == [row for row in before if row["id"] != 3]
    assert json.loads(s3.get("data/out/_manifest.json"))["errors"] == 0
    assert {name.rpartition("/")[2] for name in s3.names("data/out/")} == whole_run(3)
