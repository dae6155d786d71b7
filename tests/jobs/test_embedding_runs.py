"""Runs of embeddings: a fixed-size list of float32 for each row, whoever reads it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import MODEL_FIELD
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import ColumnConflict, InvalidJob
from jobs.parquet.survey import survey_parquet
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, queued_jobs, refuse, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
Embed = Callable[..., list[Request]]
SIZE = 6
TEXTS = ["a", "b", "a", "broken", None, "ü ☃", " ", "a" * 50]


def numbers(text: str, size: int) -> list[float]:
    """An embedding of float32's numbers."""
    rng = np.random.default_rng(list(text.encode()) or [0])
    return rng.standard_normal(size).astype(np.float32).tolist()


@pytest.fixture
def context(make_context: MakeContext) -> MakeContext:
    model = replace(MODEL, embedding_size=SIZE, embedding_prompts=("document", "query"))
    return lambda: replace(make_context(), model=model)


@pytest.fixture
def embed(redis: Redis, context: MakeContext, tmp_path: Path) -> Embed:
    """Runs the texts to their end; returns what the engine was asked."""
    pq.write_table(pa.table({"id": range(len(TEXTS)), "prompt": TEXTS}), tmp_path / "in.parquet")

    def run(out: str = "out", **arguments: Any) -> list[Request]:
        asked: list[Request] = []

        def answer(request: Request) -> FakeCompletion:
            asked.append(request)
            if request.prompt == "broken":
                return refuse("it is broken")
            size = request.sampling.get("dimensions", SIZE)
            return FakeCompletion(num_prompt_tokens=3, embedding=numbers(str(request.prompt), size))

        arguments = {"task": "embed", "rows_per_shard": 3, **arguments}
        score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / out), **arguments)
        work_off(redis, context, answer=answer)
        assert (tmp_path / out / "_SUCCESS").exists()
        return asked

    return run


@pytest.mark.parametrize("dimensions", [None, 4])
def test_each_row_has_its_embedding_and_equal_texts_one(
    embed: Embed, tmp_path: Path, dimensions: int | None
) -> None:
    asked = embed(dimensions=dimensions, prompt_name="query")
    size = dimensions or SIZE
    found = pq.read_table(tmp_path / "out").sort_by("id")
    added = ["embedding", "prompt_tokens", "completion_tokens", "cached_tokens", "error"]
    assert set(found.column_names) == {"id", "prompt", *added}
    assert found.schema.field("embedding").type == pa.list_(pa.float32(), size)
    for text, row in zip(TEXTS, found.to_pylist(), strict=True):
        is_bad = text in ("broken", None)
        assert row["embedding"] == (None if is_bad else numbers(text or "", size)), text
        assert (row["error"] is not None) == is_bad
    assert found["error"][3].as_py() == "it is broken"
    assert sorted(str(request.prompt) for request in asked) == sorted({text for text in TEXTS if text})
    values = {"prompt_name": "query"} | ({} if dimensions is None else {"dimensions": dimensions})
    assert all((request.kind, request.sampling) == ("embed", values) for request in asked)


def test_pandas_polars_and_duckdb_read_them(embed: Embed, tmp_path: Path) -> None:
    embed(single_file=True, keep=["id"])
    path = tmp_path / "out" / "output.parquet"
    expected = [None if text in ("broken", None) else numbers(text or "", SIZE) for text in TEXTS]
    frame = pl.read_parquet(path)
    assert frame.schema["embedding"] == pl.Array(pl.Float32, SIZE)
    assert frame["embedding"].to_list() == expected
    rows = duckdb.sql(f"select embedding from '{path}' order by id").fetchall()
    assert [None if row is None else list(row) for (row,) in rows] == expected
    pandas = pq.read_table(path).to_pandas()["embedding"]
    assert [None if each is None else each.tolist() for each in pandas] == expected


