"""TemplateProbe: finds what a template leaves out of a chat. It renders a twin of the chat with marks for texts."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from engine.errors import InvalidPrompt

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]

MAX_SHAPES = 256  # shapes of chats whose rendered twin is remembered

#: A message and a tool that any template takes.
HELLO = {"role": "user", "content": "text"}
TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "text",
        "parameters": {"type": "object", "properties": {}},
    },
}

TAKES_NO_TOOLS = "this model's chat template takes no tools: leave them out, or name another one"


class TemplateProbe:
    """Finds which parts of a chat a template writes. render: renders a chat, and raises what the template raises."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._text_of = lru_cache(maxsize=MAX_SHAPES)(self._render_twin)
        self._logged: set[str] = set()

    def texts(self, messages: Messages) -> list[str]:
        """Render messages without tools and with one. A text is missing if the template raises."""
        rendered = []
        for tools in (None, [TOOL]):
            with suppress(Exception):  # a template may raise anything; then it shows nothing
                rendered.append(self._render(messages, tools=tools))
        return rendered

    def shows_role(self, role: str) -> bool:
        """Whether the template shows a message of this role before the user's first message."""
        mark = _mark(0)
        return any(mark in text for text in self.texts([{"role": role, "content": mark}, HELLO]))

    def takes_short_ids_alone(self) -> bool:
        """Whether the template takes only tool call ids of nine letters and digits, as Mistral's does."""
        short, usual = (self.texts(_called(call_id)) for call_id in (_mark(0), "call_" + 24 * "0"))
        return bool(short) and not usual

    def check(self, messages: Messages, tools: Tools | None, variables: dict[str, Any]) -> None:
        """Raise InvalidPrompt for tools, messages and tool calls that the template leaves out.

        Many templates leave out names, ids, and text beside a call. These are not refused but logged, once each.
        """
        twin = _Twin(messages, tools)
        try:
            text = self._text_of(json.dumps([twin.messages, twin.tools, variables]))
        except Exception:  # noqa: BLE001 - a template that takes no marks cannot be asked
            return
        for mark, problem in twin.needed.items():
            if mark not in text:
                raise InvalidPrompt(problem)
        for mark, subject in twin.optional.items():
            if mark not in text and subject not in self._logged:
                self._logged.add(subject)
                logger.warning(
                    "this model's chat template does not read %s: left out here and from now on",
                    subject,
                )

    def _render_twin(self, key: str) -> str:
        messages, tools, variables = json.loads(key)
        return self._render(messages, tools=tools, **variables)


def _called(call_id: str) -> Messages:
    """Return a chat in which the assistant has called a tool, and the tool has answered."""
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "tool", "arguments": {"text": "text"}},
    }
    answer = {"role": "tool", "content": "text", "tool_call_id": call_id, "name": "tool"}
    return [HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def _mark(number: int) -> str:
    """Return a text that no template has. Nine letters and digits, as some templates demand of a call's id."""
    return f"Q{number:08}"


class _Twin:
    """A chat with marks in place of its texts. It is rendered to see which texts the template writes.

    needed: marks without which the chat is refused, each with the reason to give. optional: marks whose absence is
    only logged, each with the name of what the template leaves out.
    """

    def __init__(self, messages: Messages, tools: Tools | None) -> None:
        self._num_marks = 0
        self._ids: dict[str, str] = {}  # marks by the id of a tool call
        self.needed: dict[str, str] = {}
        self.optional: dict[str, str] = {}
        self.messages = [self._message(message, number) for number, message in enumerate(messages)]
        self.tools = None if tools is None else [self._tool(tool) for tool in tools]

    def _new_mark(self) -> str:
        self._num_marks += 1
        return _mark(self._num_marks)

    def _needed_mark(self, problem: str) -> str:
        mark = self._new_mark()
        self.needed[mark] = problem
        return mark

    def _logged_mark(self, subject: str) -> str:
        mark = self._new_mark()
        self.optional[mark] = subject
        return mark

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        return {**tool, "function": {**tool["function"], "name": self._needed_mark(TAKES_NO_TOOLS)}}

    def _message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        twin = {**message}
        calls = message.get("tool_calls") or ()
        if "content" in message:
            twin["content"] = self._content(
                message["content"], number, message["role"], has_calls=bool(calls)
            )
        for name in ("reasoning", "reasoning_content"):
            # Templates leave out earlier turns' reasoning on purpose.
            if name in message:
                twin[name] = self._new_mark()
        if isinstance(message.get("name"), str):
            twin["name"] = self._logged_mark("the `name` of messages")
        if isinstance(message.get("tool_call_id"), str):
            twin["tool_call_id"] = self._id(message["tool_call_id"])
        if calls:
            twin["tool_calls"] = [self._call(call, number) for call in calls]
        return twin

    def _content(self, content: Any, number: int, role: str, *, has_calls: bool) -> Any:
        if isinstance(content, list):
            parts = []
            for part in content:
                if isinstance(part.get("text"), str):
                    text = self._content(part["text"], number, role, has_calls=has_calls)
                    part = {**part, "text": text}
                parts.append(part)
            return parts
        if not isinstance(content, str) or not content.strip():
            return content
        if has_calls:
            return self._logged_mark("text beside tool calls")
        return self._needed_mark(
            f"this model's chat template leaves out message {number}, of the role {role[:64]!r}: give it another role "
            "or place, or leave it out"
        )

    def _id(self, name: str) -> str:
        if name not in self._ids:
            self._ids[name] = self._logged_mark("ids of tool calls")
        return self._ids[name]

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        problem = (
            f"this model's chat template leaves out the tool calls of message {number}: name another template, or "
            "write the call into the content"
        )
        function = call["function"]
        arguments = {
            self._needed_mark(problem): self._needed_mark(problem) for _ in function["arguments"]
        }
        twin = {
            **call,
            "function": {**function, "name": self._needed_mark(problem), "arguments": arguments},
        }
        if isinstance(call.get("id"), str):
            twin["id"] = self._id(call["id"])
        return twin
