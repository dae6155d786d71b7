"""Headers of Parquet pages as damage or malice leaves them: a named error, whatever stands in a field."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import CorruptParquet
from jobs.parquet.pages import chunk_size, leaves

SIZE, STORED = b"\x15\x02", b"\x15\x02"  # the next field is an i32: 1
DATA_PAGE, PAGE_TYPE_IS_A_STRUCT = b"\x15\x00", b"\x1c\x00"


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(DATA_PAGE + SIZE + STORED + b"\x21\x00", id="its data header is a truth value"),
        pytest.param(DATA_PAGE + b"\x1c\x00" + STORED + b"\x2c\x00\x00", id="its size is a struct"),
        pytest.param(PAGE_TYPE_IS_A_STRUCT + SIZE + STORED + b"\x00", id="its type is a struct"),
        pytest.param(
            DATA_PAGE + SIZE + STORED + b"\x2c\x1c\x00\x1c\x00\x00\x00",
            id="its counts are structs",
        ),
    ],
)
def test_a_field_of_another_type_is_passed_over_as_pyarrow_does(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3]}), path, use_dictionary=False, compression="none")
    with pq.ParquetFile(path) as file:
        leaf, chunk = leaves(file.schema)[0], file.metadata.row_group(0).column(0)
    path.write_bytes(b"\x00" * chunk.data_page_offset + header)
    with pa.OSFile(str(path)) as damaged, pytest.raises(CorruptParquet, match="column 'a' end early"):
        chunk_size(str(path), damaged, leaf, chunk)


@pytest.mark.parametrize("place", [-1, -(2**63), 2**63 - 1])
def test_a_page_outside_its_file_is_told(tmp_path: Path, place: int) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pq.ParquetFile(path) as file:
        leaf = leaves(file.schema)[0]
    chunk = SimpleNamespace(data_page_offset=place, has_dictionary_page=False, num_values=1)
    with pa.OSFile(str(path)) as source, pytest.raises(CorruptParquet, match="outside the file"):
        chunk_size(str(path), source, leaf, chunk)
