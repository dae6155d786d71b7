"""A chat's tools are run in the batch: their results go back, until an answer calls none."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.context import JobContext
from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.tasks import Request
from tests.jobs import tools
from tests.jobs.answering import FakeCompletion, feed, opened_task
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

USER = {"role": "user", "content": "How warm is it in Oslo?"}


def offered(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in names
    ]


def function(name: str) -> str:
    return f"{tools.__name__}:{name}"


@pytest.fixture(scope="module")
def tool_checks() -> Iterator[Checks]:
    checks = Checks(tools.ALLOWED, 0.5)
    yield checks
    checks.close()


@pytest.fixture
def make_context(make_context: MakeContext, tool_checks: Checks) -> MakeContext:
    return lambda: replace(make_context(), checks=tool_checks)


@pytest.fixture
def context(make_context: MakeContext) -> JobContext:
    return make_context()


def call(name: str, **arguments: Any) -> dict[str, str]:
    return {"name": name, "arguments": json.dumps(arguments)}


def calls(request: Request, *first: dict[str, str]) -> FakeCompletion:
    """Call tools in the first turn; then answer with the results."""
    results = [
        message["content"] for message in request.messages or () if message["role"] == "tool"
    ]
    if results:
        return FakeCompletion(" and ".join(results), 0, [1, 2, 3], "stop", 20)
    return FakeCompletion("", 0, [1, 2], "stop", 10, tool_calls=list(first))


def test_results_go_back_until_an_answer_calls_none(context: JobContext) -> None:
    options = {"tools": offered("weather", "add"), "tool": [function("weather"), function("add")]}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    asked = feed(
        task, lambda request: calls(request, call("weather", city="Oslo"), call("add", a=2, b=3))
    )
    (choice,) = task.result()["choices"]
    assert choice["message"]["content"] == '{"city": "Oslo", "celsius": 21} and 5'
    assert choice["turns"] == 2
    assert [message["role"] for message in choice["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    first, second = choice["messages"][1]["tool_calls"]
    assert [message["tool_call_id"] for message in choice["messages"][2:4]] == [
        first["id"],
        second["id"],
    ]
    assert len(asked) == 2
    usage = task.result()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (30, 5)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "it raised ValueError: no network"),
        ("hangs", "it took longer than 0.5 s"),
        ("dies", "it "),
        ("leaves", "it raised SystemExit: 3"),
        ("returns_a_set", "it raised TypeError"),
        ("returns_nested", "it raised RecursionError"),
        ("returns_half_a_character", "not valid Unicode"),
    ],
)
def test_a_tool_that_fails_or_is_slow_costs_its_row(runs: Runs, name: str, says: str) -> None:
    def answer(request: Request) -> FakeCompletion:
        is_victim = "victim" in str(request.messages)
        return calls(request, call(name) if is_victim else call("add", a=1, b=1))

    runs.write(["victim", "other"])
    runs.score(
        answer=answer,
        template=[{"role": "user", "content": "{prompt}"}],
        tool=[function(name), function("add")],
        sampling={"tools": offered(name, "add")},
    )
    victim, other = pq.read_table(runs.output).to_pylist()
    assert victim["error"].startswith((f"tool {name}: ", "the results of tools: "))
    assert says in victim["error"] or name == "hangs"
    assert victim["turns"] == 1
    assert (other["completion"], other["error"], other["turns"]) == ("2", None, 2)
    assert [message["role"] for message in json.loads(other["messages"])] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_chat_that_calls_tools_for_ever_ends(context: JobContext, max_turns: int) -> None:
    options = {"tools": offered("add"), "tool": [function("add")], "max_turns": max_turns}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    answer = FakeCompletion("", 0, [1], "stop", 10, tool_calls=[call("add", a=1, b=1)])
    assert len(feed(task, lambda request: answer)) == max_turns
    (choice,) = task.result()["choices"]
    assert "still calls tools" in choice["error"]
    assert choice["turns"] == max_turns


def chat_with(context: JobContext, *tool_calls: dict[str, str], **options: Any) -> dict[str, Any]:
    """Return the choice of a chat whose first answer calls tools."""
    names = list(dict.fromkeys(tool_call["name"] for tool_call in tool_calls))
    given = {"tools": offered(*names), "tool": [function(name) for name in names], **options}
    task = opened_task(context, "jobs.chat", [[USER]], given)
    feed(task, lambda request: calls(request, *tool_calls))
    (choice,) = task.result()["choices"]
    return dict(choice)


def test_what_a_tool_prints_is_no_result(context: JobContext) -> None:
    choice = chat_with(context, call("prints"))
    assert (choice["message"]["content"], choice.get("error")) == ("printed", None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[1]", "its arguments are no JSON object"),
        ("{", "its arguments are not JSON"),
        ('{"c": 1}', "it raised TypeError"),
        ("", "it raised TypeError"),
    ],
)
def test_arguments_that_a_function_does_not_take_are_an_error(
    context: JobContext, arguments: str, says: str
) -> None:
    choice = chat_with(context, {"name": "add", "arguments": arguments})
    assert choice["error"].startswith(f"tool add: {says}")


def test_results_that_no_chat_can_hold_are_an_error(context: JobContext) -> None:
    one = chat_with(context, call("returns_much", size=10_000_000))
    assert "its result has more than 1048576 characters" in one["error"]
    half = call("returns_much", size=600_000)
    together = chat_with(context, half, half)
    assert "messages have 1200" in together["error"]
    assert together["messages"] == [USER]


def test_results_of_many_turns_are_bounded_too(context: JobContext) -> None:
    options = {"tools": offered("returns_much"), "tool": [function("returns_much")]}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    answer = FakeCompletion("", tool_calls=[call("returns_much", size=400_000)], token_ids=[1])
    asked = feed(task, lambda request: answer)
    (choice,) = task.result()["choices"]
    assert len(asked) == 3
    assert "messages have 1200" in choice["error"]


def test_what_tool_choice_forces_is_forced_once(context: JobContext) -> None:
    options = {"tools": offered("add"), "tool": [function("add")], "tool_choice": "required"}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    first, second = feed(task, lambda request: calls(request, call("add", a=1, b=1)))
    assert first.sampling["tool_choice"] == "required"
    assert "tool_choice" not in second.sampling


def test_requests_of_earlier_turns_stay_as_they_were(context: JobContext) -> None:
    options = {"tools": offered("add"), "tool": [function("add")]}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    first, second = feed(task, lambda request: calls(request, call("add", a=1, b=1)))
    assert first.messages == [USER]
    assert len(second.messages or ()) == 3


def test_pictures_of_a_chat_are_left_out_of_its_messages(context: JobContext) -> None:
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "text", "text": "how many?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    options = {"tools": offered("add"), "tool": [function("add")]}
    chat = [{"role": "user", "content": content}]
    context = replace(context, picture_reader=lambda context: pytest.fail)
    task = opened_task(context, "jobs.chat", [chat], options)
    feed(task, lambda request: calls(request, call("add", a=1, b=1)))
    (choice,) = task.result()["choices"]
    json.dumps(choice)
    assert choice["messages"][0]["content"][1] == {"type": "image", "image": None}


def test_a_rows_own_tool_without_a_function_costs_the_row(runs: Runs) -> None:
    def answer(request: Request) -> FakeCompletion:
        (tool,) = request.chat_options["tools"]
        return calls(request, call(tool["function"]["name"], a=1, b=1))

    runs.write(["one", "two"], tools=[json.dumps(offered("add")), json.dumps(offered("weather"))])
    runs.score(
        answer=answer,
        template=[{"role": "user", "content": "{prompt}"}],
        tool=[function("add")],
        sampling={"tools": offered("add")},
        sampling_columns={"tools": "tools"},
    )
    one, two = pq.read_table(runs.output).to_pylist()
    assert (one["completion"], one["error"]) == ("2", None)
    assert two["error"] == "the tool weather has no function: name one in the option `tool`"


def test_a_run_with_tools_is_reused(runs: Runs, tmp_path: Path) -> None:
    options = {
        "template": [{"role": "user", "content": "{prompt}"}],
        "tool": [function("add")],
        "sampling": {"tools": offered("add"), "seed": 3},
    }
    runs.write(["a", "b"])
    runs.score(answer=lambda request: calls(request, call("add", a=1, b=1)), **options)
    rows = pq.read_table(runs.output).to_pylist()
    again = runs.score(
        output=tmp_path / "again", answer=pytest.fail, reuse=[str(runs.output)], **options
    )
    assert again.to_pylist() == rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": offered("add")}, None),
        (
            {"tools": offered("add", "weather"), "tool": [function("add")]},
            "'weather' has no function",
        ),
        (
            {"tools": offered("add"), "tool": [function("add"), function("weather")]},
            "'weather', which `tools` does not offer",
        ),
        ({"tools": offered("system"), "tool": ["os:system"]}, "os.system is not allowed"),
        ({"tools": offered("add"), "tool": ["add"]}, "module:function"),
        ({"tools": offered("add"), "tool": [function("add")], "n": 2}, "tool and n"),
        ({"tools": offered("add"), "max_turns": 2}, "max_turns is for tool"),
        ({"tools": offered("add"), "tool": [function("add")], "max_turns": 0}, "max_turns"),
        ({"tools": offered("add"), "tool": [function("add")], "max_turns": 101}, "max_turns"),
        ({"tools": offered("add"), "tool": [function("add"), "os:add"]}, "two functions"),
        ({"tools": offered("add"), "tool": function("add")}, "expected a list"),
        ({"tools": offered("add"), "tool": [function("add")], "agree": 0.5}, "do not go together"),
    ],
)
def test_what_cannot_be_run_is_refused(
    context: JobContext, options: dict[str, Any], says: str | None
) -> None:
    if says is None:
        opened_task(context, "jobs.chat", [[USER]], options)
        return
    with pytest.raises(InvalidJob, match=says):
        opened_task(context, "jobs.chat", [[USER]], options)
