"""Several prompts of each row in one run, each over columns and the answers before it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.context import JobContext
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, opened_task, queued_jobs, refuse, score_parquet, work_off
from tests.jobs.chains import GREEDY, TWO, brackets, write

MakeContext = Callable[[], JobContext]
Score = Callable[..., pa.Table]


@pytest.fixture
def score(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Score:
    """Runs a file to its end and returns the output."""

    def run(out: str = "out", answer: Any = brackets, **arguments: Any) -> pa.Table:
        arguments = {"sampling": GREEDY, "prompts": TWO, **arguments}
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / out), **arguments)
        work_off(redis, make_context, answer=answer)
        assert (tmp_path / out / "_SUCCESS").exists()
        return pq.read_table(tmp_path / out)

    return run


def test_each_prompt_is_over_columns_and_the_answers_before_it(score: Score, tmp_path: Path) -> None:
    write(tmp_path, ["a", "ü {id}"])
    table = score()
    answers = ["short", "short_finish_reason", "title", "title_finish_reason"]
    tokens = ["prompt_tokens", "completion_tokens", "cached_tokens", "error"]
    assert table.column_names == ["id", "text", *answers, *tokens]
    first, second = table.to_pylist()
    assert first["short"] == "<a In short:>"
    assert first["title"] == "<a In short: <a In short:> A title of 0:>"
    assert second["title"] == "<ü {id} In short: <ü {id} In short:> A title of 1:>"
    assert (first["short_finish_reason"], first["title_finish_reason"], first["error"]) == (
        "stop",
        "stop",
        None,
    )
    assert first["prompt_tokens"] == len("a In short:") + len(first["title"]) - 2
    assert (first["completion_tokens"], first["cached_tokens"]) == (4, 6)


def test_a_prompt_that_fails_costs_the_later_ones_of_its_row_alone(score: Score, tmp_path: Path) -> None:
    write(tmp_path, ["good", "bad", None, "late"], more=["x", "y", "z", None])
    prompts = [TWO[0], {"name": "mid", "template": "{text} {more}"}, {"name": "last", "template": "{short}!"}]
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
    assert [rows[3][f"{name}_finish_reason"] for name in ("short", "mid", "last")] == [
        "stop",
        "error",
        "error",
    ]
    assert [rows[3][name] for name in ("mid", "last")] == [None, None]
    assert [rows[1][name] for name in ("short", "mid", "last")] == [None] * 3


def test_a_prompt_may_be_a_chat_and_have_sampling_values_of_its_own(score: Score, tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"])
    seen: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        found = brackets(request)
        return replace(found, reasoning="hm") if request.messages else found

    turns = [{"role": "user", "content": "{text}?"}, {"role": "assistant", "content": "{first}"}]
    chat = {
        "separate_reasoning": True,
        "max_completion_tokens": 5,
        "response_format": {"type": "json_object"},
    }
    prompts = [
        {"name": "first", "template": "{text}?"},
        {"name": "chat", "template": [*turns, {"role": "user", "content": "Sure?"}], "sampling": chat},
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
    one_drawn = [prompts[0], {**prompts[1], "sampling": {"temperature": 1}}]
    asked.clear()
    score("half", prompts=one_drawn, answer=answer)
    assert len(asked) == 12


def test_dates_lists_and_defaults_stand_in_later_prompts_as_in_first_ones(
    score: Score, tmp_path: Path
) -> None:
    day = [datetime.datetime(2024, 2, 3, 4), None]
    write(tmp_path, ["a", "b"], day=day, many=[[1, None], []], real=[1.5, float("nan")])
    asks = "{day} {many} {real}"
    prompts = [
        {"name": "one", "template": f"{{text}} {asks}"},
        {"name": "two", "template": f"{{text}} {asks}"},
    ]
    table = score(prompts=prompts, defaults={"day": "never"})
    assert table["one"].to_pylist() == ["<a 2024-02-03 04:00:00 [1, null] 1.5>", "<b never [] nan>"]
    assert table["two"].equals(table["one"])


def test_other_options_of_a_run_go_with_it(
    score: Score, redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "b", "c"], most=[7, None, 8])
    seen = []

    def answer(request: Request) -> FakeCompletion:
        seen.append((request.sampling["max_tokens"], str(request.prompt)[0]))
        return brackets(request)

    columns = {"sampling_columns": {"max_tokens": "most"}, "sampling": {**GREEDY, "max_tokens": 3}}
    table = score(answer=answer, keep=["id"], output_prefix="llm_", limit=2, **columns)
    assert table.column_names[:2] == ["id", "llm_short"]
    assert table.num_rows == 2
    assert sorted(seen) == [(3, "b"), (3, "b"), (7, "a"), (7, "a")]
    source, out = str(tmp_path / "in.parquet"), tmp_path / "one"
    score_parquet(make_context(), source, str(out), sampling=GREEDY, prompts=TWO, single_file="jsonl")
    work_off(redis, make_context, answer=brackets)
    lines = [json.loads(line) for line in (out / "output.jsonl").read_text().splitlines()]
    assert [line["title"][-2] for line in lines] == [":"] * 3
    assert lines[2]["short"] == "<c In short:>"


def test_calls_of_tools_are_a_column_of_their_prompt(score: Score, tmp_path: Path) -> None:
    write(tmp_path, ["a"])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompts = [
        {"name": "plain", "template": "{text}"},
        {"name": "call", "template": [{"role": "user", "content": "{plain}"}], "sampling": {"tools": tools}},
    ]

    def answer(request: Request) -> FakeCompletion:
        return FakeCompletion('Now: <tool_call>{"name": "look", "arguments": {}}</tool_call>')

    (row,) = score(prompts=prompts, answer=answer).to_pylist()
    assert row["plain"].startswith("Now: <tool_call>")
    assert (row["call"].strip(), row["call_finish_reason"]) == ("Now:", "tool_calls")
    assert json.loads(row["call_tool_calls"])[0]["function"]["name"] == "look"


def test_an_execution_that_died_between_two_prompts_leaves_the_same_answers_to_the_next(
    redis: Redis, make_context: MakeContext, score: Score, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "b", "c", "d"])
    options = {"prompts": TWO, "sampling": {"seed": 1}, "rows_per_shard": 2}
    whole = score("whole", **options)
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **options)
    job, *_ = queued_jobs(redis)
    died = opened_task(make_context(), job.func_name, job.args)
    for index, request in enumerate(list(died.requests())):
        died.deliver(index, [brackets(request)])
    assert died.has_more
    next(died.requests())
    work_off(redis, make_context, answer=brackets)
    assert pq.read_table(tmp_path / "out").equals(whole)
