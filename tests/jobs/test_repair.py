"""Answers that fail a check go back with the reason, those that were cut go on: in jobs, runs and batches."""

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
from jobs.context.checks.options import CHAT_REPAIR, PROMPT_REPAIR
from jobs.context.checks.processes import Checks
from jobs.errors import InvalidJob
from jobs.prompts.attempts import attempt_seed
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    opened_task,
    queued_jobs,
    refuse,
    run_task,
    score_parquet,
    work_off,
)
from tests.jobs.checking import TELLS
from tests.jobs.conftest import Invoke


class Answers:
    """Gives its answers one after the other, whatever is asked."""

    def __init__(self, *answers: str | FakeCompletion) -> None:
        self._answers, self.asked = list(answers), list[Request]()

    def __call__(self, request: Request) -> FakeCompletion:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, FakeCompletion):
            return answer
        return FakeCompletion(answer, 0, list(range(len(answer))), "stop", 10, 4)


def cut(text: str, begun: int = 0) -> FakeCompletion:
    """What was cut for its length; begun: tokens that it had before."""
    return FakeCompletion(text, 0, list(range(len(text))), "length", 10, 4 + begun)


def test_an_answer_that_fails_goes_back_with_the_reason_behind_it(checking: JobContext) -> None:
    answers = Answers("one", "12")
    found = run_task(checking, "jobs.complete", "A number:", check={"regex": r"\d+"}, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["attempts"], choice["check_error"]) == ("12", 2, None)
    reason = r"it does not match the pattern \d+"
    assert [request.prompt for request in answers.asked] == [
        "A number:",
        "A number:one" + PROMPT_REPAIR.replace("{reason}", reason),
    ]
    assert found["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_chat_goes_on_with_the_answer_and_the_reason_as_messages(checking: JobContext) -> None:
    answers, schema = (
        Answers("{}", '{"a": "x"}', '{"a": 1}'),
        {"required": ["a"], "properties": {"a": {"type": "integer"}}},
    )
    messages = [{"role": "user", "content": "JSON!"}]
    found = run_task(checking, "jobs.chat", messages, check={"json": schema}, answer=answers)
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["attempts"]) == ('{"a": 1}', 3)
    first, second = (
        CHAT_REPAIR.replace("{reason}", reason)
        for reason in ("$: 'a' is a required property", "$.a: 'x' is not of type 'integer'")
    )
    assert answers.asked[2].messages == [
        *messages,
        {"role": "assistant", "content": "{}"},
        {"role": "user", "content": first},
        {"role": "assistant", "content": '{"a": "x"}'},
        {"role": "user", "content": second},
    ]


def test_what_is_never_valid_says_why_not(checking: JobContext) -> None:
    answers = Answers("a", "b", "c")
    found = run_task(checking, "jobs.complete", "?", check={"json": {}}, max_attempts=2, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["attempts"]) == ("b", 2)
    assert choice["check_error"].startswith("it is not JSON")
    assert choice["finish_reason"] == "stop"


def test_one_attempt_checks_and_asks_nothing_again(checking: JobContext) -> None:
    answers = Answers("a")
    found = run_task(checking, "jobs.complete", "?", check={"regex": "b"}, max_attempts=1, answer=answers)
    assert found["choices"][0]["check_error"] == "it does not match the pattern b"
    assert len(answers.asked) == 1


def test_seeds_of_further_attempts_follow_from_the_first(checking: JobContext) -> None:
    answers = Answers("a", "b", "c")
    run_task(checking, "jobs.complete", "?", check={"regex": "x"}, seed=5, temperature=0.5, answer=answers)
    seeds = [request.sampling["seed"] for request in answers.asked]
    assert seeds == [5, attempt_seed(5, 2), attempt_seed(5, 3)]
    assert len(set(seeds)) == 3


def test_prompts_of_a_list_each_take_their_own_way(checking: JobContext) -> None:
    def answer(request: Request) -> FakeCompletion:
        assert isinstance(request.prompt, str)
        return FakeCompletion("b" if request.prompt[0] == "b" or "valid" in request.prompt else "a")

    found = run_task(checking, "jobs.complete", ["a", "b", None, "c"], check={"regex": "b"}, answer=answer)
    assert [choice.get("attempts") for choice in found["choices"]] == [2, 1, None, 2]
    assert [choice["text"] for choice in found["choices"]] == ["b", "b", "", "b"]


