"""The messages of a chat, as OpenAI's clients send them."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue, check_limit, wrong_value_error
from jobs.prompts.arguments import (
    CHAT_ONLY,
    EFFORT,
    MAX_PROMPT_BYTES,
    SPLIT_TOKENS,
    checked_text,
    splits_control_tokens,
)
from jobs.prompts.pictures import Picture, picture_of

MAX_MESSAGES = 10_000
#: The texts that a message may have beside its role and content. They are copied in this order, so that equal chats
#: have equal JSON.
TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content")
MESSAGE_KEYS = ("role", "content", "tool_calls", *TEXTS)


def normal_messages(messages: object, *, drops_keys: bool = False) -> list[dict[str, Any]]:
    """Return a copy of a chat's messages. Each has its role, its content and all other fields that are not null.

    A content is a text, or a list of texts and pictures. In a message with tool calls, a content of null becomes "".
    drops_keys: whether unknown keys of a message are left out. Otherwise they are refused. Raises InvalidJob.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidJob("messages must be a non-empty list of {'role': ..., 'content': ...}")
    check_limit(len(messages), MAX_MESSAGES, "a chat has {} messages", "shorten it")
    normal = [_message(message, number, drops_keys) for number, message in enumerate(messages)]
    num_parts = 0
    num_bytes = 0
    for message in normal:
        if isinstance(message["content"], list):
            num_parts += len(message["content"])
        num_bytes += sum(map(_num_bytes, message.values()))
    check_limit(num_parts, MAX_MESSAGES, "the contents of a chat have {} parts", "shorten it")
    check_limit(num_bytes, MAX_PROMPT_BYTES, "messages have {} bytes", "shorten them")
    return normal


def _message(message: object, number: int, drops_keys: bool) -> dict[str, Any]:
    """Return one message in the form that `normal_messages` returns. number: the message's index, for errors."""
    if not isinstance(message, dict) or "role" not in message:
        raise InvalidJob(f"message {number} must be an object with 'role' and 'content'")
    fields = {}
    for key, value in message.items():
        if value is None or value == []:
            continue
        if key not in MESSAGE_KEYS and not drops_keys:
            raise InvalidJob(
                f"message {number} holds {brief(key)}, which is not built. The keys that are read are "
                f"{', '.join(MESSAGE_KEYS)}; in runs drop_unsupported (--drop-unsupported) leaves out other keys"
            )
        fields[key] = value

    calls = fields.get("tool_calls")
    normal: dict[str, Any] = {
        "role": checked_text(message["role"], f"role of message {number}"),
        "content": _content(message.get("content"), number, has_calls=calls is not None),
    }
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidJob(
                f"tool_calls of message {number} is {type(calls).__name__}, expected a list"
            )
        normal["tool_calls"] = [_call(call, number) for call in calls]
    for key in TEXTS:
        if key in fields:
            normal[key] = checked_text(fields[key], f"{key} of message {number}")
    return normal


def _content(content: object, number: int, *, has_calls: bool) -> str | list[dict[str, Any]]:
    """Return a message's content: a text, or a list of parts. Raises InvalidJob."""
    if content is None and has_calls:
        return ""
    if isinstance(content, list):
        return [_part(part, number) for part in content]
    return checked_text(content, f"content of message {number}")


def _part(part: object, number: int) -> dict[str, Any]:
    """Return a part of a message's content: a text or a picture. Raises InvalidJob."""
    values: dict[str, Any] = {}
    if isinstance(part, dict):
        values = {key: value for key, value in part.items() if value is not None}
    is_image = values.keys() == {"type", "image"} and values["type"] == "image"
    if is_image and isinstance(values["image"], bytes):
        return values  # JSON has no bytes, so this part has been parsed already
    if values.get("type") == "image_url":
        return {"type": "image", "image": _picture(values, number)}
    if values.keys() != {"type", "text"} or values["type"] != "text":
        raise InvalidJob(
            f"a part of message {number} must be {{'type': 'text', 'text': ...}} or an image_url: "
            "no audio, video or files are read"
        )
    return {"type": "text", "text": checked_text(values["text"], f"content of message {number}")}


def _picture(part: dict[str, Any], number: int) -> Picture:
    """Return the picture of an image_url. Raises InvalidJob.

    `detail` changes nothing, because a picture is read in its own size.
    """
    image_url = part.get("image_url")
    if not isinstance(image_url, dict):  # some clients send the URL itself
        image_url = {"url": image_url}
    url = image_url.get("url")
    has_known_keys = part.keys() == {"type", "image_url"} and image_url.keys() <= {"url", "detail"}
    if not has_known_keys or not isinstance(url, str):
        raise InvalidJob(
            f"a picture of message {number} must be {{'type': 'image_url', 'image_url': {{'url': ...}}}}"
        )
    detail = image_url.get("detail")
    if detail not in (None, "auto", "high"):
        raise wrong_value_error(
            f"detail of a picture of message {number}", detail, "'auto' or 'high'"
        )
    return picture_of(url, f"a picture of message {number}")


