"""Answers that fail a check go back with the reason, those that were cut go on: in jobs, runs and batches."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.context import JobContext
from jobs.context.answers import AnswerMemo
from jobs.context.checks import CHAT_REPAIR, PROMPT_REPAIR, Checks, RepairOptions
from jobs.errors import InvalidJob
from jobs.prompts.generated import generated, hashed_seed
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, refuse, run_task
from tests.jobs.checking import TELLS
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs


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
    found = run_task(
        checking, "jobs.complete", "A number:", check={"regex": r"\d+"}, answer=answers
    )
    (choice,) = found["choices"]
    assert (choice["text"], choice["attempts"], choice["check_error"]) == ("12", 2, None)
    reason = r"it does not match the pattern \d+"
    repaired = "A number:one" + PROMPT_REPAIR.replace("{reason}", reason)
    assert [request.prompt for request in answers.asked] == ["A number:", repaired]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        20,
        5,
        25,
    )
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}


class Given(dict[str, Any]):
    """A mapping of which can be seen whether anybody has it."""


def test_an_answer_that_stands_does_not_keep_what_was_asked(checking: JobContext) -> None:
    given = Given(temperature=0)
    item = generated(Request("?", None, given), RepairOptions({"regex": "x"}), given)
    kept = weakref.ref(given)
    del given
    requests = item.send(None)
    assert isinstance(requests, list)
    requests.clear()
    item.send([[FakeCompletion("x", 0, [1], "stop", 10, 4)]])
    with pytest.raises(StopIteration) as end:
        item.send(None)
    assert (end.value.value.first.text, end.value.value.attempts, kept()) == ("x", 1, None)


def test_a_chat_goes_on_with_the_answer_and_the_reason_as_messages(checking: JobContext) -> None:
    answers = Answers("{}", '{"a": "x"}', '{"a": 1}')
    schema = {"required": ["a"], "properties": {"a": {"type": "integer"}}}
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


TOO_LONG = refuse("the prompt has 99 tokens, and the model takes 64")


def test_a_repair_that_does_not_fit_asks_again_without_the_old_answers(
    checking: JobContext,
) -> None:
    answers = Answers("one", "two", TOO_LONG, "12")
    found = run_task(
        checking, "jobs.complete", "A number:", check={"regex": r"\d+"}, seed=5, answer=answers
    )
    (choice,) = found["choices"]
    assert (choice["text"], choice["attempts"], choice["check_error"]) == ("12", 3, None)
    behind = PROMPT_REPAIR.replace("{reason}", r"it does not match the pattern \d+")
    prompts = [request.prompt for request in answers.asked]
    assert prompts[1:] == [
        f"A number:one{behind}",
        f"A number:one{behind}two{behind}",
        f"A number:{behind}",
    ]
    assert answers.asked[3].sampling["seed"] == hashed_seed("5:attempt 3")
    assert found["usage"]["prompt_tokens"] == 30


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "?"}], [{"role": "user", "content": "?\n\n{why}"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "?"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "?"}, {"type": "text", "text": "{why}"}],
                }
            ],
        ),
        (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "!"},
                {"role": "user", "content": "{why}"},
            ],
        ),
    ],
)
def test_a_chat_that_does_not_fit_has_the_reason_in_the_users_last_message(
    checking: JobContext, messages: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    answers = Answers("x", TOO_LONG, "1")
    found = run_task(checking, "jobs.chat", messages, check={"regex": r"\d"}, answer=answers)
    assert found["choices"][0]["message"]["content"] == "1"
    why = CHAT_REPAIR.replace("{reason}", r"it does not match the pattern \d")
    shown = json.dumps(expected).replace("{why}", json.dumps(why)[1:-1])
    assert answers.asked[2].messages == json.loads(shown)


def test_an_answer_that_the_models_length_cut_is_not_put_before_the_next(
    checking: JobContext,
) -> None:
    """One that max_tokens cut is: there is room for it."""
    asked = []
    for max_tokens in (5, 4):
        answers = Answers(cut("abcd"), "1")
        options = {"check": {"regex": r"\d"}, "max_tokens": max_tokens}
        run_task(checking, "jobs.complete", "?", answer=answers, **options)
        asked.append("abcd" in str(answers.asked[1].prompt))
    assert asked == [False, True]


def test_a_repair_that_fits_in_no_way_is_an_error_beside_the_answer(checking: JobContext) -> None:
    answers = Answers("x", TOO_LONG, TOO_LONG)
    found = run_task(checking, "jobs.complete", "?", check={"regex": r"\d"}, answer=answers)
    (choice,) = found["choices"]
    assert choice["text"] == "x"
    assert "attempt 2 failed: the prompt has 99 tokens" in json.dumps(found)


def test_seeds_of_further_attempts_follow_from_the_first(checking: JobContext) -> None:
    answers = Answers("a", "b", "c")
    run_task(
        checking,
        "jobs.complete",
        "?",
        check={"regex": "x"},
        seed=5,
        temperature=0.5,
        answer=answers,
    )
    seeds = [request.sampling["seed"] for request in answers.asked]
    assert seeds == [5, hashed_seed("5:attempt 2"), hashed_seed("5:attempt 3")]
    assert len(set(seeds)) == 3


def test_an_answer_that_was_cut_goes_on_and_is_one(context: JobContext) -> None:
    answers = Answers(
        cut("abc"), cut("abcdef", 3), FakeCompletion("abcdefg", 0, [*range(7)], "stop", 10, 10)
    )
    found = run_task(context, "jobs.complete", "?", continue_on_length=True, seed=3, answer=answers)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcdefg", "stop")
    assert (choice["attempts"], choice["check_error"]) == (3, None)
    assert [list(request.continued) for request in answers.asked] == [
        [],
        [0, 1, 2],
        [0, 1, 2, 3, 4, 5],
    ]
    assert {request.sampling["seed"] for request in answers.asked} == {3}, "it is one text"
    usage = found["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["prompt_tokens"] == 10 + 13 + 16


def test_only_whole_answers_are_checked_and_repairs_go_on_too(
    checking: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[str]()
    outcome = Checks.outcome

    def noted(self: Checks, options: Any, row: Any, text: str) -> str | None:
        checked.append(text)
        return outcome(self, options, row, text)

    monkeypatch.setattr(Checks, "outcome", noted)
    answers = Answers(cut("1"), "12x", cut("4"), "42")
    options = {"check": {"regex": r"\d+"}, "continue_on_length": True, "max_attempts": 4}
    messages = [{"role": "user", "content": "?"}]
    found = run_task(checking, "jobs.chat", messages, answer=answers, **options)
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["attempts"], choice["check_error"]) == (
        "42",
        4,
        None,
    )
    assert [list(request.continued) for request in answers.asked] == [[], [0], [], [0]]
    assert answers.asked[3].messages == answers.asked[2].messages
    assert checked == ["12x", "42"]
    assert found["usage"]["completion_tokens"] == 3 + 2
    assert found["usage"]["prompt_tokens"] == 10 + 11 + 10 + 11


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"check": {"json": {}, "regex": "a"}}, "expected one of"),
        ({"check": {"function": "os.system"}}, "os.system is not allowed on this worker"),
        ({"check": {"regex": "a"}, "max_attempts": "2"}, "max_attempts:=2"),
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
        (
            {"function": "tests.jobs.checking.nothing"},
            "tests.jobs.checking.nothing cannot be imported",
        ),
    ],
)
def test_a_check_that_can_check_nothing_fails_its_job(
    checking: JobContext, check: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob) as error:
        run_task(checking, "jobs.complete", "?", check=check, answer=Answers("a"))
    assert says in str(error.value)


@pytest.fixture
def make_context(make_context: MakeContext, checks: Checks) -> MakeContext:
    memo = AnswerMemo()
    return lambda: replace(make_context(), checks=checks, answers=memo)


def answer_in_time(request: Request) -> FakeCompletion:
    """Repeats a prompt's first letter; in capitals where a reason is given; never for "z"."""
    assert isinstance(request.prompt, str)
    letter = request.prompt[0]
    text = letter.upper() if "valid" in request.prompt and letter != "z" else letter
    return FakeCompletion(text, 0, [1], "stop", len(request.prompt), 3)


