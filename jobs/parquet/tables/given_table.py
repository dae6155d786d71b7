"""Writes a table that is in memory (pandas, polars, Arrow) as a file that workers read."""

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b, file_digest
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InvalidJob, wrong_value_error

#: The rows of a row group. Reading begins with a row group, so fewer rows than this are skipped before a shard.
GROUP_ROWS = 10_000

#: Tests for types that pyarrow's Parquet files do not have, and the types that take their place.
_VIEWS: dict[Callable[[pa.DataType], bool], pa.DataType] = {
    pa.types.is_string_view: pa.large_string(),
    pa.types.is_binary_view: pa.large_binary(),
}


def write_table_file(source: Any, folder: str) -> str:
    """Write a table into a folder as Parquet; return the file's path. Raises InvalidJob.

    The file is named by its contents, so that a table that is submitted again resumes its run.
    """
    table = _arrow_table(source)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f"_tmp.{uuid4().hex}.parquet.tmp")
    try:
        try:
            pq.write_table(table, temporary, row_group_size=GROUP_ROWS)
        except (pa.ArrowException, TypeError) as error:
            raise InvalidJob(
                f"the table cannot be written as Parquet: {str(error)[:200]}"
            ) from error
        with open(temporary, "rb") as file:
            digest = file_digest(file, lambda: blake2b(digest_size=8))
        path = os.path.join(folder, f"{digest.hexdigest()}.parquet")
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):  # the file has its final name already
            os.unlink(temporary)
    return path


def _arrow_table(source: Any) -> pa.Table:
    """Return a table of any known library as an Arrow table with types that Parquet has. Raises InvalidJob."""
    try:
        table = _as_table(source)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidJob(
            f"the table has no form in Arrow: {_reason(source, error)}: convert, rename or leave out such columns"
        ) from error
    for number, field in enumerate(table.schema):
        for is_view, plain_type in _VIEWS.items():
            if is_view(field.type):
                column = table.column(number).cast(plain_type)
                table = table.set_column(number, field.with_type(plain_type), column)
    return table


def _reason(source: Any, error: Exception) -> str:
    """Return why a table has no form in Arrow.

    The errors of polars do not name the column. So each column is tried by itself.
    """
    text = str(error)[:200]
    if type(source).__module__.partition(".")[0] != "polars":
        return text
    for name in source.columns:
        try:
            _as_table(source.select(name))
        except (pa.ArrowException, TypeError, ValueError) as column_error:
            return f"column {name!r} of type {source.schema[name]}: {str(column_error)[:200]}"
    return text


def _as_table(source: Any) -> pa.Table:
    """Return a table as an Arrow table, which may have types that Parquet lacks.

    Raises InvalidJob, or pyarrow's errors.
    """
    package = type(source).__module__.partition(".")[0]
    if package in ("pandas", "polars") and type(source).__name__ == "Series":
        raise InvalidJob("a Series is a column, not a table: give series.to_frame()")
    if package == "pandas" and hasattr(source, "columns"):
        return pa.Table.from_pandas(source)
    # `to_arrow` of a polars DataFrame gives plain columns of text, not columns of views.
    if package == "polars" and hasattr(source, "to_arrow"):
        source = source.to_arrow()
    # Only a LazyFrame has `collect`.
    if package == "polars" and hasattr(source, "collect"):
        raise InvalidJob(
            "a LazyFrame is no table yet: give frame.collect(), or the paths of its files"
        )
    if package == "datasets" and hasattr(source, "with_format"):
        source = source.with_format("arrow")[:]
    if hasattr(source, "__arrow_c_stream__"):
        return pa.table(source)
    raise wrong_value_error(
        "input",
        type(source).__name__,
        "paths, a pandas or polars DataFrame, a DuckDB relation, a Dataset of Hugging Face's, or an Arrow table",
    )
