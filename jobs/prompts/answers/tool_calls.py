"""Calls of tools in an answer's text, as models write them that were given tools.

Two forms are read: Hermes' and Qwen's, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere
in a text; and Llama 3's, `{"name": ..., "parameters": {...}}`, which is the whole text, several parted by
`;`. What is no such call stays in the content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"

_DECODER = json.JSONDecoder()


def parse_tool_calls(text: str) -> tuple[list[dict[str, Any]], str]:
    """The functions that a text calls, as {'name', 'arguments': their JSON}, and what is left of it."""
    calls, content = _hermes(text)
    if calls:
        return calls, content.strip()
    calls = _llama(text)
    return (calls, "") if calls else ([], text)


def with_ids(calls: list[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls`. seed: names the answer, so that ids are the same whenever it is given."""
    return [
        {
            "id": "call_" + blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest(),
            "type": "function",
            "function": function,
        }
        for number, function in enumerate(calls)
    ]


def _hermes(text: str) -> tuple[list[dict[str, Any]], str]:
    calls, kept, at = [], [], 0
    while (place := text.find(OPEN, at)) >= 0:
        kept.append(text[at:place])
        found = _value_at(text, place + len(OPEN))
        function = None if found is None else _function(found[0])
        at = place + len(OPEN)
        if found is not None and function is not None:
            rest = text[found[1] :]
            behind = len(rest) - len(rest.lstrip())
            if rest.startswith(CLOSE, behind) or behind == len(rest):
                calls.append(function)
                at = min(len(text), found[1] + behind + len(CLOSE))
                continue
        kept.append(OPEN)
    return calls, "".join((*kept, text[at:]))


def _llama(text: str) -> list[dict[str, Any]]:
    """All calls of a text that holds nothing else; none of any other."""
    text = text.strip().removeprefix(LLAMA_TAG).strip()
    calls, at = [], 0
    while at < len(text):
        found = _value_at(text, at)
        if found is None:
            return []
        value, at = found
        for each in value if isinstance(value, list) else [value]:
            function = _function(each)
            if function is None:
                return []
            calls.append(function)
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
    return calls


def _value_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that stands there, behind blanks, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _function(call: Any) -> dict[str, Any] | None:
    """A function's name and its arguments as JSON; None for what is no call."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        found = _value_at(arguments, 0)
        arguments = None if found is None or arguments[found[1] :].strip() else found[0]
    if not isinstance(arguments, Mapping) or not _is_valid(call["name"]):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN, or a number beyond all that JSON's readers hold
        return None
    # half of a surrogate pair, which a model may write as an escape, stays one: no file takes it otherwise
    return {"name": call["name"], "arguments": written if _is_valid(written) else json.dumps(arguments)}


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