def test_csv_and_jsonl_have_them_as_json(embed: Embed, tmp_path: Path) -> None:
    embed("csv", single_file="csv")
    embed("jsonl", single_file="jsonl")
    with open(tmp_path / "csv" / "output.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert json.loads(rows[1]["embedding"]) == numbers("b", SIZE)
    assert rows[3]["embedding"] == ""
    lines = (tmp_path / "jsonl" / "output.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["embedding"] == numbers("b", SIZE)


def test_files_without_rows_have_the_column_too(context: MakeContext, redis: Redis, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), task="embed")
    assert pq.read_table(tmp_path / "out").schema.field("embedding").type == pa.list_(pa.float32(), SIZE)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"task": "rank"}, "task is 'rank', expected 'generate' or 'embed'"),
        ({"task": None, "dimensions": 3}, "dimensions is for embeddings"),
        ({"prompt_name": "q", "task": "generate"}, "prompt_name is for embeddings"),
        ({"dimensions": "3"}, "dimensions:=256"),
        ({"messages_column": "prompt"}, "embeddings are of texts"),
        ({"template": [{"role": "user", "content": "{prompt}"}]}, "embeddings are of texts"),
        ({"sampling": {"temperature": 0}}, "'temperature', and for embeddings nothing is generated"),
        ({"labels": ["a", "b"]}, "labels and task 'embed' do not go together"),
        ({"continue_on_length": True, "max_attempts": 2}, "continue_on_length and task 'embed'"),
        ({"input_format": "openai-batch"}, "task and a batch file"),
    ],
)
def test_what_does_not_go_together_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob, match=problem):
        RunSpec.from_arguments("/in.parquet", "/out", **{"task": "embed", **values})


def test_a_run_that_this_model_cannot_do_fails_once_at_planning(
    embed: Embed, context: MakeContext, make_context: MakeContext, tmp_path: Path
) -> None:
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    with pytest.raises(InvalidJob, match="gives no embeddings"):
        score_parquet(make_context(), source, out, task="embed")
    with pytest.raises(InvalidJob, match="dimensions is 7, and embeddings of 'm' have 6"):
        score_parquet(context(), source, out, task="embed", dimensions=7)
    with pytest.raises(InvalidJob, match="prompt_name is 'qeury', and 'm' has document, query"):
        score_parquet(context(), source, out, task="embed", prompt_name="qeury")
    large = replace(context(), model=replace(MODEL, embedding_size=4096))
    with pytest.raises(InvalidJob, match="give at most 16384 rows_per_shard"):
        score_parquet(large, source, out, task="embed", rows_per_shard=16385)
    with pytest.raises(InvalidJob, match="for embeddings nothing is"):
        survey_parquet(context(), source, task="embed")
    pq.write_table(pa.table({"prompt": ["a"], "embedding": [1]}), source)
    with pytest.raises(ColumnConflict, match="embedding"):
        score_parquet(context(), source, out, task="embed")


def test_a_run_of_completions_is_the_same_as_before_there_were_embeddings() -> None:
    spec = RunSpec.from_arguments("/in.parquet", "/out", task="generate")
    assert not {"task", "dimensions", "prompt_name"} & spec.to_json().keys()


def test_the_command_takes_the_options(invoke: Invoke, redis: Redis, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    options = ["--task", "embed", "--dimensions", "4", "--prompt-name", "query"]
    result = invoke("submit", str(tmp_path / "in.parquet"), str(tmp_path / "out"), *options, "--dry-run")
    assert "with --task embed there are none" in result.output
    assert invoke("submit", str(tmp_path / "in.parquet"), str(tmp_path / "out"), *options).exit_code == 0


def test_a_run_of_embeddings_is_resumed_by_a_worker_of_another_model_which_leaves_it_its_shards(
    redis: Redis, context: MakeContext, make_context: MakeContext, tmp_path: Path
) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), source)
    arguments: dict[str, Any] = {"task": "embed", "rows_per_shard": 1}
    planned = score_parquet(context(), str(source), str(tmp_path / "out"), **arguments)
    for job in queued_jobs(redis):
        job.delete()
    other = ServedModel("other", "fingerprint of another", "float32", "none", ("/models/other",))
    resumed = score_parquet(
        replace(make_context(), model=other), str(source), str(tmp_path / "out"), **arguments
    )
    assert (resumed["run"], resumed["shards_enqueued"]) == (planned["run"], 2)
    fingerprints = {redis.hget(f"rq:job:{job.id}", MODEL_FIELD) for job in queued_jobs(redis)}
    assert fingerprints == {MODEL.fingerprint.encode()}
