"""`tokenmill errors --export`: failed rows in a file of their own, to be mended."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.answering import FakeCompletion, shout
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

CSV = 'id;prompt\n1;"two\nlines"\n\n2\n3;"a ""quoted"" one"\n4;\n5;"never closed\n6;fine\n'
CSV_LINES = {1: "2", 3: "4;", 4: '5;"never closed'}
JSONL = '{"prompt": "a"}\n\n{"prompt": \n{"prompt": null}\n[1]\n{"prompt": "ü"}'
JSONL_LINES = {1: '{"prompt": ', 2: '{"prompt": null}', 3: "[1]"}

Write = Callable[[Path, str], object]


def compressed(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize(
    ("name", "text", "write", "options", "lines"),
    [
        ("in.csv", CSV, Path.write_text, {"delimiter": ";"}, CSV_LINES),
        ("in.csv.gz", CSV, compressed, {"delimiter": ";"}, CSV_LINES),
        ("in.jsonl", JSONL, Path.write_text, {}, JSONL_LINES),
    ],
)
def test_failed_rows_have_their_columns_reason_and_line(
    runs: Runs,
    invoke: Invoke,
    tmp_path: Path,
    name: str,
    text: str,
    write: Write,
    options: dict[str, Any],
    lines: dict[int, str],
) -> None:
    source = tmp_path / name
    write(source, text)
    runs.plan(source, rows_per_shard=2, **options)
    runs.work()
    file = tmp_path / "failed.parquet"
    shown = invoke("errors", runs.output, "--export", file)
    assert shown.stdout == f"{len(lines)} rows in {file}\n", shown.output
    failed = pq.read_table(file).to_pylist()
    assert {row["row"]: row["line"] for row in failed} == lines
    assert {row["file"] for row in failed} == {str(source)}
    assert [row["file_row"] for row in failed] == list(lines)
    assert all(row["reason"] for row in failed)
    assert "completion" not in failed[0]
    assert invoke("errors", runs.output, "--export", file).exit_code == 1, "it is there already"
    # A file that has changed since has other lines.
    write(source, text + "\n\n")
    other = tmp_path / "other.jsonl"
    assert invoke("errors", runs.output, "--export", other).exit_code == 0
    assert [json.loads(line)["line"] for line in other.read_text().splitlines()] == [None] * 3


def test_rows_of_parquet_keep_their_types_and_cut_ones_come_on_wish(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    def answer(request: Any) -> FakeCompletion:
        if request.prompt == "cut":
            return FakeCompletion("c", 0, [1], "length", 1)
        return shout(request)

    runs.write(["a", None, "cut"], reason=["x", "y", "z"], values=[[1], [2, 3], []])
    runs.score(answer=answer, drop=["id"])
    for options, rows in (((), [1]), (("--cut",), [1, 2])):
        file = tmp_path / f"{len(rows)}.parquet"
        assert invoke("errors", runs.output, "--export", file, *options).exit_code == 0
        table = pq.read_table(file)
        assert table["row"].to_pylist() == rows
        names = ["prompt", "reason", "values", "row", "file", "file_row", "reason_", "line"]
        assert table.column_names == names
        assert table.schema.field("values").type == pa.list_(pa.int64())
    assert table["reason_"][1].as_py() == "the answer was cut at its limit of tokens"
    csv = tmp_path / "failed.csv"
    assert invoke("errors", runs.output, "--export", csv).exit_code == 0
    assert pd.read_csv(csv)["reason"].to_list() == ["y"]
    for options in (("--export", "a.xlsx"), ("--export", "a.csv", "--retry", "new")):
        assert invoke("errors", runs.output, *options).exit_code > 0


def test_failed_rows_come_in_the_dialect_of_a_european_excel(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes("prompt;größe;sum\na;1,5;7,00\n;2;1.234,56\n".encode("cp1252"))
    dialect = {"delimiter": ";", "decimal": ",", "encoding": "cp1252"}
    runs.plan(source, sampling_columns={"temperature": "größe"}, **dialect)
    runs.work()
    csv = tmp_path / "failed.csv"
    assert invoke("errors", runs.output, "--export", csv).exit_code == 0
    (row,) = pd.read_csv(csv, sep=";", decimal=",", encoding="cp1252").to_dict("records")
    assert (row["größe"], row["sum"], row["file_row"]) == (2.0, 1234.56, 1)
    assert row["line"] == ";2;1.234,56"
    assert "prompt" in row["reason"]
    _header, line = csv.read_text("cp1252").splitlines()
    assert line.startswith(";2,0;1234,56;1;")


def test_failed_lines_of_a_batch_come_as_they_are(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    bad = {**good, "custom_id": "b", "body": {"prompt": "x", "model": "gpt-4o"}}
    source = tmp_path / "in.jsonl"
    source.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    runs.plan(source, input_format="openai-batch")
    runs.work()
    file = tmp_path / "failed.jsonl"
    assert invoke("errors", runs.output, "--export", file).exit_code == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert json.loads(row["line"]) == bad
    assert row["custom_id"] == "b"


def test_a_run_without_failed_rows_writes_no_file(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    runs.write(["a"])
    runs.score()
    shown = invoke("errors", runs.output, "--export", tmp_path / "failed.parquet")
    assert shown.stdout == "no row has an error\n"
    assert not (tmp_path / "failed.parquet").exists()


def test_a_single_row_is_counted_in_the_singular(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    runs.write([None, "a"])
    runs.score()
    file = tmp_path / "failed.csv"
    assert "1 row with an error\n" in invoke("errors", runs.output).stdout
    assert invoke("errors", runs.output, "--export", file).stdout == f"1 row in {file}\n"


@pytest.mark.parametrize("options", [(), ("--cut", "--max-tokens", "512")], ids=["failed", "cut"])
def test_a_run_without_failed_rows_is_not_submitted_again(
    runs: Runs, invoke: Invoke, tmp_path: Path, options: tuple[str, ...]
) -> None:
    runs.write(["a"])
    runs.score()
    num_jobs = len(runs.jobs)
    shown = invoke("errors", runs.output, "--retry", tmp_path / "new", *options)
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert shown.stderr == "no row has an error\n"
    assert len(runs.jobs) == num_jobs
    assert not (tmp_path / "new").exists()


def test_a_run_whose_part_is_gone_is_submitted_again(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    runs.write(["a", "b"])
    runs.score(rows_per_shard=1)
    next(runs.output.glob("*.parquet")).unlink()
    num_jobs = len(runs.jobs)
    shown = invoke("errors", runs.output, "--retry", tmp_path / "new")
    assert shown.exit_code == 0, shown.output
    assert len(runs.jobs) == num_jobs + 1
