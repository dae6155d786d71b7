"""One output file of all rows, written when the last part is there; runs/test_finished.py kills who writes it."""

import csv
import datetime
import decimal
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.errors import PartDamaged
from jobs.parquet.outputs.output_file import write_csv
from jobs.parquet.tables import row_groups
from jobs.runs.output import named_run
from jobs.runs.plans.names import PARTS, part_name
from tests.jobs.local_runs import Runs
from tests.jobs.parquet.test_input_round_trips import read_all

ROWS = 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    table = pa.table({"prompt": [f"p{number}" for number in range(ROWS)], "id": range(ROWS)})
    pq.write_table(
        table.replace_schema_metadata({"own": "kept"}), tmp_path / "in.parquet", row_group_size=2
    )
    return tmp_path / "in.parquet"


@pytest.fixture
def planned(runs: Runs, source: Path) -> Runs:
    """A run of three shards into one file."""
    runs.plan(source, sampling={"temperature": 0}, rows_per_shard=2, single_file=True)
    return runs


def test_readers_of_the_folder_and_of_the_file_find_each_row_once(
    redis: Redis, planned: Runs
) -> None:
    planned.run(planned.jobs[0])
    output = planned.output
    assert not (output / "output.parquet").exists()
    planned.work()
    assert len(pd.read_parquet(output)) == ROWS
    assert pl.read_parquet(f"{output}/*.parquet").height == ROWS
    assert pq.read_schema(output / "output.parquet").metadata == {b"own": b"kept"}
    _, found = named_run(redis, str(output))
    assert found is not None
    assert (found.parts, found.state) == (3, "finished")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "arrow", "parquet"])
def test_each_format_holds_all_columns(
    runs: Runs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 3)
    rows = 7
    table = pa.table(
        {
            "prompt": ['a "b", c\nd', None, "é", "p", "q", "r", "s"],
            "when": pa.array(
                [datetime.datetime(2024, 1, 2, 3, 4, 5)] * rows, pa.timestamp("ns", "UTC")
            ),
            "price": pa.array([decimal.Decimal("1.10")] * rows),
            "tags": [["x", None]] * rows,
            "record": [{"a": 1.5}] * rows,
            "yes": [True] * rows,
            "nan": [float("nan")] * rows,
        }
    )
    pq.write_table(table, runs.source)
    runs.plan(single_file=kind, rows_per_shard=2)
    runs.work()
    path = runs.output / f"output.{kind}"
    names = [
        *table.column_names,
        "completion",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
    ]
    if kind == "parquet":
        back = pq.read_table(path)
        assert back.select(table.column_names).drop(["nan"]).equals(table.drop(["nan"]))
        assert pq.ParquetFile(path).num_row_groups == 2
        return
    if kind == "arrow":
        assert pa.ipc.open_file(path).read_all().num_rows == rows
        assert pl.read_ipc(path).columns[:11] == names
        return
    if kind == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        first = found[0]
        assert (first["tags"], first["record"], first["nan"]) == (["x", None], {"a": 1.5}, None)
        assert pl.read_ndjson(path).height == rows
    else:
        with path.open(newline="") as file:
            found = list(csv.DictReader(file))
        first = found[0]
        assert (first["tags"], first["yes"], first["nan"]) == ('["x", null]', "true", "")
        assert found[1]["prompt"] == ""
    assert list(first)[:11] == names
    assert first["prompt"] == 'a "b", c\nd'
    assert first["completion"] == 'A "B", C\nD'
    assert (first["when"], first["price"]) == ("2024-01-02 03:04:05.000000000Z", "1.10")
    assert [row["completion"] or None for row in found][1:3] == [None, "É"]


_SPECIAL = "a \",;\t\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029\ufeff'\\#=é😀"
NASTY = st.text(
    st.sampled_from(_SPECIAL) | st.characters(codec="utf-8", exclude_characters="\0"), max_size=6
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(NASTY.filter(bool), NASTY.filter(bool)), min_size=1, max_size=4),
    names=st.lists(NASTY.filter(bool) | st.just("sep=;"), min_size=2, max_size=2, unique=True),
)
@example(rows=[("a\rb", "\r"), ("\u2028", "\x85"), ("\r\n", "\n\r")], names=["\r", "\ufeffx"])
def test_texts_in_csv_come_back_in_every_reader(
    runs: Runs, redis: Redis, rows: list[tuple[str, str]], names: list[str]
) -> None:
    table = pa.table(
        {
            name: pa.array(column)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }
    )
    sink = io.BytesIO()
    write_csv(frozenset(), sink, table.schema, iter(table.to_batches()))
    content = sink.getvalue()
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="") as text:
        header, *found = csv.reader(text, strict=True)
    assert [tuple(header), *map(tuple, found)] == [tuple(names), *rows]
    lines = content.decode().splitlines(
        keepends=True
    )  # at every character that Unicode calls a line's end
    assert list(map(tuple, csv.reader(lines, strict=True))) == [tuple(names), *rows]
    frame = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, na_filter=False)
    assert list(frame.columns) == names
    assert list(frame.itertuples(index=False, name=None)) == rows
    options = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
    )
    back = pa_csv.read_csv(
        io.BytesIO(content),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=options,
    )
    assert back.column_names == names
    assert [tuple(row.values()) for row in back.to_pylist()] == rows
    path = runs.source.with_suffix(".csv")
    path.write_bytes(content)
    ours = read_all(path, "csv")
    assert [tuple(f"{row[name]}" for name in names) for row in ours] == rows


def test_a_row_of_one_null_is_a_row_of_csv_and_a_line_of_json_has_no_other_end(runs: Runs) -> None:
    table = pa.table({"text": ["a", None, "b\u2028c\x85d"]})
    sink = io.BytesIO()
    write_csv(frozenset(), sink, table.schema, iter(table.to_batches()))
    assert sink.getvalue().decode() == 'text\na\n""\n"b\u2028c\x85d"\n'
    runs.source.unlink(missing_ok=True)
    pq.write_table(table.rename_columns(["prompt"]), runs.source)
    runs.plan(single_file="jsonl")
    runs.work()
    lines = (runs.output / "output.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == table["text"].to_pylist()


def test_csv_is_written_batch_by_batch_so_that_a_large_run_fits_into_memory() -> None:
    batch = pa.record_batch({"id": [1]})
    sink = io.BytesIO()
    sizes = []

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(3):
            sizes.append(len(sink.getvalue()))
            yield batch

    write_csv(frozenset(), sink, batch.schema, batches())
    assert sizes == [3, 5, 7]


def test_a_part_whose_pages_are_damaged_is_named_and_leaves_no_mark(planned: Runs) -> None:
    first, second, third = planned.jobs
    planned.run(first)
    planned.run(second)
    part = planned.output / PARTS / part_name(0)
    content = bytearray(part.read_bytes())
    content[4:200] = b"\xff" * 196
    part.write_bytes(content)
    with pytest.raises(PartDamaged, match=part_name(0)):
        planned.run(third)
    assert not (planned.output / "_SUCCESS").exists()