CAPITALS = {"check": {"regex": "[A-Z]"}, "sampling": {"temperature": 0}}


def test_every_row_of_a_run_is_valid_or_says_why_not(runs: Runs) -> None:
    runs.write(["a", "B", "z", None, "a"] * 2)
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return answer_in_time(request)

    rows = runs.score(answer=answer, rows_per_shard=5, max_attempts=2, **CAPITALS).to_pylist()
    invalid = "it does not match the pattern [A-Z]"
    found = [(row["completion"], row["attempts"], row["check_error"]) for row in rows]
    assert found == 2 * [
        ("A", 2, None),
        ("B", 1, None),
        ("z", 2, invalid),
        (None, 0, None),
        ("A", 2, None),
    ]
    assert [row["error"] for row in rows[:4]] == [None, None, None, "prompt is null"]
    assert rows[0]["prompt_tokens"] == 1 + len("aa" + PROMPT_REPAIR.replace("{reason}", invalid))
    assert (rows[0]["completion_tokens"], rows[0]["cached_tokens"]) == (2, 6)
    assert len(asked) == 5, "equal greedy rows take one way, and other shards know it"


def test_a_row_whose_further_attempt_fails_is_an_error_and_keeps_its_answer(runs: Runs) -> None:
    """The engine's failure is told, counted, and not remembered for other shards."""
    failures = ["the step failed"]

    def answer(request: Request) -> FakeCompletion:
        if "valid" in str(request.prompt) and failures:
            return replace(refuse(failures.pop()), num_prompt_tokens=9)
        return answer_in_time(request)

    runs.write(["a", "B", "a"])
    rows = runs.score(answer=answer, rows_per_shard=2, **CAPITALS).to_pylist()
    told = [(row["completion"], row["check_error"] is None, row["error"]) for row in rows]
    assert told == [
        ("a", False, "attempt 2 failed: the step failed"),
        ("B", True, None),
        ("A", True, None),
    ]
    assert runs.manifest["errors"] == 1


