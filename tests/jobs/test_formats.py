"""What other tools write is read, and what we write they read: with the types they gave."""

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from jobs.parquet.asks.ask import OUTPUT_FIELDS
from jobs.runs.plans.names import part_name, temporary_name
from tests.jobs.local_runs import Runs

CHAT = [{"role": "user", "content": "hi"}]


def write_with_pandas(path: Path) -> None:
    frame = pd.DataFrame(
        {
            "prompt": pd.Categorical(["a", "b", "a", None]),
            "when": pd.date_range("2024-01-01", periods=4, tz="Europe/Berlin"),
            "count": pd.array([1, None, 3, 4], dtype="Int64"),
        },
        index=pd.Index([10, 20, 30, 40], name="key"),
    )
    frame.to_parquet(path, row_group_size=3)


def write_with_polars(path: Path) -> None:
    frame = pl.DataFrame(
        {
            "prompt": ["a", "b", "a", None],
            "kind": pl.Series(["x", "y", "x", None], dtype=pl.Categorical),
            "nested": [[1, 2], None, [], [3]],
            "took": [datetime.timedelta(seconds=n) for n in range(4)],
            "empty": [None] * 4,
        }
    )
    frame.write_parquet(path, row_group_size=3)


def write_with_duckdb(path: Path) -> None:
    duckdb.sql(
        f"""
        copy (select * from (values ('a', 1.25::decimal(9, 2), {{'x': 1, 'y': ['q']}}, date '2024-02-29'),
                                    ('b', null, null, null), ('a', 0.5, {{'x': 2, 'y': []}}, null),
                                    (null, null, null, null)) as t(prompt, price, record, day))
        to '{path}' (format parquet)
        """
    )


def write_with_pyarrow(path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b", "a", None], pa.large_string()),
            "code": pa.array(["x", None, "y", "x"])
            .dictionary_encode()
            .cast(pa.dictionary(pa.int8(), pa.string())),
            "time": pa.array([1, 2, None, 4], pa.timestamp("ns", tz="UTC")),
            "half": pa.array([1.5, 2, None, 4], pa.float16()),
            "map": pa.array([[("k", 1)], [], None, []], pa.map_(pa.string(), pa.int32())),
            "price": pa.array([decimal.Decimal("1.10"), None, None, None], pa.decimal128(20, 2)),
            "nothing": pa.nulls(4),
            "raw": pa.array([b"\x00", None, b"", b"z"], pa.binary()),
        }
    )
    pq.write_table(table, path, row_group_size=3, compression="zstd")


@pytest.mark.parametrize(
    "write", [write_with_pandas, write_with_polars, write_with_duckdb, write_with_pyarrow]
)
def test_input_columns_come_back_with_their_types_and_values(
    runs: Runs, write: Callable[[Path], None]
) -> None:
    write(runs.source)
    before, after = (
        pq.read_table(runs.source),
        runs.score(sampling={"temperature": 0}, rows_per_shard=3),
    )
    for path in runs.output.glob("*.parquet"):
        assert pq.read_schema(path).equals(pa.schema([*before.schema, *OUTPUT_FIELDS]))
    assert after.select(before.column_names).to_pylist() == before.to_pylist()
    assert after["completion"].to_pylist() == ["A", "B", "A", None]
    assert after["error"].to_pylist() == [None, None, None, "prompt is null"]


def read_with_pandas(folder: str) -> list[str | None]:
    frame = pd.read_parquet(folder)
    assert str(frame["when"].dt.tz) == "Europe/Berlin"
    assert frame.index.tolist() == [10, 20, 30, 40][: len(frame)]
    return [text if isinstance(text, str) else None for text in frame["completion"]]


READERS: list[Callable[[str], list[str | None]]] = [
    read_with_pandas,
    lambda folder: pyarrow.dataset.dataset(folder).to_table()["completion"].to_pylist(),
    lambda folder: pl.read_parquet(f"{folder}/*.parquet")["completion"].to_list(),
    lambda folder: (
        pl.scan_parquet(folder, hidden_file_prefix="_").collect()["completion"].to_list()
    ),
    lambda folder: [
        text for (text,) in duckdb.sql(f"select completion from '{folder}/*.parquet'").fetchall()
    ],
]


@pytest.mark.parametrize(
    "read", READERS, ids=["pandas", "arrow", "polars-glob", "polars-folder", "duckdb"]
)
@pytest.mark.filterwarnings("ignore:The `hidden_file_prefix` parameter")
def test_readers_take_a_folder_of_a_run_that_goes_on_and_of_one_that_ended(
    read: Callable[[str], list[str | None]], runs: Runs
) -> None:
    write_with_pandas(runs.source)
    runs.plan(rows_per_shard=3)
    first, *_ = runs.jobs
    runs.run(first)
    first.delete()
    (runs.output / temporary_name("execution", part_name(1))).write_bytes(b"PAR1")
    assert read(str(runs.output)) == ["A", "B", "A"]
    runs.work()
    assert (runs.output / "_SUCCESS").exists()
    assert read(str(runs.output)) == ["A", "B", "A", None]


def test_chats_written_by_other_tools_are_chats(runs: Runs, tmp_path: Path) -> None:
    pl.DataFrame({"messages": [CHAT, CHAT]}).write_parquet(tmp_path / "polars.parquet")
    duckdb.sql(
        f"copy (select [{{'role': 'user', 'content': 'hi', 'name': null::varchar}}] as messages) "
        f"to '{tmp_path}/duckdb.parquet' (format parquet)"
    )
    pd.DataFrame({"messages": [CHAT]}).to_parquet(tmp_path / "pandas.parquet")
    for tool in ("polars", "duckdb", "pandas"):
        source, output = tmp_path / f"{tool}.parquet", tmp_path / f"out-{tool}"
        runs.plan(source, output, messages_column="messages")
        runs.work()
        assert set(pq.read_table(output)["completion"].to_pylist()) == {str(CHAT).upper()}
