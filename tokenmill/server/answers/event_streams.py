"""Answers as server-sent events: the text as it grows, then what is only known at the end.

Source: OpenAI's API reference, "Streaming" of chats and completions.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.server.answers.bodies import Call
from tokenmill.server.answers.jobs_asked import TextPiece
from tokenmill.server.answers.sent_texts import SentTexts
from tokenmill.server.errors import ApiError

DONE = b"data: [DONE]\n\n"


@dataclass
class EventStream:
    """The events of one answer. job_id: names it. created: Unix seconds."""

    job_id: str
    call: Call
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._sent = SentTexts(self.job_id)

    @property
    def is_chat(self) -> bool:
        """Whether it answers a chat."""
        return self.call.function == "jobs.chat"

    async def events(self, answer: AsyncIterator[TextPiece | bytes]) -> AsyncIterator[bytes]:
        """Yield the events of an answer. If it fails, the error is the last event."""
        try:
            async for part in answer:
                if isinstance(part, TextPiece):
                    for event in self._of_piece(part):
                        yield event
                else:
                    for event in self._of_whole(json.loads(part)):
                        yield event
            yield DONE
        except ApiError as error:
            yield b"data: " + error.response.body + b"\n\n"

    def _of_piece(self, piece: TextPiece) -> list[bytes]:
        new_text = self._sent.take(piece)
        return self._grown(piece.sample, piece.part, new_text) if new_text else []

    def _grown(self, index: int, part: str, new_text: str) -> list[bytes]:
        if self.is_chat:
            name = "content" if part == "text" else part
            return [*self._opening(index), self._chunk(index, delta={name: new_text})]
        if part == "text":
            return [self._chunk(index, text=new_text)]
        return [self._chunk(index, text="", reasoning=new_text)]

    def _opening(self, index: int) -> list[bytes]:
        """Return the first event of a chat's choice, once."""
        if index in self._begun or not self.is_chat:
            return []
        self._begun.add(index)
        return [self._chunk(index, delta={"role": "assistant", "content": ""})]

    def _of_whole(self, whole: dict[str, Any]) -> list[bytes]:
        """Return events with the rest of each text, and with the end of each choice."""
        self.model = whole.get("model", self.model)
        events: list[bytes] = []
        for choice in whole["choices"]:
            index = choice["index"]
            events += self._opening(index)
            message = choice["message"] if self.is_chat else choice
            whole_texts = {
                "reasoning": message.get("reasoning") or "",
                "text": message.get("content" if self.is_chat else "text") or "",
            }
            for part, whole_text in whole_texts.items():
                new_text = self._sent.rest(index, part, whole_text)
                if new_text:
                    events += self._grown(index, part, new_text)
            events.append(self._ended(index, choice, message))
        if self.call.with_usage:
            events.append(self._event({"choices": [], "usage": whole["usage"]}))
        return events

    def _ended(self, index: int, choice: dict[str, Any], message: dict[str, Any]) -> bytes:
        """Return the last event of a choice: its calls, log probabilities, finish reason and error."""
        ending = {
            name: choice[name]
            for name in ("finish_reason", "logprobs", "error", "tool_call_error")
            if name in choice
        }
        if not self.is_chat:
            return self._chunk(index, text="", **ending)
        calls = message.get("tool_calls")
        delta: dict[str, Any] = {}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        return self._chunk(index, delta=delta, **ending)

    def _chunk(self, index: int, **values: Any) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **values}
        return self._event({"choices": [choice]})

    def _event(self, values: dict[str, Any]) -> bytes:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        content = {
            "id": f"{prefix}-{self.job_id}",
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            **values,
        }
        return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
