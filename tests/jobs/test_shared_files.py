"""A shard costs the same however many shards and row groups its run has, and an idle worker holds no file."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.context import JobContext
from jobs.context.shared_files import MAX_READERS, SharedFiles
from jobs.errors import InputChanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.tables.table_reading import BATCH_ROWS, RowReader
from jobs.runs.plans.plan import Shard, cut_shards
from jobs.tasks import OpenTask
from tests.jobs.answering import feed, opened_task, queued_jobs, score_parquet
from tests.jobs.conftest import MakeContext

ROWS = 5000


def opened(job: Any, context: JobContext) -> OpenTask:
    return opened_task(context, job.func_name, job.args)


def open_files(path: Path) -> int:
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link) == str(path) for link in links)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
@pytest.mark.parametrize("row_group_size", [10, ROWS])
def test_shards_in_a_row_share_plan_and_position(
    redis: Redis,
    make_context: MakeContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_group_size: int,
) -> None:
    source = tmp_path / "in.parquet"
    table = pa.table({"prompt": [f"p{n}" for n in range(ROWS)], "id": range(ROWS)})
    pq.write_table(table, source, row_group_size=row_group_size)
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=100)
    opens: Counter[str] = Counter()
    open_input = Storage.open_input

    def counted(self: Storage, path: str) -> Any:
        opens[os.path.basename(path)] += 1
        return open_input(self, path)

    monkeypatch.setattr(Storage, "open_input", counted)
    files = SharedFiles()
    contexts = (replace(make_context(), files=files) for _ in range(ROWS))
    last: OpenTask | None = None
    for job in queued_jobs(redis)[:-1]:
        task = opened(job, next(contexts))
        feed(task)
        task.result()
        if last is not None:
            last.close()
        last = task
    assert opens == {"_plan.json": 1, "in.parquet": 2}  # once to ask, once to write
    assert last is not None
    assert open_files(source) == 2
    last.close()
    last.close()
    assert open_files(source) == 0
    assert files.num_readers == 0
    parts = pq.read_table(tmp_path / "out")
    assert parts["id"].to_pylist() == list(range(ROWS - 100))
    assert parts["completion"].to_pylist() == [f"P{n}" for n in range(ROWS - 100)]


def test_a_shard_that_cannot_be_read_holds_no_file(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), source)
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    context = make_context()
    with source.open("ab") as file:
        file.write(b"x")
    with pytest.raises(Exception, match="changed"):
        opened(job, context)
    assert context.files.num_readers == 0


def test_a_reader_that_has_seen_another_file_is_not_lent_on(
    redis: Redis, make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced while a shard opens it, and back in its place when the next shard looks."""
    source, kept = tmp_path / "in.parquet", tmp_path / "kept"
    pq.write_table(pa.table({"prompt": [f"P{n}" for n in range(4)]}), source)
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)
    first, second = queued_jobs(redis)
    context = make_context()
    context.files.enter(str(source))  # as another shard of the file that is open
    open_input = Storage.open_input

    def open_another(self: Storage, path: str) -> Any:
        if path == str(source) and not kept.exists():
            source.rename(kept)
            pq.write_table(pa.table({"prompt": [f"N{n}" for n in range(4)]}), source)
        return open_input(self, path)

    monkeypatch.setattr(Storage, "open_input", open_another)
    with pytest.raises(InputChanged):
        opened(first, context)
    kept.replace(source)
    kept.touch()
    task = opened(second, context)
    assert [request.prompt for request in task.requests()] == ["P2", "P3"]
    task.close()
    context.files.leave(str(source))


def test_the_last_shard_of_a_file_closes_it_though_another_files_is_open(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / f"{name}.parquet")
        score_parquet(
            make_context(), str(tmp_path / f"{name}.parquet"), str(tmp_path / f"out-{name}")
        )
    context = make_context()
    first, second = (opened(job, context) for job in queued_jobs(redis))
    assert context.files.num_readers == 2
    first.close()
    assert context.files.num_readers == 1
    second.close()
    assert context.files.num_readers == 0
    assert len(context.files._turns) == 0


@pytest.mark.processes
def test_a_reader_of_a_shard_that_was_closed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    """A job is stopped while a thread reads its rows."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": range(2)}), path)
    (shard,) = cut_shards([[2]], 2)
    files = SharedFiles()
    files.enter(str(path))
    with files.reader((str(path),), shard, lambda: RowReader(Storage(["/"]), str(path), shard)):
        files.leave(str(path))
    assert files.num_readers == 0


@pytest.mark.processes
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_order_of_shards_reads_each_shards_own_rows(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.integers(1, 2 * BATCH_ROWS[0]), min_size=1, max_size=4))
    total = sum(groups)
    path = tmp_path_factory.mktemp("rows") / "in.parquet"
    with pq.ParquetWriter(path, pa.schema([("n", pa.int64())])) as writer:
        start = 0
        for rows in groups:
            writer.write_table(pa.table({"n": range(start, start + rows)}), row_group_size=rows)
            start += rows
    shards = cut_shards([groups], data.draw(st.integers(1 + total // 20, total)))
    files, key = SharedFiles(), (str(path),)
    files.enter(str(path))
    for shard in data.draw(st.permutations(list(shards))):

        def open_reader(first: Shard = shard) -> RowReader:
            return RowReader(Storage(["/"]), str(path), first)

        with files.reader(key, shard, open_reader) as reader:
            found = [n for batch in reader.read(shard) for n in batch["n"].to_pylist()]
            assert files.num_readers <= MAX_READERS
        assert found == list(range(shard.start, shard.start + shard.rows))
    files.leave(str(path))
    assert files.num_readers == 0


@pytest.mark.processes
def test_a_shard_waits_for_the_reader_of_the_one_before_it(tmp_path: Path) -> None:
    """Two threads that each had readers of their own would hold, and decode, the same rows twice."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": range(20)}), path)
    first, second = cut_shards([[20]], 10)
    files, key = SharedFiles(), (str(path),)
    opened: SimpleQueue[RowReader] = SimpleQueue()
    found: SimpleQueue[list[int]] = SimpleQueue()

    def rows(shard: Shard, meanwhile: Callable[[], None] = lambda: None) -> None:
        def open_reader() -> RowReader:
            reader = RowReader(Storage(["/"]), str(path), shard)
            opened.put(reader)
            return reader

        with files.reader(key, shard, open_reader) as reader:
            meanwhile()
            found.put([n for batch in reader.read(shard) for n in batch["n"].to_pylist()])

    def start_second() -> None:
        other.start()
        other.join(0.1)  # in vain

    other = threading.Thread(target=rows, args=(second,))
    files.enter(str(path))
    rows(first, start_second)
    other.join()
    files.leave(str(path))
    assert [found.get(), found.get()] == [list(range(10)), list(range(10, 20))]
    assert opened.qsize() == 1


def test_planning_a_new_run_does_not_read_a_queue_full_of_others_jobs(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    redis.config_resetstat()
    score_parquet(
        make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1
    )
    assert "cmdstat_lrange" not in redis.info("commandstats")
    assert len(queued_jobs(redis)) == 2
