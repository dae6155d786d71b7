"""Answers that fail a check go back with the reason; those that were cut go on."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.context import JobContext
from jobs.context.checks.options import CHAT_REPAIR, PROMPT_REPAIR, repair_options
from jobs.context.checks.processes import Checks
from jobs.errors import InvalidJob
from jobs.prompts.attempts import attempt_seed
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    opened_task,
    refuse,
    run_task,
)
from tests.jobs.checking import FUNCTION


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
    assert choice["check_error"] == "it does not match the pattern b"
    assert choice["error"] == "attempt 2 failed: the prompt is too long"
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
