"""Small files that stand for gigabytes are read a few rows at a time, or fail their shard or plan by name."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.context.shared_files import CHILDREN, MAX_READERS, NoRoomYet, ShardBytes
from jobs.parquet.files.storage import Storage
from jobs.parquet.shards.shard_work import ShardWork
from jobs.parquet.tables.row_groups import GROUP_BYTES
from jobs.parquet.tables.table_reading import TableReading
from tests.jobs.answering import FakeCompletion, queued_jobs, run_task, score_parquet
from tests.jobs.conftest import MakeContext

MIB = 1 << 20


def one_text(rows: int, size: int) -> pa.Array:
    """One text in all rows; takes its own size alone."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * size])


def answer_all(make_context: MakeContext, path: Path, **arguments: Any) -> pa.Table:
    """Run a file of one shard to its end; return the output."""
    output = path.parent / "out"
    context = make_context()
    score_parquet(context, str(path), str(output), **arguments)
    (job,) = queued_jobs(context.connection)
    run_task(make_context(), job.func_name, *job.args, answer=lambda request: FakeCompletion("ok"))
    return pq.read_table(output / "part-00000.parquet", read_dictionary=["prompt", "other"])


@pytest.mark.processes
@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_a_value_that_stands_in_every_row_is_decoded_for_a_few_rows_at_a_time(
    tmp_path: Path, encoding: str
) -> None:
    rows, path = 160, tmp_path / "in.parquet"
    values = one_text(rows, MIB)
    options: dict[str, Any] = {"column_encoding": {"text": encoding}, "use_dictionary": False}
    if (
        "RLE" in encoding
    ):  # what a dictionary page of two values looks like when one of them is long
        options = {"dictionary_pagesize_limit": 8 * MIB}
    else:
        values = values.cast(pa.string())
    pq.write_table(pa.table({"text": values}), path, store_schema=False, **options)
    assert path.stat().st_size < MIB
    reading = TableReading(Storage([str(tmp_path)]), str(path))
    batches = [(batch.num_rows, batch.nbytes) for batch in reading.batches]
    reading.close()
    assert sum(count for count, _ in batches) == rows
    assert sum(size for _, size in batches) > rows * MIB
    assert max(size for _, size in batches) < 2 * GROUP_BYTES


@pytest.mark.parametrize(
    ("value", "says"),
    [(pa.nulls(1, pa.binary(100 * MIB)), "took more than"), (["x" * (80 * MIB)], "shorter values")],
)
def test_a_page_beyond_the_limit_fails_its_shard_by_name_and_lets_go_of_all(
    make_context: MakeContext, tmp_path: Path, value: Any, says: str
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.table({"prompt": ["a"], "other": value}), path, compression="zstd", use_dictionary=False
    )
    assert path.stat().st_size < MIB
    context = replace(make_context(), shard_bytes=ShardBytes(16 * MIB))
    with pytest.raises(errors.TableNotRead, match=rf"in\.parquet.*{says}"):
        answer_all(lambda: context, path)
    assert context.shard_bytes.held == context.files.num_readers == 0


