"""Pictures that are objects in a store, by a path of their own or beside the file of their row."""

import io
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

from jobs.parquet.prompts.picture_source import picture_reader
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, score_parquet, work_off
from tests.jobs.conftest import MakeContext
from tests.jobs.s3_server import S3
from tests.jobs.stored_runs import ROOT, in_store
from tests.picture_files import picture


def size(request: Request) -> FakeCompletion:
    assert isinstance(request.prompt, list)
    return FakeCompletion(str(len(request.prompt[0]["image"])))


def test_a_path_of_a_store_leads_to_an_object_below_the_roots(
    s3: S3, make_context: MakeContext, tmp_path: Path
) -> None:
    context = replace(in_store(make_context(), tmp_path), picture_reader=picture_reader)
    file, contents = picture(), io.BytesIO()
    s3.put("data/images/a.png", file)
    paths = ["images/a.png", f"{ROOT}/images/a.png", "images/none.png", "s3://other/images/a.png"]
    pq.write_table(pa.table({"prompt": ["?"] * 4, "image": paths}), contents)
    s3.put("data/in.parquet", contents.getvalue())
    score_parquet(context, f"{ROOT}/in.parquet", str(tmp_path / "out"), image_column="image")
    work_off(context.connection, lambda: context, answer=size)
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["completion"] for row in found] == [str(len(file))] * 2 + [None] * 2
    assert "there is no picture at" in found[2]["error"]
    assert "outside the data roots" in found[3]["error"]
