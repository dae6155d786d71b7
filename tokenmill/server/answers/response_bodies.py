"""Turns the body of `/v1/responses` into a chat.

Source: OpenAI's API reference, "Responses".
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenmill.server.answers.bodies import Call, call_of
from tokenmill.server.errors import ApiError

PATH = "/v1/responses"
_CHAT = "/v1/chat/completions"

#: Arguments that are not built, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "store": (None, False),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
#: Arguments that a chat has by the same name.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "seed",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
)
#: Arguments that this server reads itself.
_OWN = (
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "stream_options",
)


_KINDS: Mapping[type, str] = {list: "list", dict: "object"}


def response_call(body: Any) -> Call:
    """Return the chat that a body asks for. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    for name, value in body.items():
        if name in _REFUSED and value not in _REFUSED[name]:
            raise _unbuilt(name)
        if name not in (*_REFUSED, *_SAME, *_OWN):
            raise ApiError(400, f"{name} is no argument of {PATH}", param=name)

    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    for name, kind in (("tools", list), ("metadata", dict), ("reasoning", dict)):
        if not isinstance(body.get(name), kind | None):
            raise ApiError(400, f"{name} is no {_KINDS[kind]}", param=name)
    response_format = _format(body.get("text"))
    if response_format is not None:
        chat["response_format"] = response_format
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and body.get("tools"):
        chat["tool_choice"] = choice
    return call_of(_CHAT, chat)


def _unbuilt(name: str) -> ApiError:
    return ApiError(
        400, f"{name} is not built: leave it out", code="unsupported_parameter", param=name
    )


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ApiError(400, "input is neither a text nor a list of items", param="input")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ApiError(400, f"item {number} of input is no object", param="input")
        _add_item(messages, item, number)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], number: int) -> None:
    """Add an item of the input to the messages. Calls that follow each other are one message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(
            {"role": item.get("role"), "content": _content(item.get("content"), number)}
        )
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise ApiError(
            400, f"item {number} of input is a {kind!r}, which is not built", param="input"
        )


def _content(content: Any, number: int) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise ApiError(
                400, f"a part of item {number} is a {kind!r}, which is not built", param="input"
            )
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _format(text: Any) -> dict[str, Any] | None:
    """Return a chat's response_format for `text.format`."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise ApiError(400, "text is no object", param="text")
    if text.get("verbosity") not in (None, "medium"):
        raise _unbuilt("text.verbosity")
    wanted = text.get("format")
    if wanted is None or wanted == {"type": "text"}:
        return None
    if isinstance(wanted, dict) and wanted.get("type") == "json_object":
        return {"type": "json_object"}
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {
            name: value for name, value in wanted.items() if name != "type" and value is not None
        }
        return {"type": "json_schema", "json_schema": schema}
    raise ApiError(400, "text.format has no type text, json_object or json_schema", param="text")


def _tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise ApiError(
            400, f"tools has a {kind!r}, which is not built: functions alone are", param="tools"
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}
