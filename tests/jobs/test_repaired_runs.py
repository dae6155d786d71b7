"""Rows whose answers fail a check, in runs and in lines of a batch file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.context import JobContext
from jobs.context.answer_memo import AnswerMemo
from jobs.context.checks.options import PROMPT_REPAIR
from jobs.context.checks.processes import Checks
from jobs.errors import InvalidJob
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    queued_jobs,
    refuse,
    score_parquet,
    work_off,
)
from tests.jobs.checking import TELLS
from tests.jobs.conftest import Invoke


def rows_of(tmp_path: Path, name: str = "out") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(tmp_path / name).to_pylist()
    return found


@pytest.fixture
def make_checking(make_context: Callable[[], JobContext], checks: Checks) -> Callable[[], JobContext]:
    memo = AnswerMemo()
    return lambda: replace(make_context(), checks=checks, answers=memo)


def answer_in_time(request: Request) -> FakeCompletion:
    """Repeats a prompt's first letter; in capitals where a reason is given; never for "z"."""
    assert isinstance(request.prompt, str)
    letter = request.prompt[0]
    text = letter.upper() if "valid" in request.prompt and letter != "z" else letter
    return FakeCompletion(text, 0, [1], "stop", len(request.prompt), 3)


def test_every_row_of_a_run_is_valid_or_says_why_not(
    make_checking: Callable[[], JobContext], redis: Redis, tmp_path: Path
) -> None:
    prompts = ["a", "B", "z", None, "a"] * 2
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    score_parquet(
        make_checking(),
        str(tmp_path / "in.parquet"),
        str(tmp_path / "out"),
        rows_per_shard=5,
        check={"regex": "[A-Z]"},
        max_attempts=2,
        sampling={"temperature": 0},
        keep=["prompt"],
    )
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return answer_in_time(request)

    work_off(redis, make_checking, answer=answer)
    rows = rows_of(tmp_path)
    invalid = "it does not match the pattern [A-Z]"
    assert [(row["completion"], row["attempts"], row["check_error"]) for row in rows] == [
        ("A", 2, None), ("B", 1, None), ("z", 2, invalid), (None, 0, None), ("A", 2, None),
    ] * 2  # fmt: skip
    assert [row["error"] for row in rows[:4]] == [None, None, None, "prompt is null"]
    assert rows[0]["prompt_tokens"] == 1 + len("aa" + PROMPT_REPAIR.replace("{reason}", invalid))
    assert (rows[0]["completion_tokens"], rows[0]["cached_tokens"]) == (2, 6)
    assert len(asked) == 5, "equal greedy rows take one way, and other shards know it"


def test_a_row_whose_further_attempt_fails_is_an_error_and_keeps_its_answer(
    make_checking: Callable[[], JobContext], redis: Redis, tmp_path: Path
) -> None:
    """The engine's failure is told, counted, and not remembered for other shards."""
    pq.write_table(pa.table({"prompt": ["a", "B", "a"]}), tmp_path / "in.parquet")
    score_parquet(
        make_checking(),
        str(tmp_path / "in.parquet"),
        str(tmp_path / "out"),
        rows_per_shard=2,
        check={"regex": "[A-Z]"},
        sampling={"temperature": 0},
    )
    failures = ["the step failed"]

    def answer(request: Request) -> FakeCompletion:
        if "valid" in str(request.prompt) and failures:
            return refuse(failures.pop())
        return answer_in_time(request)

    work_off(redis, make_checking, answer=answer)
    told = [(row["completion"], row["check_error"] is None, row["error"]) for row in rows_of(tmp_path)]
    assert told == [("a", False, "attempt 2 failed: the step failed"), ("B", True, None), ("A", True, None)]
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["errors"] == 1


