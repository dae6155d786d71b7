"""Runs of classes and of relevance: what a head says of each row, whoever serves it."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import LogLikelihood
from jobs.errors import InvalidJob
from jobs.prompts.scoring.ranking import rerank_task
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, refuse, score_parquet
from tests.jobs.local_runs import Runs

TEXTS = ["good", "bad", "broken", None, "good"]


def serve(runs: Runs, *classes: str) -> None:
    own = runs.context
    runs.context = lambda: replace(own(), model=replace(MODEL, classes=classes, generates=False))


def scored(request: Request) -> FakeCompletion:
    """Say how good a text is, or how long a document."""
    assert request.kind == "classify"
    if request.prompt == "broken":
        return refuse("it is broken")
    if "pair" in request.sampling:
        return FakeCompletion(
            num_prompt_tokens=3, class_scores={"relevant": len(request.sampling["pair"]) / 10}
        )
    good = 0.75 if request.prompt == "good" else 0.125
    return FakeCompletion(num_prompt_tokens=2, class_scores={"bad": 1 - good, "good": good})


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    return pq.read_table(runs.output).sort_by("id").to_pylist()


def test_each_row_has_its_label_and_the_probability_of_each(runs: Runs) -> None:
    serve(runs, "bad", "good")
    runs.write(TEXTS)
    runs.plan(task="classify", rows_per_shard=2)
    runs.work(scored)
    good, bad, broken, null, last = rows_of(runs)
    assert (good["label"], good["score"], dict(good["probabilities"])) == (
        "good",
        0.75,
        {"bad": 0.25, "good": 0.75},
    )
    assert (bad["label"], bad["score"]) == ("bad", 0.875)
    assert [each["label"] for each in (broken, null)] == [None, None]
    assert broken["error"] == "it is broken"
    assert last["score"] == good["score"]


def test_a_head_with_one_output_gives_a_score_alone(runs: Runs) -> None:
    serve(runs, "quality")
    runs.write(["a"])
    runs.plan(task="classify")
    runs.work(lambda _: FakeCompletion(class_scores={"quality": -3.5}))
    (row,) = rows_of(runs)
    assert (row["label"], row["score"], row["probabilities"]) == (None, -3.5, None)


def test_rows_of_queries_and_documents_are_ranked_by_a_cross_encoder(runs: Runs) -> None:
    serve(runs, "relevant")
    table = pa.table(
        {"id": [0, 1, 2], "q": ["one", "one", None], "document": ["abc", "abcde", "x"]}
    )
    pq.write_table(table, runs.source)
    runs.plan(task="rerank", query_column="q", rows_per_shard=2)
    runs.work(scored)
    found = rows_of(runs)
    assert [row["score"] for row in found] == [0.3, 0.5, None]
    assert found[2]["error"] == "column 'q' is null"
    assert set(found[0]) == {
        "id",
        "q",
        "document",
        "score",
        *("prompt_tokens", "completion_tokens"),
        "cached_tokens",
        "error",
    }


def test_a_text_may_be_its_own_query(runs: Runs) -> None:
    serve(runs, "relevant")
    pq.write_table(pa.table({"id": [0], "q": ["abc"]}), runs.source)
    runs.plan(task="rerank", query_column="q", document_column="q")
    runs.work(scored)
    assert rows_of(runs)[0]["score"] == 0.3


def test_a_model_without_a_head_is_asked_for_yes_or_no(runs: Runs) -> None:
    pq.write_table(pa.table({"id": [0], "query": ["one"], "document": ["a text"]}), runs.source)
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return FakeCompletion(
            loglikelihoods=[LogLikelihood(-1.0, 1, True), LogLikelihood(-1.0, 1, False)]
        )

    runs.plan(task="rerank")
    runs.work(answer)
    (request,) = asked
    assert (request.kind, request.sampling["continuations"]) == ("score", ["yes", "no"])
    assert "<Query>: one" in str(request.prompt)
    assert "<Document>: a text" in str(request.prompt)
    assert rows_of(runs)[0]["score"] == 0.5


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"task": "classify", "template": [{"role": "user", "content": "{prompt}"}]},
            "is for texts",
        ),
        (
            {"task": "classify", "labels": ["a", "b"]},
            "labels and task 'classify' do not go together",
        ),
        (
            {"task": "rerank", "template": "{query}"},
            "asks query_column and document_column: leave template out",
        ),
        ({"task": "rerank", "sampling": {"temperature": 0}}, "'temperature'"),
        ({"task": "classify", "query_column": "q"}, "give task 'rerank' too"),
    ],
)
def test_what_does_not_go_together_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob, match=problem):
        RunSpec.from_arguments("/in.parquet", "/out", **values)


def test_a_run_that_this_model_cannot_do_fails_once_at_planning(runs: Runs) -> None:
    runs.write(["a"])
    with pytest.raises(InvalidJob, match="has no sequence-classification head"):
        score_parquet(runs.context(), str(runs.source), str(runs.output), task="classify")
    serve(runs, "a", "b", "c")
    for values in ({"labels": ["a", "b"]}, {}):
        with pytest.raises(InvalidJob, match="has no LM head"):
            score_parquet(runs.context(), str(runs.source), str(runs.output), **values)
    columns = {"query_column": "prompt", "document_column": "prompt"}
    with pytest.raises(InvalidJob, match="3 classes, not"):
        score_parquet(runs.context(), str(runs.source), str(runs.output), task="rerank", **columns)
    with pytest.raises(InvalidJob, match="3 classes, not"):
        rerank_task("query", ["document"]).open(runs.context())
