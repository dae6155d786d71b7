"""Each kind of scoring is written once: jobs and rows of runs ask the same and get the same."""

import json
from typing import Any

import pytest

from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.items.records import PlainCompletion, PlainLogprob
from jobs.items.under_way import ItemUnderWay
from jobs.parquet.asks.scores import Scores, scoring_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.scoring.table import RUN_SCORINGS, SCORING_JOBS
from jobs.runs.plans.option_checks import TASKS
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, feed, opened_task

SCORED = FakeCompletion(
    num_prompt_tokens=3,
    embedding=[0.5, -1.5],
    class_scores={"spam": 0.75, "ham": 0.25},
    loglikelihoods=[PlainLogprob(-1.0, 1, "a"), PlainLogprob(-3.0, 2, "b")],
)
REFUSED = FakeCompletion(finish_reason="error", error="too long")
HEADLESS = FakeCompletion(num_prompt_tokens=3, loglikelihoods=SCORED.loglikelihoods)

#: The arguments of a job and of a run, and what a row asks.
CASES: dict[str, tuple[list[Any], dict[str, Any], str, FakeCompletion]] = {
    "jobs.embed": (["text"], {"task": "embed"}, "text", SCORED),
    "jobs.classify": (["text", ["yes", "no"]], {"labels": ["yes", "no"]}, "text", SCORED),
    "jobs.classify_text": (["text"], {"task": "classify"}, "text", SCORED),
    "jobs.rerank": (["query", ["text"]], {"task": "rerank"}, '["query", "text"]', HEADLESS),
}


def asked_of_row(
    context: JobContext, arguments: dict[str, Any], prompt: str, completion: FakeCompletion
) -> tuple[Request, Answer]:
    """Return what a row asks, and its answer."""
    spec = RunSpec.from_arguments("in", "out", **arguments)
    kind = scoring_of(spec)
    assert kind is not None
    ask = Scores(kind.of_run(vars(spec), context.model))
    under_way = ItemUnderWay(ask.begin(Row(prompt), 0), context.checks)
    under_way.begin([])
    (request,) = under_way.take_requests()
    under_way.receive(1, 0, [PlainCompletion.of(completion)])
    assert under_way.answer is not None
    return request, under_way.answer


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a job's result for its one text."""
    (values,) = result.get("data") or result.get("results") or [result]
    return dict(values)


def test_each_kind_that_runs_have_is_tried_here() -> None:
    assert CASES.keys() == {job.name for job in SCORING_JOBS if job.scoring is not None}
    assert ("generate", *RUN_SCORINGS) == TASKS


@pytest.mark.parametrize("name", CASES)
def test_jobs_and_rows_ask_the_same_and_get_the_same(context: JobContext, name: str) -> None:
    args, arguments, prompt, completion = CASES[name]
    task = opened_task(context, name, args)
    (of_job,) = feed(task, lambda request: completion)
    of_row, answer = asked_of_row(context, arguments, prompt, completion)
    assert of_job.digest("") == of_row.digest("")

    values = plain(task.result())
    assert answer.error is None
    for column, value in answer.columns.items():
        shown = (
            {"score": "relevance_score"}.get(column, column) if name == "jobs.rerank" else column
        )
        expected = dict(value) if column == "probabilities" else value
        if column == "embedding":
            expected = list(value)
        if shown in values:
            assert values[shown] == expected
    assert {"label", "embedding", "score"} & answer.columns.keys()
    json.dumps(task.result())


@pytest.mark.parametrize("name", CASES)
def test_a_refused_row_has_the_engines_reason(context: JobContext, name: str) -> None:
    _, arguments, prompt, _ = CASES[name]
    _, answer = asked_of_row(context, arguments, prompt, REFUSED)
    assert (answer.error, answer.finish_reason) == ("too long", "error")
