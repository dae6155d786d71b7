"""The audit of runs that two versions have worked on; `python -m ops.upgrade` is the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ops.upgrade.passage import problems_of_rows


def written(output: Path, parts: list[list[int]], error: str | None = None) -> Path:
    for number, ids in enumerate(parts):
        errors = pa.array([error, *[None] * (len(ids) - 1)], pa.string())
        table = pa.table({"id": ids, "error": errors, "completion_tokens": [3] * len(ids)})
        pq.write_table(table, output / f"part-{number:05}.parquet")
    (output / "_manifest.json").write_text(json.dumps({"rows": 6, "errors": 0}))
    return output


def test_a_run_with_each_row_once_is_clean(tmp_path: Path) -> None:
    assert problems_of_rows(written(tmp_path, [[0, 1, 2], [3, 4, 5]]), 6) == []


@pytest.mark.parametrize(
    ("parts", "error", "problem"),
    [
        ([[0, 1, 2], [3, 4]], None, "5 rows, 5 different ones of 6"),
        ([[0, 1, 2], [2, 3, 4, 5]], None, "7 rows, 6 different ones of 6"),
        ([[3, 4, 5], [0, 1, 2]], None, "6 rows, 6 different ones of 6"),
        ([[0, 1, 2], [3, 4, 5]], "out of memory", "rows without an answer"),
    ],
)
def test_rows_that_are_lost_doubled_out_of_order_or_unanswered_are_told(
    tmp_path: Path, parts: list[list[int]], error: str | None, problem: str
) -> None:
    (found,) = problems_of_rows(written(tmp_path, parts, error), 6)
    assert found.startswith(problem)
