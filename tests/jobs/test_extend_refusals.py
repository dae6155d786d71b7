"""`--extend`: what does not show that a run's rows stayed as they were is refused by name."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from jobs import errors
from jobs.parquet import inputs
from jobs.runs.refusals import CannotExtend, InputBeingWritten
from tests.jobs.growing_runs import GrowingRun


def test_a_file_that_is_written_to_all_the_time_is_refused_before_it_is_planned(
    growing: GrowingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = inputs.scan

    def meanwhile(*args: Any) -> Any:
        growing.lines("a.jsonl", 2)
        return scan(*args)

    growing.lines("a.jsonl", 1)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "scan", meanwhile)
        with pytest.raises(InputBeingWritten, match=r"a\.jsonl is being written to"):
            growing.submit()
    growing.run()
    growing.check(1, 2, 2, 2)


def test_what_does_not_show_that_its_rows_stayed_is_refused_by_name(growing: GrowingRun) -> None:
    growing.parquet("a.parquet", 1, 2, 3)
    growing.run()
    growing.parquet("a.parquet", 1, 2, 3, 4)
    with pytest.raises(CannotExtend, match="put the new rows into a file of their own"):
        growing.submit(extend=True)
    growing.parquet("a.parquet", 1, 2)
    with pytest.raises(errors.InputChanged):
        growing.submit(extend=True)
    growing.parquet("a.parquet", 1, 2, 3)
    other = growing.parquet("b.parquet", 4)
    with pytest.raises(errors.OutputHoldsAnotherRun, match="different sampling"):
        growing.submit(extend=True, sampling={"seed": 2})
    with pytest.raises(errors.InvalidJob, match="limit is 9"):
        growing.submit(extend=True, limit=9)
    other.unlink()
    assert growing.submit()["already_finished"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("p1", "p0") + '{"prompt": "p9", "id": 9}\n', "do not show"),
        (lambda text: text + '{"prompt": "p9", "id": "nine"}\n', "'id'"),
        (lambda text: text + '{"prompt": "p9", "more": 1}\n', "'more'"),
    ],
    ids=["edited", "another kind", "another column"],
)
def test_lines_that_are_not_those_of_before_or_change_columns_are_refused(
    growing: GrowingRun, change: Callable[[str], str], told: str
) -> None:
    path = growing.lines("a.jsonl", 1, 2, 3)
    growing.run()
    path.write_text(change(path.read_text()))
    with pytest.raises(CannotExtend, match=told):
        growing.submit(extend=True)
    assert (growing.output / "_SUCCESS").is_file()


def test_columns_in_another_order_are_refused_as_that(growing: GrowingRun) -> None:
    path = growing.input / "a.csv"
    path.write_text("prompt,id\np1,1\n")
    growing.run()
    path.write_text("id,prompt\n1,p1\n2,p2\n")
    with pytest.raises(CannotExtend, match="with it the columns come in another order"):
        growing.submit(extend=True)


def test_compressed_lines_that_grew_are_refused(growing: GrowingRun) -> None:
    path = growing.input / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p1", "id": 1}\n'))
    growing.run()
    with path.open("ab") as file:
        file.write(gzip.compress(b'{"prompt": "p2", "id": 2}\n'))
    with pytest.raises(CannotExtend, match="a file of their own"):
        growing.submit(extend=True)


def test_a_last_line_that_had_no_end_may_not_go_on(growing: GrowingRun) -> None:
    path = growing.input / "a.csv"
    path.write_text("prompt,id\np1,1\np2,2")
    growing.run()
    path.write_text("prompt,id\np1,1\np2,22\np3,3\n")
    with pytest.raises(CannotExtend):
        growing.submit(extend=True)
    path.write_text("prompt,id\np1,1\np2,2\np3,3\n")
    growing.extend()
    growing.check(1, 2, 3)


def test_folders_of_a_new_value_are_added_and_those_of_another_key_refused(growing: GrowingRun) -> None:
    growing.parquet("day=1/a.parquet", 1)
    growing.run()
    growing.parquet("day=2/a.parquet", 2)
    growing.extend()
    growing.check(1, 2)
    assert [row["day"] for row in growing.rows()] == [1, 2]
    growing.parquet("day=x/a.parquet", 3)
    with pytest.raises(CannotExtend, match="day"):
        growing.submit(extend=True)
    shutil.rmtree(growing.input / "day=x")
    growing.parquet("hour=3/a.parquet", 3)
    with pytest.raises(errors.SchemaMismatch, match="hour"):
        growing.submit(extend=True)
