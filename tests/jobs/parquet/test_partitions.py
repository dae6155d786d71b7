"""Partitioned folders are read whole and keep their columns; other nested folders are not guessed at."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import errors
from tests.jobs.local_runs import Runs

Score = Callable[..., pa.Table]
ROWS = pd.DataFrame(
    {
        "prompt": list("abcde"),
        "year": [2023, 2024, 2024, 2023, 2025],
        "lang": ["de", "a b/é", None, "=", "42"],
    }
)


def with_pandas(folder: Path) -> None:
    ROWS.to_parquet(folder, partition_cols=["year", "lang"])


def with_duckdb(folder: Path) -> None:
    with duckdb.connect() as connection:
        connection.register("rows", ROWS)
        connection.execute(f"COPY rows TO '{folder}' (FORMAT parquet, PARTITION_BY (year, lang))")


def with_polars(folder: Path) -> None:
    pl.from_pandas(ROWS).write_parquet(
        folder, partition_by=["year", "lang"]
    )  # the files keep the columns too


def write(path: Path, prompt: str = "a", **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": [prompt], **columns}), path)
    return path


@pytest.fixture
def score(runs: Runs, tmp_path: Path) -> Score:
    """Score an input to its end; return the output."""

    def run(source: object, output: str = "out", **options: Any) -> pa.Table:
        runs.plan(source, tmp_path / output, **options)
        runs.work()
        assert (tmp_path / output / "_SUCCESS").exists()
        return pa.concat_tables(
            pq.read_table(part) for part in sorted((tmp_path / output).glob("part-*"))
        )

    return run


@pytest.mark.parametrize("write_folder", [with_pandas, with_duckdb, with_polars])
def test_a_partitioned_folder_keeps_its_columns_typed(
    score: Score, tmp_path: Path, write_folder: Callable[[Path], None]
) -> None:
    write_folder(tmp_path / "in")
    table = score(str(tmp_path / "in"))
    assert table.schema.field("year").type == pa.int64()
    assert table.schema.field("lang").type in (pa.string(), pa.large_string())
    rows = [(row["completion"], row["year"], row["lang"]) for row in table.to_pylist()]
    assert sorted(rows) == [
        *(("A", 2023, "de"), ("B", 2024, "a b/é"), ("C", 2024, None)),
        *(("D", 2023, "="), ("E", 2025, "42")),
    ]


def test_a_template_may_name_columns_of_folders_and_files(score: Score, tmp_path: Path) -> None:
    for year in (1, 2):
        write(tmp_path / "in" / f"year={year}" / "x.parquet")
    table = score(str(tmp_path / "in"), template="{year}-{prompt}", filename_column="file")
    assert table["completion"].to_pylist() == ["1-A", "2-A"]
    table = score(str(tmp_path / "in"), output="by file", template="{file}", filename_column="file")
    assert table["completion"].to_pylist() == [path.upper() for path in table["file"].to_pylist()]


def test_the_filename_column_holds_each_rows_file(score: Score, tmp_path: Path) -> None:
    files = [str(write(tmp_path / "in" / f"{name}.parquet", name)) for name in "ab"]
    table = score(str(tmp_path / "in"), filename_column="file", rows_per_shard=1)
    assert table.column_names[:2] == ["prompt", "file"]
    assert table["file"].to_pylist() == files
    for taken in ("prompt", "completion"):
        with pytest.raises(errors.ColumnConflict, match=taken):
            score(str(tmp_path / "in"), output="other", filename_column=taken)


def test_hidden_names_are_passed_by_at_every_level(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in" / "k=1" / "x.parquet", "a")
    for hidden in ("_delta_log/x.parquet", "k=1/.x.parquet", "k=1/_x.parquet", ".k=2/x.parquet"):
        write(tmp_path / "in" / hidden, "hidden")
    assert score(str(tmp_path / "in"))["prompt"].to_pylist() == ["a"]
    assert score(f"{tmp_path}/in/**/*.parquet", "globbed")["prompt"].to_pylist() == ["a"]
    assert score(f"{tmp_path}/in/_delta_log/*.parquet", "named")["prompt"].to_pylist() == ["hidden"]


@pytest.mark.parametrize(
    "named", [["lang=de/x.parquet", "lang=en/x.parquet"], ["lang=de", "lang=en"]]
)
def test_folders_and_files_that_a_shell_found_have_the_columns_of_the_glob(
    score: Score, tmp_path: Path, named: list[str]
) -> None:
    for lang in ("de", "en"):
        write(tmp_path / "run=7" / f"lang={lang}" / "x.parquet")
    table = score([str(tmp_path / "run=7" / each) for each in named])
    assert table["lang"].to_pylist() == ["de", "en"]
    assert "run" not in table.column_names  # above all of them: it tells none from another
    for number, pattern in enumerate(("lang=*", "lang=*/", "*/*.parquet")):
        assert score(f"{tmp_path}/run=7/{pattern}", f"{number}")["lang"].to_pylist() == ["de", "en"]


def test_a_folder_that_a_glob_matches_is_read_and_not_left_out_in_silence(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path / "in" / "2023.parquet" / "part-0.parquet", "a")  # as Spark writes a table
    write(tmp_path / "in" / "2024.parquet", "b")
    assert score(f"{tmp_path}/in/*.parquet")["prompt"].to_pylist() == ["a", "b"]
    assert score(f"{tmp_path}/in/**/*.parquet", "deep")["prompt"].to_pylist() == ["a", "b"]
    (tmp_path / "in" / "2025.parquet").symlink_to("nowhere")
    with pytest.raises(errors.InputNotFound, match="nowhere"):
        score(f"{tmp_path}/in/*.parquet", "broken")


def test_a_name_that_is_not_utf8_matters_only_where_it_is_input(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path / "in" / "x.parquet")
    Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/\xff.txt")).touch()
    assert len(score(str(tmp_path / "in"))) == 1
    os.rename(tmp_path / "in" / "x.parquet", os.fsencode(tmp_path / "in") + b"/\xff.parquet")
    with pytest.raises(errors.InvalidValue, match="not UTF-8"):
        score(str(tmp_path / "in"), "other")


def test_files_in_folders_of_plain_names_are_not_left_out_in_silence(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path / "in" / "eu" / "deep" / "x.parquet", "b")
    write(tmp_path / "in" / "a.parquet", "a")
    with pytest.raises(
        errors.NestedFolders, match=r"such as eu/deep/x\.parquet: name '.*/in/\*\*/\*\.parquet'"
    ):
        score(str(tmp_path / "in"))
    assert sorted(score(f"{tmp_path}/in/**/*.parquet")["prompt"].to_pylist()) == ["a", "b"]


def test_folders_that_do_not_agree_on_their_keys_are_refused(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in" / "year=1" / "x.parquet")
    write(tmp_path / "in" / "year=1" / "lang=de" / "x.parquet")
    with pytest.raises(errors.SchemaMismatch, match="lang"):
        score(str(tmp_path / "in"))


def test_a_link_that_leads_back_ends_the_search(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in" / "k=1" / "x.parquet")
    (tmp_path / "in" / "k=2").symlink_to(tmp_path / "in")
    assert len(score(str(tmp_path / "in"))) == 1


@pytest.mark.parametrize("values", [["02139", "90210"], ["-0", "1"], ["1", "01"], ["00", "0"]])
def test_a_folders_value_whose_text_would_not_come_back_stays_text(
    score: Score, tmp_path: Path, values: list[str]
) -> None:
    for value in values:
        write(tmp_path / "in" / f"zip={value}" / "x.parquet")
    table = score(str(tmp_path / "in"), template="{zip}")
    assert table["zip"].to_pylist() == sorted(values)
    assert table["completion"].to_pylist() == sorted(values)
