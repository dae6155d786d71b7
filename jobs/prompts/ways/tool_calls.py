"""Runs the calls of tools in a chat's answer. Each call runs a function in a child process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.checks import TOOL, RepairOptions
from jobs.context.values import checked_list, some_text
from jobs.errors import InvalidJob, InvalidValue
from jobs.items.item import Check, Item
from jobs.prompts.messages import normal_messages
from jobs.prompts.responses import with_ids
from jobs.tasks import Completion, Parts

MAX_TOOLS = 64


def parse_functions(name: str, value: Any) -> list[str]:
    """Return the dotted names of functions that are given as module:function. Raises InvalidJob."""
    dotted_names: list[str] = []
    for text in checked_list(name, value, 'a list such as ["weather:forecast"]', 1, MAX_TOOLS):
        dotted = some_text(f"a function of {name}", text, MAX_NAME_CHARS).replace(":", ".")
        if "." not in dotted.strip("."):
            raise InvalidValue(
                f"a function of {name} is {{}}: write module:function", brief(dotted)
            )
        dotted_names.append(dotted)
    return dotted_names


@dataclass(frozen=True)
class ChatAfterCalls:
    """A chat followed by an answer that calls tools, and by the tools' results.

    error: why the chat cannot go on; None if it can.
    """

    messages: Parts
    error: str | None = None


def after_calls(
    messages: Parts, answer: Completion, function_of: Mapping[str, str]
) -> Item[ChatAfterCalls]:
    """Return the Item that runs the tools that an answer calls, in order, and stops at a tool that fails.

    messages: the chat before the answer. function_of: the dotted names of functions, by the names of tools.
    """
    calls = with_ids(answer.tool_calls or (), f"{len(messages)}/{answer.text}")
    answer_and_results: Parts = [{"role": "assistant", "content": answer.text, "tool_calls": calls}]
    error: str | None = None
    for call in calls:
        name = call["function"]["name"]
        if name not in function_of:  # a row may have tools of its own
            error = f"the tool {name} has no function: name one in the option `tool`"
            break
        tool_check = RepairOptions({TOOL: function_of[name]})
        outcome_json = yield Check(tool_check, call["function"]["arguments"])
        outcome = json.loads(outcome_json)
        if "error" in outcome:
            error = f"tool {name}: {outcome['error']}"
            break
        result = {"role": "tool", "tool_call_id": call["id"], "content": outcome["result"]}
        answer_and_results.append(result)
    try:
        return ChatAfterCalls(normal_messages([*messages, *answer_and_results]), error)
    except InvalidJob as problem:  # the results are too long, for example
        return ChatAfterCalls(messages, error or f"the results of tools: {problem}")
