"""Streams chats and completions as server-sent events: first the text as it grows, then what is known at the end.

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
    """Makes the events of one answer. job_id: for the events' id. created: Unix seconds."""

    job_id: str
    call: Call
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    #: The numbers of the choices whose first event was made. Only the choices of a chat have such an event.
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._sent = SentTexts(self.job_id)

    @property
    def is_chat(self) -> bool:
        """Whether the call is a chat."""
        return self.call.function == "jobs.chat"

    async def events(self, answer: AsyncIterator[TextPiece | bytes]) -> AsyncIterator[bytes]:
        """Yield the events of an answer. If the answer raises ApiError, the last event is that error.

        answer: pieces of the text, and then the job's value as JSON.
        """
        try:
            async for part in answer:
                if isinstance(part, TextPiece):
                    events = self._piece_events(part)
                else:
                    events = self._final_events(json.loads(part))
                for event in events:
                    yield event
            yield DONE
        except ApiError as error:
            yield b"data: " + error.response.body + b"\n\n"

    def _piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return the events for a piece of a text; [] if it adds nothing to what was sent."""
        new_text = self._sent.take(piece)
        if not new_text:
            return []
        return self._text_events(piece.sample, piece.part, new_text)

    def _text_events(self, index: int, part: str, new_text: str) -> list[bytes]:
        """Return the events that add to a text of a choice. part: "text" or "reasoning"."""
        if self.is_chat:
            name = "content" if part == "text" else part
            return [*self._opening(index), self._chunk(index, delta={name: new_text})]
        if part == "text":
            return [self._chunk(index, text=new_text)]
        return [self._chunk(index, text="", reasoning=new_text)]

    def _opening(self, index: int) -> list[bytes]:
        """Return the first event of a chat's choice; [] if it was returned before, or for a completion."""
        if index in self._begun or not self.is_chat:
            return []
        self._begun.add(index)
        return [self._chunk(index, delta={"role": "assistant", "content": ""})]

    def _final_events(self, value: dict[str, Any]) -> list[bytes]:
        """Return the events for a job's value: the rest of each text, the end of each choice, and the usage."""
        self.model = value.get("model", self.model)
        events: list[bytes] = []
        for choice in value["choices"]:
            index = choice["index"]
            events += self._opening(index)
            if self.is_chat:
                message = choice["message"]
                text = message.get("content") or ""
            else:
                message = choice
                text = choice.get("text") or ""
            reasoning = message.get("reasoning") or ""
            for part, whole_text in (("reasoning", reasoning), ("text", text)):
                new_text = self._sent.rest(index, part, whole_text)
                if new_text:
                    events += self._text_events(index, part, new_text)
            events.append(self._ending(index, choice, message))
        if self.call.with_usage:
            events.append(self._event({"choices": [], "usage": value["usage"]}))
        return events

    def _ending(self, index: int, choice: dict[str, Any], message: dict[str, Any]) -> bytes:
        """Return the last event of a choice: its tool calls, log probabilities, finish reason and error."""
        values = {}
        for name in ("finish_reason", "logprobs", "error", "tool_call_error"):
            if name in choice:
                values[name] = choice[name]
        if not self.is_chat:
            return self._chunk(index, text="", **values)
        delta: dict[str, Any] = {}
        calls = message.get("tool_calls")
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return self._chunk(index, delta=delta, **values)

    def _chunk(self, index: int, **values: Any) -> bytes:
        """Return an event about one choice."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, **values}
        return self._event({"choices": [choice]})

    def _event(self, values: dict[str, Any]) -> bytes:
        """Return an event with these values, and with those that all events have."""
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        content = {
            "id": f"{prefix}-{self.job_id}",
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            **values,
        }
        return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