def test_an_answer_that_was_cut_goes_on_and_is_one(context: JobContext) -> None:
    answers = Answers(cut("abc"), cut("abcdef", 3), FakeCompletion("abcdefg", 0, [*range(7)], "stop", 10, 10))
    found = run_task(context, "jobs.complete", "?", continue_on_length=True, seed=3, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcdefg", "stop")
    assert (choice["attempts"], choice["check_error"]) == (3, None)
    assert [list(request.continued) for request in answers.asked] == [[], [0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert {request.sampling["seed"] for request in answers.asked} == {3}, "it is one text"
    usage = found["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["prompt_tokens"] == 10 + 13 + 16


def test_only_whole_answers_are_checked_and_repairs_go_on_too(
    checking: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, reason = list[str](), Checks.reason

    def noted(self: Checks, options: Any, row: Any, text: str) -> str | None:
        checked.append(text)
        return reason(self, options, row, text)

    monkeypatch.setattr(Checks, "reason", noted)
    answers = Answers(cut("1"), "12x", cut("4"), "42")
    found = run_task(
        checking,
        "jobs.chat",
        [{"role": "user", "content": "?"}],
        check={"regex": r"\d+"},
        continue_on_length=True,
        max_attempts=4,
        answer=answers,
    )
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["attempts"], choice["check_error"]) == ("42", 4, None)
    assert [list(request.continued) for request in answers.asked] == [[], [0], [], [0]]
    assert answers.asked[3].messages == answers.asked[2].messages
    assert answers.asked[2].messages is not None
    assert answers.asked[2].messages[1]["content"] == "12x"
    assert checked == ["12x", "42"]
    assert found["usage"]["completion_tokens"] == 3 + 2
    assert found["usage"]["prompt_tokens"] == 10 + 11 + 10 + 11


def test_an_attempt_that_is_refused_leaves_the_answer_before_it(checking: JobContext) -> None:
    answers = Answers("a", refuse("the prompt is too long"))
    found = run_task(checking, "jobs.complete", "?", check={"regex": "b"}, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["attempts"]) == ("a", "stop", 2)
    assert choice["check_error"] == "it does not match the pattern b"
    assert choice["error"] == "attempt 2 failed: the prompt is too long"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"check": {"json": {}, "regex": "a"}}, "expected one of"),
        ({"check": {"function": "os.system"}}, "os.system is not allowed on this worker"),
        ({"check": {"regex": "a"}, "max_attempts": "2"}, "max_attempts:=3"),
        ({"max_attempts": 2}, "give a check, or continue_on_length"),
        ({"check": {"regex": "a"}, "n": 2}, "check and n=2"),
        ({"check": {"regex": "a"}, "prompt": [1, 2]}, "prompt of token ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    checking: JobContext, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        run_task(checking, "jobs.complete", **{"prompt": "?", **arguments})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({"regex": "("}, "no pattern of Python's re"),
        ({"json": {"type": "objekt"}}, "no JSON schema: $.type"),
        ({"function": "tests.jobs.checking.nothing"}, "tests.jobs.checking.nothing cannot be imported"),
    ],
)
def test_a_check_that_can_check_nothing_fails_its_job(
    checking: JobContext, check: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        run_task(checking, "jobs.complete", "?", check=check, answer=Answers("a"))
    assert says in str(error.value)


def test_a_job_whose_stream_has_ended_has_more_where_an_answer_failed(checking: JobContext) -> None:
    task = opened_task(checking, "jobs.complete", ["?"], {"check": {"regex": "b"}})
    (request,) = task.requests()
    assert (task.num_requests, task.has_more) == (1, False)
    wrong = [FakeCompletion("a")]
    task.inspect(0, wrong)
    task.deliver(0, wrong)
    assert (task.num_requests, task.has_more) == (2, True)
    assert request.prompt == "?"
    (again,) = task.requests()
    assert again.prompt != "?"
    task.inspect(1, [FakeCompletion("b")])
    task.deliver(1, [FakeCompletion("b")])
    assert not task.has_more
    assert task.result()["choices"][0]["text"] == "b"


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
        ({"check": {"regex": "a"}, "check_columns": ["id"]}, "for a function"),
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
    refused = invoke("submit", *files, "--check-regex", "a", "--check-schema", "{}")
    assert "give one of them" in refused.output
