"""A chat's tools are run in the batch: their results go back, until an answer calls none."""

import json
from collections.abc import Iterator
from dataclasses import replace
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
    [("fails", "it raised ValueError: no network"), ("hangs", "it took longer than 0.5 s")],
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
    assert victim["error"].startswith(f"tool {name}: ")
    assert says in victim["error"] or name == "hangs"
    assert (other["completion"], other["error"], other["turns"]) == ("2", None, 2)
    assert [message["role"] for message in json.loads(other["messages"])] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_chat_that_calls_tools_for_ever_ends(context: JobContext) -> None:
    options = {"tools": offered("add"), "tool": [function("add")], "max_turns": 3}
    task = opened_task(context, "jobs.chat", [[USER]], options)
    answer = FakeCompletion("", 0, [1], "stop", 10, tool_calls=[call("add", a=1, b=1)])
    assert len(feed(task, lambda request: answer)) == 3
    (choice,) = task.result()["choices"]
    assert "calls tools still" in choice["error"]


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
            "'weather', and tools offers no",
        ),
        ({"tools": offered("system"), "tool": ["os:system"]}, "os.system is not allowed"),
        ({"tools": offered("add"), "tool": ["add"]}, "module:function"),
        ({"tools": offered("add"), "tool": [function("add")], "n": 2}, "tool and n"),
        ({"tools": offered("add"), "max_turns": 2}, "max_turns is for tool"),
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
