"""Runs whose files lie in an object store, killed or met by others, and stores that fail."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest
from redis import Redis

import jobs as tokenmill
from tests.jobs.answering import keep, refuse, score_parquet, shout, work_off
from tests.jobs.conftest import Invoke

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

import obstore
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from jobs import errors
from jobs.context import JobContext
from jobs.parquet.files import filesystem, object_files, object_requests
from jobs.parquet.files.object_requests import answer_about
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.planner import plan_run
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import Submission
from tests.jobs.conftest import MakeContext
from tests.jobs.killing import Fuse, finish, open_work, run_until_killed
from tests.jobs.s3_server import BUCKET, S3, Fault, FaultyProxy, failing
from tests.jobs.stored_runs import ROOT, in_store, rows, run_all, spec_of, whole_run


@pytest.fixture
def context(make_context: MakeContext, tmp_path: Path) -> JobContext:
    return in_store(make_context(), tmp_path)


@pytest.mark.parametrize(
    ("places", "name"),
    [
        ("store to disk", "in.parquet"),
        ("disk to store", "in.parquet"),
        ("store to store", "in.jsonl"),
    ],
)
def test_a_run_goes_from_any_place_to_any_other(
    s3: S3, context: JobContext, tmp_path: Path, places: str, name: str
) -> None:
    contents = io.BytesIO()
    if name == "in.parquet":
        pq.write_table(rows(5), contents, row_group_size=2)
    else:
        contents.write(b"".join(b'{"prompt": "p%d", "id": %d}\n' % (n, n) for n in range(5)))
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
    assert [(int(row["id"]), row["completion"]) for row in found] == [
        (n, f"P{n}") for n in range(5)
    ]
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


@pytest.mark.parametrize(
    "path", [f"s3://{BUCKET}/data2/in", "s3://other/data/in", f"gs://{BUCKET}/data/in"]
)
def test_what_lies_outside_the_roots_is_neither_asked_for_nor_written(
    proxy: FaultyProxy, context: JobContext, path: str
) -> None:
    for spec in (spec_of(path), spec_of(f"{path}/*"), spec_of(f"{ROOT}/in", path)):
        with pytest.raises(errors.PathOutsideRoots, match=ROOT):
            plan_run(context, Storage.of(context), spec, Submission("bulk"))
    assert proxy.requests == 0
    with pytest.raises(errors.PathOutsideRoots):  # a worker without any store among its roots
        Storage((str(Path.cwd()),)).resolve(path)


def test_of_two_executions_of_a_shard_one_puts_its_part_in_place(
    s3: S3, context: JobContext
) -> None:
    s3.put_rows("data/in.parquet", rows(2))
    spec, storage = spec_of(f"{ROOT}/in.parquet"), Storage.of(context)
    plan_run(context, storage, spec, Submission("bulk"))
    slow, fast = (
        open_work(replace(context, execution_id=each), spec, 0, storage)
        for each in ("slow", "fast")
    )
    finish(fast)
    before = s3.get("data/out/part-00000.parquet")
    finish(slow)
    assert s3.get("data/out/part-00000.parquet") == before
    assert not [key for key in s3.names() if "_tmp" in key]
    storage.create(f"{ROOT}/out/_tmp.x")
    assert storage.publish(f"{ROOT}/out/_tmp.x", f"{ROOT}/out/part-00000.parquet") is False
    assert s3.get("data/out/part-00000.parquet") == before


def test_what_a_store_does_not_copy_at_once_is_put_in_place_once(
    s3: S3, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "MAX_COPY_BYTES", 3)
    storage = Storage.of(context)
    for contents, is_first in ((b"first", True), (b"second", False)):
        with storage.open_output(f"{ROOT}/_tmp.x") as sink:
            sink.write(contents)
        assert storage.publish(f"{ROOT}/_tmp.x", f"{ROOT}/large") is is_first
    assert s3.get("data/large") == b"first"


@pytest.mark.parametrize("lost", ["part-00001.parquet", "output.parquet"])
def test_what_a_finished_run_lacks_is_named_and_its_prefix_stays(
    s3: S3, context: JobContext, lost: str
) -> None:
    s3.put_rows("data/in.parquet", rows(6))
    spec = spec_of(f"{ROOT}/in.parquet", single_file=True)
    run_all(context, spec)
    assert not [name for name in s3.names() if "_tmp" in name]
    found = pq.read_table(io.BytesIO(s3.get("data/out/output.parquet")))
    assert found["completion"].to_pylist() == [f"P{n}" for n in range(6)]
    key = f"data/out/{'_parts/' if lost.startswith('part') else ''}{lost}"
    s3.delete(key)
    left = s3.names()
    with pytest.raises(errors.PartDamaged, match=rf"{lost} .*it is gone.*--reuse {ROOT}/out, "):
        plan_run(context, Storage.of(context), spec, Submission("bulk"))
    assert s3.names() == left
    s3.put(key, b"nonsense")
    if lost.startswith("part"):
        with pytest.raises(errors.PartDamaged, match="not readable"):
            plan_run(context, Storage.of(context), spec, Submission("bulk"))


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


def test_a_shard_goes_on_where_another_execution_has_left_it(s3: S3, context: JobContext) -> None:
    s3.put_rows("data/in.parquet", rows(4))
    spec = replace(spec_of(f"{ROOT}/in.parquet"), rows_per_shard=10)
    storage = Storage.of(context)
    plan_run(context, storage, spec, Submission("bulk"))
    left = open_work(replace(context, execution_id="killed"), spec, 0, storage)
    asked = list(left.requests())
    left.deliver(0, [shout(asked[0])])
    assert keep(left, {1: {0: [7, 8]}})
    assert len(s3.names("data/out/_journal/")) == 2
    work = open_work(context, spec, 0, storage)
    requests = list(work.requests())
    assert sorted(each.resumed.get(0, []) for each in requests) == [[], [], [7, 8]]
    for index, request in enumerate(requests):
        work.deliver(index, [shout(request)])
    work.result()
    assert s3.names("data/out/_journal/") == []
    assert json.loads(s3.get("data/out/_manifest.json"))["rows_resumed"] == 2
    left.deliver(1, [shout(asked[1])])
    assert keep(left, {})  # thawed after the end: an object that nobody reads
    assert len(s3.rows("data/out")) == 4


@pytest.mark.parametrize(
    "fault", ["lost", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("503", "cut"))]
)
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
        ("403", filesystem.StoreRefused, "in.parquet refuses it .AccessDenied"),
        ("expired", filesystem.StoreRefused, r"refuses it .ExpiredToken\)"),
        ("503", filesystem.StoreUnreachable, "503 Service Unavailable"),
        ("cut", filesystem.StoreUnreachable, "TOKENMILL_FILE_TIMEOUT_S"),
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


def test_a_store_that_is_away_is_told_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_requests, "TRIES_S", 0.0)
    monkeypatch.setattr(object_requests, "FIRST_WAIT_S", 0.001)
    replies = [*[GenericError("status code: 503")] * 3, None]

    def ask() -> None:
        if (error := replies.pop(0)) is not None:
            raise error

    object_requests.make_request("s3://bucket/key", ask, timeout_s=10)
    away, back = (record.getMessage() for record in caplog.records)
    assert (
        away
        == "the store of s3://bucket/key has not answered for 0 s (status code: 503): trying again"
    )
    assert back == "the store of s3://bucket/key has answered after 0 s"


def test_a_bucket_that_is_not_there_is_told(s3: S3, context: JobContext) -> None:
    elsewhere = replace(context, data_roots=("s3://no-such-bucket", ROOT))
    spec = spec_of("s3://no-such-bucket/in.parquet")
    with pytest.raises(filesystem.BucketNotFound, match="NoSuchBucket"):
        plan_run(elsewhere, Storage.of(elsewhere), spec, Submission("bulk"))


def test_a_store_that_overwrites_what_is_there_is_refused(
    s3: S3, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_rows("data/in.parquet", rows(1))
    monkeypatch.setattr(object_files, "_safe_buckets", set())
    copy = obstore.copy
    monkeypatch.setattr(object_files.obstore, "copy", lambda *each, overwrite=True: copy(*each))
    with pytest.raises(filesystem.StoreUnfit, match="If-None-Match"):
        plan_run(context, Storage.of(context), spec_of(f"{ROOT}/in.parquet"), Submission("bulk"))
    assert s3.names("data/out") == []


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """In the place of a server: obstore's own store, for many runs in little time."""
    store = MemoryStore()
    monkeypatch.setattr(object_files, "opened_store", lambda *each: store)
    monkeypatch.setattr(
        object_files,
        "list_in_child",
        lambda kind, folder, _: answer_about(store, kind, folder.split("/", 3)[3]),
    )
    return store


