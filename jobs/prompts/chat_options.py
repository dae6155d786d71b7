"""What a chat may ask for beside its messages and sampling values: tools, and variables of the template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue

MAX_TOOLS = 1_000

NAMES = ("chat_template_kwargs", "parallel_tool_calls", "tool_choice", "tools")


@dataclass(frozen=True)
class ChatOptions:
    """template: keyword arguments of engine.Engine.chat_token_ids. has_tools: calls of tools are looked for
    in the answers."""

    template: Mapping[str, Any] = field(default_factory=dict)
    has_tools: bool = False


def split_chat_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ChatOptions]:
    """Part a chat's keyword arguments into sampling values and options. Raises InvalidJob."""
    sampling = {name: value for name, value in values.items() if name not in NAMES}
    template: dict[str, Any] = {}
    variables = values.get("chat_template_kwargs")
    if variables is not None:
        if not isinstance(variables, dict):
            raise InvalidJob(f"chat_template_kwargs is {type(variables).__name__}, expected an object")
        if variables:
            template["chat_template_kwargs"] = variables
    tools = _tools(values.get("tools"))
    choice = values.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidValue('tool_choice is {}, which is not built yet: send "auto" or "none"', brief(choice))
    if values.get("parallel_tool_calls") not in (None, True):
        raise InvalidValue(
            "parallel_tool_calls is {}, which is not built yet: leave it out, or send true",
            brief(values["parallel_tool_calls"]),
        )
    has_tools = bool(tools) and choice != "none"
    if has_tools:
        template["tools"] = tools
    return sampling, ChatOptions(template, has_tools)


def refuse_chat_options(values: Mapping[str, Any]) -> None:
    """Raise InvalidJob where a prompt that is no chat comes with what only a chat has."""
    for name in NAMES:
        if values.get(name) is not None:
            raise InvalidJob(f"{name} belongs to a chat, and a prompt that is a text passes no template")


def _tools(tools: object) -> list[dict[str, Any]]:
    """The functions that a model may call, as they came."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidJob(f"tools is {type(tools).__name__}, expected a list of functions")
    if len(tools) > MAX_TOOLS:
        raise InvalidJob(f"tools holds {len(tools)} functions, more than the limit of {MAX_TOOLS}")
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise InvalidJob(f"tool {number} must be {{'type': 'function', 'function': {{'name': ...}}}}")
        if tool["type"] != "function":
            raise InvalidValue(
                f"tool {number} is of the type {{}}, which is not built: functions alone are",
                brief(tool["type"]),
            )
        function = tool.get("function")
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise InvalidJob(f"tool {number} has no function with a name")
    return tools
