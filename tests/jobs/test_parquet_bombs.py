"""Small files that stand for gigabytes are read in small batches, or refused by the name of a column."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from jobs.context.shard_bytes import NoRoomYet, ShardBytes
from jobs.parquet.pages import chunk_size, leaves
from jobs.parquet.row_bounds import BATCH_BYTES
from jobs.parquet.shard_work import ShardWork
from tests.jobs.answering import FakeCompletion, queued_jobs, run_task, score_parquet

MakeContext = Callable[[], JobContext]

MIB = 1 << 20


#: Every pool that was counted in: what came from one may go back to it at any later time.
POOLS: list[pa.MemoryPool] = []


@contextmanager
def counted() -> Iterator[pa.MemoryPool]:
    """A pool for what pyarrow allocates in the body; it knows the most that it held at a time."""
    before = pa.default_memory_pool()
    POOLS.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(POOLS[-1])
    try:
        yield POOLS[-1]
    finally:
        pa.set_memory_pool(before)


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


@pytest.mark.parametrize("column", ["prompt", "other"])
@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_a_value_that_stands_in_every_row_is_decoded_for_a_few_rows_at_a_time(
    make_context: MakeContext, tmp_path: Path, column: str, encoding: str
) -> None:
    rows, path = 160, tmp_path / "in.parquet"
    values = one_text(rows, MIB).cast(pa.string())
    table = pa.table({column: values, **({} if column == "prompt" else {"prompt": ["a"] * rows})})
    del values
    options: dict[str, Any] = {"column_encoding": {column: encoding}, "use_dictionary": False}
    # The first way is what a dictionary page of two values looks like when one of them is long.
    pq.write_table(table, path, **({"dictionary_pagesize_limit": 8 * MIB} if "RLE" in encoding else options))
    del table
    assert path.stat().st_size < MIB
    with counted() as pool:
        output = answer_all(make_context, path, rows_per_shard=rows)
    assert pool.max_memory() < 4 * BATCH_BYTES < rows * MIB
    assert output.num_rows == rows
    assert output.column("completion").to_pylist() == ["ok"] * rows


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        pytest.param(1, pa.binary(80 * MIB), id="values of fixed size are taken for nulls too"),
        pytest.param(20_000_000, pa.int64(), id="one row has millions of nulls"),
    ],
)
def test_nulls_that_stand_for_hundreds_of_megabytes_are_refused_before_they_are_decoded(
    make_context: MakeContext, tmp_path: Path, values: int, type_: pa.DataType
) -> None:
    path = tmp_path / "in.parquet"
    nulls = pa.nulls(values, type_)
    column = nulls if values == 1 else pa.ListArray.from_arrays([0, values], nulls)
    pq.write_table(pa.table({"prompt": ["a"], "other": column}), path, compression="zstd")
    del nulls, column
    refused(make_context(), path, "other")


def test_a_page_beyond_the_limit_is_refused_by_the_name_of_its_column(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"prompt": ["a"], "other": ["x" * (257 * MIB)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    del table
    assert path.stat().st_size < MIB
    assert "shorten it, or leave it out" in str(refused(make_context(), path, "other"))


def refused(context: JobContext, path: Path, column: str) -> errors.ShardTooLarge:
    """Check that a file's shard fails with a column's name before much is decoded, and lets go of all."""
    score_parquet(context, str(path), str(path.parent / "out"))
    (job,) = queued_jobs(context.connection)
    with counted() as pool, pytest.raises(errors.ShardTooLarge, match="MAX_SHARD_BYTES") as caught:
        run_task(context, job.func_name, *job.args)
    assert f"column '{column}" in str(caught.value)
    assert pool.max_memory() < BATCH_BYTES
    assert context.shard_bytes.held == 0
    return caught.value


def test_rows_that_go_over_many_pages_are_refused_when_their_pages_take_too_much(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows, each = tmp_path / "in.parquet", 40, 100_000
    lists = pa.ListArray.from_arrays([0] * rows + [rows * each], pa.nulls(rows * each, pa.int32()))
    table = pa.table({"prompt": ["a"] * rows, "other": lists})
    pq.write_table(table, path, write_batch_size=1000, data_page_size=1, max_rows_per_page=1000)
    context = replace(make_context(), shard_bytes=ShardBytes(40 * MIB))
    with pytest.raises(errors.ShardTooLarge, match=r"one row of column 'other\.list\.element'"):
        answer_all(lambda: context, path)


def test_nested_rows_of_ordinary_size_are_read_however_large_their_row_group_is(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows, each = tmp_path / "in.parquet", 1000, 2000
    numbers = pa.array(np.arange(rows * each))
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * each, numbers)
    pq.write_table(pa.table({"prompt": ["a"] * rows, "numbers": lists}), path)
    context = replace(make_context(), shard_bytes=ShardBytes(40 * MIB))
    assert answer_all(lambda: context, path).column("numbers").combine_chunks().equals(lists)


@pytest.mark.parametrize("column", ["prompt", "other"])
@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_one_long_value_among_short_ones_counts_as_one(
    make_context: MakeContext, tmp_path: Path, column: str, encoding: str
) -> None:
    path, rows = tmp_path / "in.parquet", 5000
    texts = [f"text {number}" for number in range(rows)]
    table = pa.table({"prompt": texts}).append_column("other", [texts])
    place = table.schema.get_field_index(column)
    table = table.set_column(place, column, pa.array([*texts[:-1], "x" * 100_000]))
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {column: encoding}}
    pq.write_table(table, path, **({} if "RLE" in encoding else options))
    context = replace(make_context(), shard_bytes=ShardBytes(16 * MIB))
    output = answer_all(lambda: context, path, rows_per_shard=rows)
    assert output.column(column)[-1].as_py() == "x" * 100_000
    assert output.column("completion").null_count == 0


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_chats_with_one_long_message_among_thousands_are_read(
    make_context: MakeContext, tmp_path: Path, version: str
) -> None:
    path, rows = tmp_path / "in.parquet", 3000
    chats = [
        [{"role": "user", "content": f"question {row}"}, {"role": "user", "content": f"and {row % 7}"}]
        for row in range(rows)
    ]
    chats[1000][0]["content"] = "x" * 150_000
    pq.write_table(pa.table({"messages": chats}), path, data_page_version=version)
    context = replace(make_context(), shard_bytes=ShardBytes(32 * MIB))
    output = answer_all(lambda: context, path, messages_column="messages", rows_per_shard=rows)
    assert output.column("messages").to_pylist() == chats
    assert output.column("completion").null_count == 0


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("entries", [1, 2, 3, 900])
def test_the_values_of_a_list_are_sized_up_by_the_entries_that_they_name(
    tmp_path: Path, codec: str, version: str, entries: int
) -> None:
    random = np.random.default_rng(entries)
    words = [f"{number}" * 10 for number in range(entries - 1)] + ["x" * 20_000]
    lists: list[list[str | None] | None] = [
        None if row % 50 == 0 else [*(words[i] for i in random.integers(entries, size=row % 9)), None]
        for row in range(4000)
    ]
    lists[7] = [words[0]] * 5000  # a run of one reference
    path = tmp_path / "in.parquet"
    table = pa.table({"words": pa.array(lists, pa.list_(pa.string()))})
    pq.write_table(table, path, compression=codec, data_page_version=version)
    size = sum(len(word) for each in lists if each for word in each if word)
    with pq.ParquetFile(path) as file, pa.OSFile(str(path)) as source:
        chunk = file.metadata.row_group(0).column(0)
        found = chunk_size(str(path), source, leaves(file.schema)[0], chunk)
    assert size + 12 * chunk.num_values <= found.nested_bytes
    if entries > 2:  # where the longest stands in most places, or nothing else does, no better is known
        assert found.nested_bytes <= 1.1 * size + 13 * chunk.num_values + 9 * 20_000 * len(found.pages)


def test_a_file_of_long_documents_as_pandas_writes_it_is_read(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows = tmp_path / "in.parquet", 2000
    texts = [np.random.default_rng(number).bytes(4000).hex() for number in range(rows)]
    pq.write_table(pa.table({"prompt": texts}), path)
    context = replace(make_context(), shard_bytes=ShardBytes(20 * MIB))
    assert answer_all(lambda: context, path, rows_per_shard=rows).num_rows == rows


def test_lists_of_words_from_a_vocabulary_take_what_the_words_do(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows = tmp_path / "in.parquet", 3000
    tags = [[f"tag number {(row + place) % 900}" for place in range(10)] for row in range(rows)]
    pq.write_table(pa.table({"prompt": ["a"] * rows, "tags": tags}), path)
    context = replace(make_context(), shard_bytes=ShardBytes(16 * MIB))
    assert answer_all(lambda: context, path, rows_per_shard=rows).column("tags").to_pylist() == tags


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


def test_pages_beyond_the_limit_are_refused_with_how_to_write_smaller_ones(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table(
        {"prompt": ["a"] * 1000, "other": [f"{number:07}" + "x" * 20_000 for number in range(1000)]}
    )
    context = replace(make_context(), shard_bytes=ShardBytes(16 * MIB))
    pq.write_table(table, path)
    with pytest.raises(errors.ShardTooLarge, match=r"pages of \d+ bytes.*'other'.*smaller row_group_size"):
        answer_all(lambda: context, path)
    context.connection.flushall()
    shutil.rmtree(tmp_path / "out")
    pq.write_table(table, path, row_group_size=100)
    assert answer_all(lambda: context, path).num_rows == 1000


def test_a_value_that_no_prompt_can_hold_is_its_rows_error_and_names_the_column(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "x" * (7 * MIB), "c"]}), path)
    output = answer_all(make_context, path)
    assert output.column("completion").to_pylist() == ["ok", None, "ok"]
    assert output.column("error")[1].as_py().startswith(f"column 'prompt' has a value of {7 * MIB} bytes")


def test_a_chat_of_too_many_messages_is_its_rows_error_and_names_the_column(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    chat = [{"role": "user", "content": "a"}]
    pq.write_table(pa.table({"chat": [chat, chat * 100_000]}), path)
    output = answer_all(make_context, path, messages_column="chat")
    assert output.column("completion").to_pylist() == ["ok", None]
    assert output.column("error")[1].as_py().startswith("column 'chat' has a value of 300000 values")


def submit_two_shards(context: JobContext, folder: Path, rows_per_shard: int) -> None:
    """Plan a run of two shards, of prompts of 900 KB each."""
    path = folder / "in.parquet"
    table = pa.table({"prompt": [f"{number:07}" + "x" * 900_000 for number in range(2 * rows_per_shard)]})
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
    assert room.held == room.reading == 0


def test_readers_reserve_what_they_read_together_and_the_last_one_waits(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    path, rows = tmp_path / "in.parquet", 160
    table = pa.table({"prompt": one_text(rows, MIB).cast(pa.string())})
    pq.write_table(table, path, dictionary_pagesize_limit=8 * MIB)
    del table
    score_parquet(make_context(), str(path), str(tmp_path / "out"), rows_per_shard=rows)
    context = make_context()
    room = context.shard_bytes
    run, plan, shard = queued_jobs(redis)[0].args
    room.reserve_reading(others := room.limit - 3 * BATCH_BYTES, 0)
    with counted() as pool, pytest.raises(NoRoomYet):
        ShardWork.open(context, run, plan, shard)
    assert pool.max_memory() < BATCH_BYTES
    assert room.reading == others
    room.reserve_reading(-BATCH_BYTES, 0)
    work = ShardWork.open(context, run, plan, shard)
    assert others - BATCH_BYTES < room.reading <= room.limit  # for the next shard of the file
    work.close()
    assert room.reading == others - BATCH_BYTES


def test_readers_that_nobody_uses_make_room_for_others(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        table = pa.table({"prompt": [f"{n:07}" + name * 900_000 for n in range(20)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", use_dictionary=False, data_page_size=32 * MIB)
        score_parquet(make_context(), str(tmp_path / f"{name}.parquet"), str(tmp_path / f"out-{name}"))
    del table
    context = replace(make_context(), shard_bytes=(room := ShardBytes(64 * MIB)))
    works = [ShardWork.open(context, *job.args) for job in queued_jobs(redis)]
    assert 0 < room.reading <= room.limit
    for work in works:
        work.close()
    assert room.reading == 0


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_longest_value_of_a_dictionary_is_known_before_it_is_decoded(
    tmp_path: Path, codec: str, version: str
) -> None:
    path, values = tmp_path / "in.parquet", ["short"] * 5000 + ["x" * 54_321] + [f"{n}" for n in range(5000)]
    pq.write_table(pa.table({"text": values}), path, compression=codec, data_page_version=version)
    with pq.ParquetFile(path) as file, pa.OSFile(str(path)) as source:
        (leaf,) = leaves(file.schema)
        found = chunk_size(str(path), source, leaf, file.metadata.row_group(0).column(0))
    assert found.value_bytes - 54_321 in range(20)


def test_a_footer_of_gigabytes_is_refused_before_it_is_read(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, size = tmp_path / "in.parquet", 3 << 30
    with path.open("wb") as file:  # a hole, but for its ends
        file.write(b"PAR1")
        file.seek(size - 8)
        file.write((2 << 30).to_bytes(4, "little") + b"PAR1")
    with (
        counted() as pool,
        pytest.raises(errors.FooterTooLarge, match="its footer has 2147483648 bytes"),
    ):
        score_parquet(make_context(), str(path), str(tmp_path / "out"))
    assert pool.max_memory() < MIB