@pytest.mark.parametrize("stride", [37, pytest.param(11, marks=pytest.mark.long)])
def test_no_kill_point_strands_a_run_in_a_store(
    memory: MemoryStore, redis: Redis, context: JobContext, tmp_path: Path, stride: int
) -> None:
    pq.write_table(rows(6), tmp_path / "in.parquet", row_group_size=2)
    spec, step = spec_of(str(tmp_path / "in.parquet")), 0
    while run_until_killed(context, spec, Fuse(step)) is not None:
        assert run_all(context, spec)["run_finished"]
        names = [each["path"] for page in obstore.list(memory) for each in page]
        assert {name.removeprefix("data/out/") for name in names} == whole_run(3)
        assert "finished" in RunState(redis, spec.run).facts()
        redis.flushall()
        obstore.delete(memory, names)
        step += stride
    assert step > 60


def test_commands_read_a_run_in_a_store(
    s3: S3, redis: Redis, context: JobContext, invoke: Invoke, tmp_path: Path
) -> None:
    s3.put_rows("data/in.parquet", rows(3))
    output = f"{ROOT}/out"
    run = score_parquet(context, f"{ROOT}/in.parquet", output, rows_per_shard=2)["run"]
    work_off(
        redis,
        lambda: context,
        answer=lambda each: refuse("no") if each.prompt == "p1" else shout(each),
    )
    told = json.loads(invoke("errors", run, "--json").stdout)
    assert [(each["row"], each["reason"]) for each in told["rows"]] == [(1, "no")]
    assert invoke("tail", output, "--lines", 1).stdout == "row 2: P2\n"
    assert invoke("report", run).stdout == f"{output}/_report.html\n"
    assert invoke("report", run, "--price-per-hour", 3, "--out", tmp_path / "r").exit_code == 0
    assert "3 an hour" in (tmp_path / "r").read_text()
    assert tokenmill.run(output, connection=redis).table()["completion"].to_pylist() == [
        "P0",
        None,
        "P2",
    ]
