"""Answers that fail a check go back with the reason; those that were cut go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from jobs.context.checks.options import CHAT_REPAIR, PROMPT_REPAIR, repair_options
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
from tests.jobs.conftest import Invoke

FUNCTION = "tests.jobs.checking.must_be_even"
RAISES, HANGS, DIES = (f"tests.jobs.checking.{name}" for name in ("raises", "hangs", "dies"))
TELLS = "tests.jobs.checking.tells_row"
LIMIT_S = 0.5


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    found = Checks({FUNCTION, RAISES, HANGS, DIES, TELLS, "tests.jobs.checking.nothing"}, LIMIT_S)
    yield found
    found.close()


@pytest.fixture
def checking(context: JobContext, checks: Checks) -> JobContext:
    return replace(context, checks=checks)


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


# What is asked


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
    answers = Answers("a", "b", "c")
    run_task(checking, "jobs.complete", "?", check={"regex": "x"}, answer=answers)
    assert all("seed" not in request.sampling for request in answers.asked)


def test_the_text_of_the_repair_may_be_named(checking: JobContext) -> None:
    answers = Answers("a", "b")
    run_task(
        checking,
        "jobs.complete",
        "?",
        check={"regex": "b"},
        repair_template=" NO ({reason}): ",
        answer=answers,
    )
    assert answers.asked[1].prompt == "?a NO (it does not match the pattern b): "


def test_prompts_of_a_list_each_take_their_own_way(checking: JobContext) -> None:
    def answer(request: Request) -> FakeCompletion:
        assert isinstance(request.prompt, str)
        return FakeCompletion("b" if request.prompt[0] == "b" or "valid" in request.prompt else "a")

    found = run_task(checking, "jobs.complete", ["a", "b", None, "c"], check={"regex": "b"}, answer=answer)
    assert [choice.get("attempts") for choice in found["choices"]] == [2, 1, None, 2]
    assert [choice["text"] for choice in found["choices"]] == ["b", "b", "", "b"]


# What goes on


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


def test_an_answer_that_goes_on_too_often_is_left_as_it_is(context: JobContext) -> None:
    answers = Answers(cut("a"), cut("ab", 1))
    found = run_task(context, "jobs.complete", "?", continue_on_length=True, max_attempts=2, answer=answers)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("ab", "length")


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


def test_what_was_cut_is_checked_where_no_attempt_is_left(checking: JobContext) -> None:
    answers = Answers(cut("1"), cut("1x", 1))
    found = run_task(
        checking,
        "jobs.complete",
        "?",
        check={"regex": r"\d+"},
        continue_on_length=True,
        max_attempts=2,
        answer=answers,
    )
    assert found["choices"][0]["check_error"] == r"it does not match the pattern \d+"


# What fails


def test_an_attempt_that_is_refused_leaves_the_answer_before_it(checking: JobContext) -> None:
    answers = Answers("a", refuse("the prompt is too long"))
    found = run_task(checking, "jobs.complete", "?", check={"regex": "b"}, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["attempts"]) == ("a", "stop", 2)
    assert choice["check_error"] == (
        "it does not match the pattern b; a further attempt failed: the prompt is too long"
    )
    answers = Answers(cut("a"), refuse("too long"))
    found = run_task(
        checking, "jobs.complete", "?", check={"regex": "b"}, continue_on_length=True, answer=answers
    )
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "length")
    assert choice["check_error"] == "it does not match the pattern b"


def test_a_prompt_that_is_refused_fails_as_ever(checking: JobContext) -> None:
    answers = Answers(refuse("empty"), "b")
    found = run_task(
        checking, "jobs.complete", ["x", "y"], check={"regex": "b"}, answer=Answers("b", refuse("no"))
    )
    assert [choice["finish_reason"] for choice in found["choices"]] == ["error", "stop"]
    assert found["choices"][0]["error"] == "no"
    assert answers.asked == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"check": {}}, "check is {}, expected one of"),
        ({"check": {"json": {}, "regex": "a"}}, "expected one of"),
        ({"check": "json"}, "check is 'json', expected one of"),
        ({"check": {"json": "[1"}}, "not JSON"),
        ({"check": {"json": [1]}}, "expected a JSON schema"),
        ({"check": {"regex": ""}}, "regex of check is '', expected a text"),
        ({"check": {"regex": "\ud800"}}, "surrogate"),
        ({"check": {"function": "check"}}, "names no function in a module"),
        ({"check": {"function": "os.system"}}, "os.system is not allowed on this worker"),
        ({"check": {"function": f"{FUNCTION}s"}}, f"did you mean {FUNCTION}"),
        ({"check": {"regex": "a"}, "max_attempts": 0}, "integer from 1 to 100"),
        ({"check": {"regex": "a"}, "max_attempts": True}, "max_attempts is True"),
        ({"check": {"regex": "a"}, "max_attempts": "2"}, "max_attempts:=3"),
        ({"max_attempts": 2}, "give a check, or continue_on_length"),
        ({"continue_on_length": 1}, "expected true or false"),
        ({"repair_template": "x"}, "there is no check"),
        ({"check": {"regex": "a"}, "repair_template": "a" * 65_537}, "a text of 1 to 65536 characters"),
        (
            {"check": {"regex": "a"}, "repair_template": "{reason}" * 9},
            "{reason} 9 times, more than the limit",
        ),
        ({"check": {"regex": "a"}, "n": 2}, "check and n=2"),
        ({"continue_on_length": True, "n": 2}, "continue_on_length and n=2"),
        ({"check": {"regex": "a"}, "prompt": [1, 2]}, "prompt of token ids"),
        ({"check": {"regex": "a"}, "echo": True, "max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    checking: JobContext, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        run_task(checking, "jobs.complete", **{"prompt": "?", **arguments})
    assert says in str(error.value)


def test_a_check_of_a_chat_with_tools_is_refused(checking: JobContext) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidJob, match="check and tools"):
        run_task(checking, "jobs.chat", [{"role": "user", "content": "?"}], check={"regex": "a"}, tools=tools)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({"regex": "("}, "no pattern of Python's re"),
        ({"json": {"type": "objekt"}}, "no JSON schema: $.type"),
        ({"json": {"$schema": [1]}}, "check cannot be read"),
        ({"json": '{"not":' * 900 + "{}" + "}" * 900}, "check cannot be read (RecursionError"),
        ({"function": "tests.jobs.checking.nothing"}, "tests.jobs.checking.nothing cannot be imported"),
    ],
)
def test_a_check_that_can_check_nothing_fails_its_job(
    checking: JobContext, check: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        run_task(checking, "jobs.complete", "?", check=check, answer=Answers("a"))
    assert says in str(error.value)
    with pytest.raises(InvalidJob, match=r".+"):
        checking.checks.prepare(repair_options(check=check))


# Checks


def test_a_function_gets_row_and_answer_and_says_what_is_wrong(checks: Checks) -> None:
    options = repair_options(check={"function": FUNCTION})
    assert checks.reason(options, {"prompt": "x"}, "12") is None
    assert checks.reason(options, {"prompt": "naïve"}, "11") == "11 is odd, and naïve wants an even one"
    assert checks.reason(options, {}, "silent") == "the check gave no reason"
    assert checks.reason(options, {}, "true") == (
        "the check returned bool, expected None or the reason as a text"
    )
    assert len(checks.reason(options, {}, "long") or "") < 3_000
    assert checks.reason(options, {}, "prints") is None, "what it prints is none of its replies"


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        ({"function": RAISES}, "x", "the check raised ValueError: no x"),
        ({"function": RAISES}, "exit", "the check raised SystemExit: 3"),
        ({"function": DIES}, "x", "the check ended its process with -9"),
        ({"function": HANGS}, "x", f"the check went on for more than {LIMIT_S} s"),
        ({"regex": "(a+)+b"}, "a" * 60, f"the check went on for more than {LIMIT_S} s"),
        ({"json": {}}, "[" * 200_000, "it is not JSON: maximum recursion"),
        ({"json": {}}, '{"a": NaN}', "it is not JSON: NaN is no value of JSON"),
        ({"json": {"$ref": "http://localhost:1/schema"}}, "1", "Unresolvable: http://localhost:1/schema"),
    ],
)
def test_a_check_that_fails_fails_the_attempt_and_the_next_is_checked(
    checks: Checks, check: dict[str, Any], text: str, says: str
) -> None:
    options = repair_options(check=check)
    assert says in (checks.reason(options, {}, text) or "")
    assert checks.reason(repair_options(check={"regex": "é+"}), {}, "éé") is None


def test_processes_end_with_the_one_that_asked() -> None:
    checks, options = Checks(), repair_options(check={"regex": "a"})
    assert checks.reason(options, {}, "a") is None
    (process,) = checks._idle
    checks.close()
    assert process._child.returncode is not None


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


# Runs


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