def _call(call: Any, number: int) -> dict[str, Any]:
    """Return a message's tool call in its normal form. Raises InvalidJob."""
    is_call = isinstance(call, dict) and call.get("type", "function") == "function"
    function = call.get("function") if is_call else None
    if not isinstance(function, dict) or "name" not in function:
        raise InvalidJob(
            f"a tool call of message {number} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}"
        )
    call_name = f"tool call of message {number}"  # for errors
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        arguments = checked_text(arguments, f"the arguments of a {call_name}")
    normal = {
        "type": "function",
        "function": {"name": checked_text(function["name"], call_name), "arguments": arguments},
    }
    if call.get("id") is not None:
        normal["id"] = checked_text(call["id"], f"the id of a {call_name}")
    return normal


def _num_bytes(value: Any) -> int:
    """Return how many bytes of text a field of a message has. value: a text, a list of parts, or a list of calls."""
    if isinstance(value, str):
        return len(value.encode())
    are_parts = bool(value) and "function" not in value[0]  # each call has a function
    if are_parts:
        return sum(len(part.get("text", "").encode()) for part in value)
    try:
        return len(json.dumps(value))
    except RecursionError:
        raise InvalidJob("the arguments of a tool call are nested too deeply") from None


#: The options that a chat has beside its sampling values.
CHAT_OPTIONS = (*CHAT_ONLY, SPLIT_TOKENS)

#: Keyword arguments of engine.Engine.chat_token_ids. With `tools`, answers are searched for calls of these tools.
ChatOptions = Mapping[str, Any]


class ChatArguments(NamedTuple):
    """A chat's keyword arguments: sampling values for the engine, and options for the chat's template."""

    sampling: dict[str, Any]
    options: ChatOptions


def split_chat_options(values: Mapping[str, Any]) -> ChatArguments:
    """Split a chat's keyword arguments into sampling values and options. Raises InvalidJob."""
    sampling = {name: value for name, value in values.items() if name not in CHAT_OPTIONS}
    variables = values.get("chat_template_kwargs") or {}
    tools = _tools(values.get("tools") or [])
    if not isinstance(variables, dict):
        raise InvalidJob(f"chat_template_kwargs is {type(variables).__name__}, expected an object")
    if values.get(EFFORT) is not None:
        variables = {**variables, EFFORT: checked_text(values[EFFORT], EFFORT)}
    choice = values.get("tool_choice")
    if forces_call(values):
        # The engine forces the call while it samples, so the choice becomes a sampling value.
        sampling["tool_choice"] = _forced_choice(choice, tools)

    options: dict[str, Any] = {}
    if variables:
        options["chat_template_kwargs"] = variables
    if tools and choice != "none":
        options["tools"] = tools
    if not splits_control_tokens(values):
        options[SPLIT_TOKENS] = False
    return ChatArguments(sampling, options)


def forces_call(values: Mapping[str, Any]) -> bool:
    """Whether a chat's keyword arguments force its answer to be a call of a tool."""
    return values.get("tool_choice") not in (None, "auto", "none")


def _forced_choice(choice: object, tools: list[dict[str, Any]]) -> object:
    """Return the normal form of a `tool_choice` that forces a call. Raises InvalidJob if no tool fits the choice."""
    if not tools:
        raise InvalidValue(
            "tool_choice is {}, and no tools are given that it could call", brief(choice)
        )
    if choice == "required":
        return choice
    function = _function_in(choice)
    if not isinstance(function.get("name"), str):
        expected = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise wrong_value_error("tool_choice", choice, expected)
    offered_names = [tool["function"]["name"] for tool in tools]
    if function["name"] not in offered_names:
        raise InvalidValue(
            "tool_choice names {}, which is none of the tools", brief(function["name"])
        )
    return {"type": "function", "function": {"name": function["name"]}}


def _function_in(value: object) -> dict[str, Any]:
    """Return the inner object of {'type': 'function', 'function': {...}}; {} for a value of another form."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return {}
    function = value.get("function")
    return function if isinstance(function, dict) else {}


def _tools(tools: object) -> list[dict[str, Any]]:
    """Return a chat's tools as they are. Raises InvalidJob if they are no list of functions with names."""
    if not isinstance(tools, list):
        raise InvalidJob(f"tools is {type(tools).__name__}, expected a list of functions")
    for number, tool in enumerate(tools):
        name = _function_in(tool).get("name")
        if not isinstance(name, str) or not name:
            raise wrong_value_error(
                f"tool {number}",
                tool,
                "an object of type 'function' with a 'function' that has a name",
            )
    return tools
