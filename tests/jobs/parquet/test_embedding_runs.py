"""Runs of embeddings: a fixed-size list of float32 for each row, whoever reads it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import MODEL_FIELD
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import ColumnConflict, InvalidJob
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, refuse, score_parquet
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

Embed = Callable[..., list[Request]]
SIZE = 6
TEXTS = ["a", "b", "a", "broken", None, "ü ☃", " ", "a" * 50]


def numbers(text: str, size: int) -> list[float]:
    """An embedding of float32's numbers."""
    rng = np.random.default_rng(list(text.encode()) or [0])
    return rng.standard_normal(size).astype(np.float32).tolist()


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    model = replace(MODEL, embedding_size=SIZE, embedding_prompts=("document", "query"))
    return lambda: replace(make_context(), model=model)


@pytest.fixture
def embed(runs: Runs) -> Embed:
    """Runs the texts to their end; returns what the engine was asked."""
    runs.write(TEXTS)

    def run(**arguments: Any) -> list[Request]:
        asked: list[Request] = []

        def answer(request: Request) -> FakeCompletion:
            asked.append(request)
            if request.prompt == "broken":
                return refuse("it is broken")
            size = request.sampling.get("dimensions", SIZE)
            return FakeCompletion(num_prompt_tokens=3, embedding=numbers(str(request.prompt), size))

        arguments = {"task": "embed", "rows_per_shard": 3, **arguments}
        runs.plan(**arguments)
        runs.work(answer)
        assert (runs.output / "_SUCCESS").exists()
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
    assert sorted(str(request.prompt) for request in asked) == sorted(
        {text for text in TEXTS if text}
    )
    values = {"prompt_name": "query"} | ({} if dimensions is None else {"dimensions": dimensions})
    assert all((request.kind, request.sampling) == ("embed", values) for request in asked)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"dimensions": "3"}, "dimensions:=3"),
        ({"template": [{"role": "user", "content": "{prompt}"}]}, "task 'embed' is for texts"),
        (
            {"sampling": {"temperature": 0}},
            "'temperature', and for task 'embed' nothing is generated",
        ),
        ({"labels": ["a", "b"]}, "labels and task 'embed' do not go together"),
    ],
)
def test_what_does_not_go_together_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob, match=problem):
        RunSpec.from_arguments("/in.parquet", "/out", **{"task": "embed", **values})


def test_a_run_that_this_model_cannot_do_fails_once_at_planning(
    runs: Runs, embed: Embed, context: JobContext
) -> None:
    with pytest.raises(InvalidJob, match="gives no embeddings"):
        score_parquet(
            replace(context, model=MODEL), str(runs.source), str(runs.output), task="embed"
        )
    with pytest.raises(InvalidJob, match="dimensions is 7, and embeddings of 'm' have 6 numbers"):
        runs.plan(task="embed", dimensions=7)
    runs.write(["a"], embedding=[1])
    with pytest.raises(ColumnConflict, match="embedding"):
        runs.plan(task="embed")


def test_a_run_of_embeddings_is_resumed_by_a_worker_of_another_model_which_leaves_it_its_shards(
    runs: Runs, redis: Redis
) -> None:
    runs.write(["a", "b"])
    planned = runs.plan(task="embed", rows_per_shard=1)
    for job in runs.jobs:
        job.delete()
    planners = runs.context
    other = ServedModel("other", "fingerprint of another", "float32", "none", ("/models/other",))
    runs.context = lambda: replace(planners(), model=other)
    resumed = runs.plan(task="embed", rows_per_shard=1)
    assert (resumed["run"], resumed["shards_enqueued"]) == (planned["run"], 2)
    fingerprints = {redis.hget(f"rq:job:{job.id}", MODEL_FIELD) for job in runs.jobs}
    assert fingerprints == {MODEL.fingerprint.encode()}