def test_a_function_gets_the_rows_it_is_of(
    make_checking: Callable[[], JobContext], redis: Redis, tmp_path: Path
) -> None:
    table = {"prompt": ["2", "3", "3"], "seed": [1, 2, 2], "more": [{"a": None}, {"a": 1.5}, {"a": 2.5}]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    score_parquet(
        make_checking(),
        str(tmp_path / "in.parquet"),
        str(tmp_path / "out"),
        check={"function": TELLS},
        check_columns=["more"],
        sampling_columns={"seed": "seed"},
        sampling={"temperature": 0},
        max_attempts=1,
    )
    work_off(redis, make_checking, answer=lambda request: FakeCompletion(str(request.prompt)))
    assert [row["check_error"] for row in rows_of(tmp_path)] == [
        "2: {'prompt': '2', 'seed': 1, 'more': {'a': None}}",
        "3: {'prompt': '3', 'seed': 2, 'more': {'a': 1.5}}",
        "3: {'prompt': '3', 'seed': 2, 'more': {'a': 2.5}}",
    ]


def test_rows_take_the_same_way_wherever_they_are_scored(
    make_checking: Callable[[], JobContext], redis: Redis, tmp_path: Path
) -> None:
    """Seeds of further attempts are the row's: shards of other sizes, or begun anew, ask the same."""
    pq.write_table(pa.table({"prompt": list("abcd")}), tmp_path / "in.parquet")
    asked: dict[str, set[tuple[str, int]]] = {"one": set(), "four": set()}

    def answer(request: Request, name: str) -> FakeCompletion:
        asked[name].add((str(request.prompt), request.sampling["seed"]))
        return FakeCompletion("x", 0, [1], "length" if request.sampling["seed"] % 2 else "stop")

    for name, size in (("one", 1), ("four", 4)):
        score_parquet(
            make_checking(), str(tmp_path / "in.parquet"), str(tmp_path / name), rows_per_shard=size,
            sampling={"seed": 3}, check={"regex": "y"}, max_attempts=3, continue_on_length=True,
        )  # fmt: skip
        work_off(redis, make_checking, answer=partial(answer, name=name))
    assert asked["one"] == asked["four"]
    assert rows_of(tmp_path, "one") == rows_of(tmp_path, "four")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": {"function": "os.system"}}, "not allowed on this worker"),
        ({"check": {"json": {"type": "objekt"}}}, "no JSON schema"),
        ({"check": {"regex": "a"}, "sampling": {"n": 2}}, "check and n=2"),
        ({"check": {"regex": "a"}, "check_columns": ["id"]}, "for a function"),
        ({"max_attempts": 2}, "give a check"),
        (
            {"continue_on_length": True, "prompts": [{"name": "p", "template": "{prompt}"}]},
            "continue_on_length and prompts",
        ),
        ({"check": {"regex": "a"}, "input_format": "openai-batch"}, "its lines say what is asked"),
    ],
)
def test_a_run_that_cannot_be_checked_is_refused_at_planning(
    checking: JobContext, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": [1]}), tmp_path / "in.parquet")
    with pytest.raises(InvalidJob) as error:
        score_parquet(checking, str(tmp_path / "in.parquet"), str(tmp_path / "out"), **options)
    assert says in str(error.value)
    assert not (tmp_path / "out").exists()


def test_lines_of_a_batch_file_take_their_own_ways(
    make_checking: Callable[[], JobContext], redis: Redis, tmp_path: Path
) -> None:
    bodies = [
        {"prompt": ["a", "B"], "check": {"regex": "[A-Z]"}, "max_attempts": 2},
        {"prompt": "c"},
        {"prompt": "d", "check": {"regex": "("}},
        {"prompt": "z", "check": {"regex": "[A-Z]"}, "max_attempts": 3},
    ]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    score_parquet(
        make_checking(), str(tmp_path / "in.jsonl"), str(tmp_path / "out"), input_format="openai-batch"
    )
    work_off(redis, make_checking, answer=answer_in_time)
    found = [json.loads(line) for line in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    choices = {line["custom_id"]: line["response"]["body"]["choices"] for line in found}
    assert [(each["text"], each["attempts"]) for each in choices["0"]] == [("A", 2), ("B", 1)]
    assert [(each["text"], "attempts" in each) for each in choices["1"]] == [("c", False)]
    assert choices["3"][0]["attempts"] == 3
    assert choices["3"][0]["check_error"] == "it does not match the pattern [A-Z]"
    (failed,) = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert "no pattern" in failed["error"]["message"]


def test_the_command_line_says_the_same(invoke: Invoke, redis: Redis, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": [1]}), tmp_path / "in.parquet")
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    files = tmp_path / "in.parquet", tmp_path / "out"
    told = {
        ("--check-schema", '{"type": "object"}'): {"check": {"json": {"type": "object"}}},
        ("--check-schema", tmp_path / "schema.json"): {"check": {"json": {"type": "object"}}},
        ("--check-regex", "a+", "--max-attempts", 5): {"check": {"regex": "a+"}, "max_attempts": 5},
        ("--check-function", "m.f", "--check-columns", "id"): {
            "check": {"function": "m.f"},
            "check_columns": ["id"],
        },
        ("--continue-on-length",): {"continue_on_length": True},
    }
    for options, wanted in told.items():
        redis.flushall()
        found = invoke("submit", *files, *options)
        assert found.exit_code == 0, (found.output, found.exception)
        (job,) = queued_jobs(redis)
        assert wanted.items() <= job.kwargs.items(), found.output
    for options, says in [
        (("--check-regex", "a", "--check-schema", "{}"), "give one of them"),
        (("--check-schema", tmp_path / "none.json"), "cannot be read: No such file"),
        (("--max-attempts", 2), "give a check"),
    ]:
        assert says in invoke("submit", *files, *options).output