def test_a_function_gets_the_rows_it_is_of(runs: Runs) -> None:
    runs.write(["2", "3", "3"], seed=[1, 2, 2], more=[{"a": None}, {"a": 1.5}, {"a": 2.5}])
    options = {"check_columns": ["more"], "sampling_columns": {"seed": "seed"}, "max_attempts": 1}
    options |= {"check": {"function": TELLS}, "sampling": {"temperature": 0}}
    found = runs.score(answer=lambda request: FakeCompletion(str(request.prompt)), **options)
    assert found["check_error"].to_pylist() == [
        "2: {'prompt': '2', 'seed': 1, 'more': {'a': None}}",
        "3: {'prompt': '3', 'seed': 2, 'more': {'a': 1.5}}",
        "3: {'prompt': '3', 'seed': 2, 'more': {'a': 2.5}}",
    ]


def test_rows_take_the_same_way_wherever_they_are_scored(runs: Runs, tmp_path: Path) -> None:
    """Seeds of further attempts are the row's: shards of other sizes, or begun anew, ask the same."""
    runs.write([*"abcd"])
    asked: list[set[tuple[str, int]]] = []

    def answer(request: Request) -> FakeCompletion:
        asked[-1].add((str(request.prompt), request.sampling["seed"]))
        return FakeCompletion("x", 0, [1], "length" if request.sampling["seed"] % 2 else "stop")

    options = {"check": {"regex": "y"}, "max_attempts": 3, "continue_on_length": True}
    for size in (1, 4):
        asked.append(set())
        runs.plan(output=tmp_path / str(size), rows_per_shard=size, sampling={"seed": 3}, **options)
        runs.work(answer)
    assert asked[0] == asked[1]
    assert pq.read_table(tmp_path / "1").equals(pq.read_table(tmp_path / "4"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": {"function": "os.system"}}, "not allowed on this worker"),
        ({"check": {"regex": "a"}, "check_columns": ["id"]}, "for a function"),
        (
            {"check": {"regex": "a"}, "input_format": "openai-batch"},
            "the file's lines say what is asked",
        ),
    ],
)
def test_a_run_that_cannot_be_checked_is_refused_at_planning(
    runs: Runs, options: dict[str, Any], says: str
) -> None:
    runs.write(["a"])
    with pytest.raises(InvalidJob) as error:
        runs.plan(**options)
    assert says in str(error.value)
    assert not runs.output.exists()


def test_lines_of_a_batch_file_take_their_own_ways(runs: Runs, tmp_path: Path) -> None:
    capitals = {"check": {"regex": "[A-Z]"}, "max_attempts": 2}
    bodies = [
        {"prompt": ["a", "B"], **capitals},
        {"prompt": "c"},
        {"prompt": "d", "check": {"regex": "("}},
    ]
    lines = [
        json.dumps(
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        )
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    runs.plan(tmp_path / "in.jsonl", input_format="openai-batch")
    runs.work(answer_in_time)
    output, errors = (
        [json.loads(line) for line in (runs.output / name).read_text().splitlines()]
        for name in ("output.jsonl", "errors.jsonl")
    )
    first, second = (line["response"]["body"]["choices"] for line in output)
    assert [(each["text"], each["attempts"]) for each in first] == [("A", 2), ("B", 1)]
    assert [(each["text"], "attempts" in each) for each in second] == [("c", False)]
    assert "no pattern" in errors[0]["error"]["message"]
