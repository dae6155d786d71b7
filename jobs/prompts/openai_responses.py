"""OpenAI's Responses API: turns a body into a chat, and the chat's answer into a response object.

Source: OpenAI's API reference, "Responses".
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue, NotBuilt

PATH = "/v1/responses"

#: Arguments that are not built, each with the values that change nothing.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
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
#: Arguments that have the same name and meaning in a chat.
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
#: Arguments that have another name or form in a chat, or that only the response object repeats.
_CONVERTED = (
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

_TYPE_NAMES: Mapping[type, str] = {list: "list", dict: "object"}


def is_served(name: str, value: Any) -> bool:
    """Whether an argument of a body is known, and has a value that is supported."""
    if name in _NEUTRAL_VALUES:
        return value in _NEUTRAL_VALUES[name]
    return name in _SAME or name in _CONVERTED


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `jobs.chat` for a body. Raises InvalidJob.

    The error's text begins with the name of the wrong argument.
    """
    _check_arguments(body)
    arguments: dict[str, Any] = {"messages": _messages(body)}
    for name in _SAME:
        if body.get(name) is not None:
            arguments[name] = body[name]
    if body.get("max_output_tokens") is not None:
        arguments["max_tokens"] = body["max_output_tokens"]
    reasoning = body.get("reasoning") or {}
    if reasoning.get("effort") is not None:
        arguments["reasoning_effort"] = reasoning["effort"]

    response_format = _format(body.get("text"))
    if response_format is not None:
        arguments["response_format"] = response_format
    if body.get("tools"):
        arguments["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and body.get("tools"):  # without tools, there is nothing to choose
        arguments["tool_choice"] = choice
    return arguments


def _check_arguments(body: Mapping[str, Any]) -> None:
    """Raise InvalidJob for an argument that is not supported, is not known, or has a wrong type."""
    for name, value in body.items():
        if name in _NEUTRAL_VALUES and value not in _NEUTRAL_VALUES[name]:
            raise NotBuilt(f"{name} is not built: leave it out")
        if name not in (*_NEUTRAL_VALUES, *_SAME, *_CONVERTED):
            raise InvalidValue(f"{{}} is no argument of {PATH}", brief(name))

    for name, expected_type in (("tools", list), ("metadata", dict), ("reasoning", dict)):
        if not isinstance(body.get(name), expected_type | None):
            raise InvalidJob(f"{name} is no {_TYPE_NAMES[expected_type]}")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a chat's messages for a body's instructions and input. Raises InvalidJob."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidJob("input is neither a text nor a list of items")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidJob(f"input has an item {number} that is no object")
        _add_item(messages, item, number)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], number: int) -> None:
    """Add an item of the input to the messages. A call after a message of the assistant is added to that message.

    number: the item's index in the input, for errors.
    """
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
        last_message = messages[-1] if messages else None
        if last_message is not None and last_message["role"] == "assistant":
            last_message.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise InvalidValue(
            f"input has an item {number} of type {{}}, which is not built", brief(kind)
        )


def _content(content: Any, number: int) -> Any:
    """Return an item's content in the form of a chat's message. Raises InvalidValue.

    number: the item's index in the input, for errors.
    """
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
            raise InvalidValue(
                f"input has a part of type {{}} in item {number}, which is not built", brief(kind)
            )
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _format(text: Any) -> dict[str, Any] | None:
    """Return a chat's response_format for a body's `text`; None if any text is allowed. Raises InvalidJob."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise InvalidJob("text is no object")
    if text.get("verbosity") not in (None, "medium"):
        raise NotBuilt("text.verbosity is not built: leave it out")
    text_format = text.get("format")
    if text_format is None or text_format == {"type": "text"}:
        return None
    if isinstance(text_format, dict) and text_format.get("type") == "json_object":
        return {"type": "json_object"}
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": _without_type(text_format)}
    raise InvalidJob("text.format has no type text, json_object or json_schema")


def _tool(tool: Any) -> dict[str, Any]:
    """Return a chat's tool for a body's tool. Raises InvalidValue."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidValue(
            "tools has a tool of type {}, which is not built: give tools of type 'function'",
            brief(kind),
        )
    return {"type": "function", "function": _without_type(tool)}


def _without_type(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that are not null, without its type."""
    remaining = {}
    for name, value in fields.items():
        if name != "type" and value is not None:
            remaining[name] = value
    return remaining


def response_object(
    answer: Mapping[str, Any], body: Mapping[str, Any], job_id: str, created_at: int
) -> dict[str, Any]:
    """Return OpenAI's response object for a chat's answer.

    answer: the chat.completion. body: the request's body. created_at: Unix seconds.
    job_id: the id of the job, or of the line of a batch file. All ids in the object contain it.
    """
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    output: list[dict[str, Any]] = []
    if message.get("reasoning"):
        output.append(text_item("reasoning", job_id, len(output), message["reasoning"]))
    if message.get("content") or not calls:
        output.append(text_item("message", job_id, len(output), message.get("content") or ""))
    for call in calls:
        output.append(call_item(job_id, len(output), call))
    return response_with(answer, body, output, job_id, created_at)


def text_item(kind: str, job_id: str, index: int, text: str) -> dict[str, Any]:
    """Return an item of the output that holds a text.

    kind: "reasoning" or "message". job_id: see response_object. index: the item's index in the output.
    """
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        fields: dict[str, Any] = {"id": f"rs_{job_id}_{index}", "summary": []}
    else:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        fields = {"id": f"msg_{job_id}_{index}", "role": "assistant"}
    return {**fields, "type": kind, "status": "completed", "content": [part]}


def call_item(job_id: str, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function call as an item of the response's output. call: one of the chat answer's `tool_calls`."""
    return {
        "type": "function_call",
        "id": f"fc_{job_id}_{index}",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def response_with(
    answer: Mapping[str, Any] | None,
    body: Mapping[str, Any],
    output: Sequence[dict[str, Any]],
    job_id: str,
    created_at: int,
) -> dict[str, Any]:
    """Return a response object with these items of output.

    answer: the chat.completion; None while the response is in progress. Other arguments: see response_object.
    """
    status = "in_progress"
    model = body.get("model") or ""
    incomplete_details = None
    usage = None
    if answer is not None:
        status = "completed"
        model = answer["model"]
        usage = _usage(answer["usage"])
        if answer["choices"][0]["finish_reason"] == "length":
            status = "incomplete"
            incomplete_details = {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{job_id}",
        "object": "response",
        "created_at": created_at,
        "status": status,
        "error": None,
        "incomplete_details": incomplete_details,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": list(output),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
        "user": body.get("user"),
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the form of a response object."""
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