@pytest.fixture
def kill_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Kills the child that was lent last."""
    lend, lent = CHILDREN.lent, []

    @contextmanager
    def noted() -> Iterator[Any]:
        with lend() as child:
            lent.append(child)
            yield child

    monkeypatch.setattr(CHILDREN, "lent", noted)
    return lambda: os.kill(lent[-1].pid, signal.SIGKILL)


@pytest.mark.processes
def test_a_child_that_is_killed_costs_a_retry_and_no_row(
    tmp_path: Path, kill_child: Callable[[], None]
) -> None:
    path, rows = tmp_path / "in.parquet", 20_000
    pq.write_table(pa.table({"n": range(rows)}), path, row_group_size=3000)
    reading = TableReading(Storage([str(tmp_path)]), str(path), first_group=1)
    batches = reading.batches
    found = next(batches)["n"].to_pylist()
    kill_child()
    found += [n for batch in batches for n in batch["n"].to_pylist()]
    reading.close()
    assert found == list(range(3000, rows))


@pytest.mark.processes
def test_a_file_whose_children_are_killed_one_after_the_other_is_named(
    tmp_path: Path, kill_child: Callable[[], None]
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"n": range(20_000)}), path)
    reading = TableReading(Storage([str(tmp_path)]), str(path))
    kill_child()
    batches = reading.batches
    next(batches)
    kill_child()
    with pytest.raises(
        errors.TableNotRead, match=r"in\.parquet: reading it ended its process with -9"
    ):
        next(batches)


def test_nested_rows_of_ordinary_size_are_read_however_large_their_row_group_is(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows, each = tmp_path / "in.parquet", 1000, 2000
    numbers = pa.array(np.arange(rows * each))
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * each, numbers)
    pq.write_table(pa.table({"prompt": ["a"] * rows, "numbers": lists}), path)
    context = replace(make_context(), shard_bytes=ShardBytes(40 * MIB))
    assert answer_all(lambda: context, path).column("numbers").combine_chunks().equals(lists)


def test_prompts_beyond_what_a_shard_may_hold_fail_it_by_the_name_of_their_column(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"text": [f"{number:07}" + "x" * 100_000 for number in range(200)]})
    pq.write_table(table, path, row_group_size=10)
    context = replace(make_context(), shard_bytes=ShardBytes(16 * MIB))
    found = r"the prompts of column 'text' in the first \d+ rows.*smaller rows_per_shard"
    with pytest.raises(errors.ShardTooLarge, match=found):
        answer_all(lambda: context, path, prompt_column="text")
    assert context.shard_bytes.held == 0


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("kind", "values", "size"),
    [
        ("prompt_column", ["a", "x" * (7 * MIB), "c"], f"{7 * MIB} bytes"),
        ("messages_column", [CHAT, CHAT * 100_000, CHAT], "300000 values"),
    ],
    ids=["a text", "a chat"],
)
def test_a_value_that_no_prompt_can_hold_is_its_rows_error_and_names_the_column(
    make_context: MakeContext, tmp_path: Path, kind: str, values: list[Any], size: str
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"it": values}), path)
    output = answer_all(make_context, path, **{kind: "it"})
    assert output.column("completion").to_pylist() == ["ok", None, "ok"]
    assert output.column("error")[1].as_py().startswith(f"column 'it' has a value of {size}")


def submit_two_shards(context: JobContext, folder: Path, rows_per_shard: int) -> None:
    """Plan a run of two shards, of prompts of 900 KB each."""
    path = folder / "in.parquet"
    table = pa.table(
        {"prompt": [f"{number:07}" + "x" * 900_000 for number in range(2 * rows_per_shard)]}
    )
    pq.write_table(table, path, row_group_size=1)
    score_parquet(context, str(path), str(folder / "out"), rows_per_shard=rows_per_shard)


def test_a_shard_waits_while_the_open_ones_hold_half_of_what_one_may(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    submit_two_shards(make_context(), tmp_path, rows_per_shard=10)
    context = replace(make_context(), shard_bytes=ShardBytes(20 * MIB))
    (run, plan, first), (_, _, second) = (job.args for job in queued_jobs(redis))
    works = [ShardWork.open(context, run, plan, first)]
    held = context.shard_bytes.held
    context.shard_bytes.hold(context.shard_bytes.limit // 2 - held)
    with pytest.raises(NoRoomYet):
        ShardWork.open(context, run, plan, second)
    for _ in works[0].requests():  # which the engine holds from here on
        pass
    works.append(ShardWork.open(context, run, plan, second))
    for work in works:
        work.close()
    assert context.shard_bytes.held == context.shard_bytes.limit // 2 - held


def test_shards_that_open_together_hold_no_more_prompts_than_one_may(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    submit_two_shards(make_context(), tmp_path, rows_per_shard=12)
    context = replace(make_context(), shard_bytes=(room := ShardBytes(16 * MIB)))
    run, plan, shard = queued_jobs(redis)[0].args
    room.hold(7 * MIB)  # by a shard that is being opened: there is room to begin
    with pytest.raises(NoRoomYet):
        ShardWork.open(context, run, plan, shard)
    assert room.held == 7 * MIB
    room.let_go(7 * MIB)
    ShardWork.open(context, run, plan, shard).close()
    assert room.held == context.files.num_readers == 0


def test_one_reader_more_than_there_is_room_for_waits(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    submit_two_shards(make_context(), tmp_path, rows_per_shard=2)
    context = make_context()
    run, plan, shard = queued_jobs(redis)[0].args
    with ExitStack() as others:
        for number in range(MAX_READERS):
            others.enter_context(context.files.reader((number,), None, Unread))
        with pytest.raises(NoRoomYet):
            ShardWork.open(context, run, plan, shard)
        assert context.files.num_readers == MAX_READERS
    ShardWork.open(context, run, plan, shard).close()
    assert context.files.num_readers == 0


class Unread:
    """A reader that nobody reads."""

    next_row = 0

    def reaches(self, shard: Any) -> bool:
        return False

    def close(self) -> None:
        pass


def test_readers_that_nobody_uses_make_room_for_others(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    names = [f"{number}" for number in range(MAX_READERS + 1)]
    for name in names:
        pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / f"{name}.parquet")
        score_parquet(
            make_context(), str(tmp_path / f"{name}.parquet"), str(tmp_path / f"out-{name}")
        )
    context = make_context()
    works = [ShardWork.open(context, *job.args) for job in queued_jobs(redis)]
    assert context.files.num_readers == MAX_READERS
    for work in works:
        work.close()
    assert context.files.num_readers == 0
