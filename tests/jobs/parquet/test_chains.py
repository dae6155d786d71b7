"""Several prompts of each row in one run, each over columns and the answers before it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.parquet.asks.chain import Chain
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.shards.row_items import row_runner
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, keyed, opened_task, refuse
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

GREEDY = {"temperature": 0}
TWO = [
    {"name": "short", "template": "{text} In short:"},
    {"name": "title", "template": "{text} In short: {short} A title of {id}:"},
]


def brackets(request: Request) -> FakeCompletion:
    """Answer with what was asked in brackets, which of sampled answers the seed stands in."""
    asked = request.prompt if request.messages is None else request.messages[-1]["content"]
    seed = request.sampling.get("seed", "")
    return FakeCompletion(f"<{asked}{seed}>", 0, [1, 2], "stop", len(str(asked)), 3)


def write(folder: Path, texts: list[str | None], **columns: Any) -> None:
    pq.write_table(
        pa.table({"id": range(len(texts)), "text": texts, **columns}), folder / "in.parquet"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": "short"}, "expected a list"),
        ({"prompts": [{"name": "a"}]}, r"prompts\[0\] is"),
        ({"prompts": [{"name": "a", "template": "{text}"}] * 2}, "there already"),
        ({"prompts": [{"name": "a", "template": "{a}"}]}, "names 'a', which has no answer yet"),
        ({"prompts": [{"name": "a", "template": ""}]}, "names no column"),
        ({"prompts": [{**TWO[0], "sampling": {"seed": 3}}]}, "has its own seed"),
        ({"prompts": [{**TWO[0], "sampling": {"tools": [{}]}}]}, "tools belongs to a chat"),
        ({"sampling": {"n": 2}}, "n must be 1"),
        ({"template": "{text}"}, "template and prompts each say"),
        (
            {"prompts": [{"name": "reused", "template": "{prompt}"}]},
            "has a column 'reused', which is there already",
        ),
        (
            {"prompts": [{"name": "_key", "template": "{prompt}"}]},
            "has a column '_key', which is there already",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_enqueued(
    runs: Runs, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    write(tmp_path, ["a"])
    with pytest.raises(InvalidJob, match=says):
        runs.plan(**{"prompts": TWO, **arguments})
    assert runs.jobs == []


@settings(max_examples=25)
@given(
    rows=st.lists(st.one_of(st.text("ab", max_size=3), st.none()), max_size=20),
    temperature=st.sampled_from([0, 0.7]),
    draw=st.randoms(use_true_random=False),
)
def test_answers_are_those_of_their_rows_whatever_order_they_arrive_in(
    rows: list[str | None], temperature: float, draw: Any
) -> None:
    prompts = [{"name": "x", "template": "{text}1"}, {"name": "y", "template": "{x}{text}2"}]
    prompts.append({"name": "z", "template": "{y}{x}"})
    spec = RunSpec.from_arguments(
        "in", "out", prompts=prompts, sampling={"temperature": temperature}
    )
    gone: list[Row] = []
    batch = pa.RecordBatch.from_arrays([pa.array(rows, pa.string())], ["text"])
    ask = keyed(Chain(spec, 0), spec)
    shard = row_runner(
        list(row_source(spec).rows(batch)), ask, Checks(), lambda row: row, let_go=gone.append
    )
    pending, stream, num_asked = [], shard.requests(), 0
    while True:
        for _ in range(draw.randint(0, 3)):
            request = next(stream, None)
            if request is None and shard.has_more:
                stream = shard.requests()
                request = next(stream)
            if request is not None:
                pending.append((num_asked, request))
                num_asked += 1
        if pending:
            index, request = pending.pop(draw.randrange(len(pending)))
            shard.deliver(index, [FakeCompletion(f"<{request.prompt}>", token_ids=[1])])
        elif shard.counts.done == len(rows):
            break
    valid = [row for row in rows if row is not None]
    assert (
        num_asked
        == 3 * len(set(valid) if temperature == 0 else valid)
        == shard.counts.generated_tokens
    )
    assert len(gone) == num_asked // 3
    for row, answer in zip(rows, shard.answers(), strict=True):
        x = f"<{row or ''}1>"
        y = f"<{x}{row or ''}2>"
        found = [answer.column(name) for name in "xyz"]
        assert found == ([x, y, f"<{y}{x}>"] if row is not None else [None] * 3), answer
        assert (answer.error is None) == (row is not None)


Score = Callable[..., pa.Table]


@pytest.fixture
def score(runs: Runs, tmp_path: Path) -> Score:
    """Runs a file to its end and returns the output."""

    def run(out: str = "out", answer: Any = brackets, **arguments: Any) -> pa.Table:
        arguments = {"sampling": GREEDY, "prompts": TWO, **arguments}
        return runs.score(answer=answer, output=tmp_path / out, **arguments)

    return run


def test_each_prompt_is_over_columns_and_the_answers_before_it(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "ü {id}"])
    table = score()
    answers = ["short", "short_finish_reason", "title", "title_finish_reason"]
    tokens = ["prompt_tokens", "completion_tokens", "cached_tokens", "error"]
    assert table.column_names == ["id", "text", *answers, *tokens]
    first, second = table.to_pylist()
    assert first["short"] == "<a In short:>"
    assert first["title"] == "<a In short: <a In short:> A title of 0:>"
    assert second["title"] == "<ü {id} In short: <ü {id} In short:> A title of 1:>"
    assert (first["short_finish_reason"], first["title_finish_reason"]) == ("stop", "stop")
    assert first["prompt_tokens"] == len("a In short:") + len(first["title"]) - 2
    assert (first["completion_tokens"], first["cached_tokens"]) == (4, 6)


def test_a_prompt_that_fails_costs_the_later_ones_of_its_row_alone(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["good", "bad", None, "late"], more=["x", "y", "z", None])
    prompts = [
        TWO[0],
        {"name": "mid", "template": "{text} {more}"},
        {"name": "last", "template": "{short}!"},
    ]
    asked = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request.prompt)
        return refuse("too long") if "bad" in str(request.prompt) else brackets(request)

    rows = score(prompts=prompts, answer=answer).to_pylist()
    assert rows[0]["last"] == "<<good In short:>!>"
    of_good = ["good In short:", "good x", "<good In short:>!"]
    assert sorted(asked) == sorted([*of_good, "bad In short:", "late In short:"])
    assert [row["error"] for row in rows] == [
        None,
        "prompt 'short': too long",
        "prompt 'short': column 'text' is null",
        "prompt 'mid': column 'more' is null",
    ]
    assert rows[3]["short"] == "<late In short:>"
    reasons = [rows[3][f"{name}_finish_reason"] for name in ("short", "mid", "last")]
    assert reasons == ["stop", "error", "error"]
    assert [rows[1][name] for name in ("short", "mid", "last")] == [None] * 3


def test_a_prompt_may_be_a_chat_and_have_sampling_values_of_its_own(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "b"])
    seen: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        found = brackets(request)
        return replace(found, reasoning="hm") if request.messages else found

    turns = [{"role": "user", "content": "{text}?"}, {"role": "assistant", "content": "{first}"}]
    form = {"response_format": {"type": "json_object"}}
    chat = {"separate_reasoning": True, "max_completion_tokens": 5, **form}
    prompts = [
        {"name": "first", "template": "{text}?"},
        {
            "name": "chat",
            "template": [*turns, {"role": "user", "content": "Sure?"}],
            "sampling": chat,
        },
    ]
    rows = score(prompts=prompts, sampling={**GREEDY, "max_tokens": 9}, answer=answer).to_pylist()
    assert [request.sampling["max_tokens"] for request in seen] == [9, 9, 5, 5]
    forms = [request.sampling.get("structured_outputs") for request in seen[1:3]]
    assert forms == [None, {"json_object": True}]
    contents = [[message["content"] for message in request.messages or []] for request in seen[2:]]
    assert sorted(contents) == [["a?", "<a?>", "Sure?"], ["b?", "<b?>", "Sure?"]]
    assert (rows[1]["chat"], rows[1]["chat_reasoning"]) == ("<Sure?>", "hm")
    assert "first_reasoning" not in rows[0]


def test_rows_of_one_text_are_one_chain_and_drawn_ones_have_seeds_of_their_own(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["same"] * 6)
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return brackets(request)

    prompts = [TWO[0], {"name": "title", "template": "{short}!"}]
    assert len(set(score("greedy", prompts=prompts, answer=answer)["title"].to_pylist())) == 1
    assert len(asked) == 2
    asked.clear()
    drawn = score("drawn", prompts=prompts, sampling={"seed": 3}, answer=answer)
    assert len({request.sampling["seed"] for request in asked}) == 12
    again = score("again", prompts=prompts, sampling={"seed": 3}, rows_per_shard=2)
    assert again["title"].equals(drawn["title"])


def test_an_execution_that_died_between_two_prompts_leaves_the_same_answers_to_the_next(
    runs: Runs, make_context: MakeContext, score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "b", "c", "d"])
    options = {"prompts": TWO, "sampling": {"seed": 1}, "rows_per_shard": 2}
    whole = score("whole", **options)
    runs.plan(**options)
    job, *_ = runs.jobs
    died = opened_task(make_context(), job.func_name, job.args)
    for index, request in enumerate(list(died.requests())):
        died.deliver(index, [brackets(request)])
    assert died.has_more
    next(died.requests())
    runs.work(answer=brackets)
    assert pq.read_table(runs.output).equals(whole)
