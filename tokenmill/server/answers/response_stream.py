"""The events of a streamed response of `/v1/responses`.

Source: OpenAI's API reference, "Responses" and "Streaming events".
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.prompts.openai_responses import call_item, response_object, response_with, text_item
from tokenmill.server.answers.jobs_asked import TextPiece
from tokenmill.server.answers.sent_texts import SentTexts
from tokenmill.server.errors import ApiError


@dataclass
class ResponseStream:
    """Makes the response object of an answer, and the events of a streamed one. job_id: names it."""

    job_id: str
    body: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = 0
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._sent = SentTexts(self.job_id)

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return OpenAI's object of a response. answer: the chat's."""
        return response_object(answer, self.body, self.job_id, self.created)

    async def events(self, answer: AsyncIterator[TextPiece | bytes]) -> AsyncIterator[bytes]:
        """Yield the events of an answer. If it fails, the error is the last event."""
        try:
            yield self._event("response.created", response=self._response(None, []))
            yield self._event("response.in_progress", response=self._response(None, []))
            async for part in answer:
                events = (
                    self._of_piece(part) if isinstance(part, TextPiece) else self._of_whole(part)
                )
                for event in events:
                    yield event
        except ApiError as error:
            yield self._event("error", code=error.code, message=error.message, param=error.param)

    def _of_piece(self, piece: TextPiece) -> list[bytes]:
        new_text = self._sent.take(piece)
        return self._grown(piece.part, new_text) if new_text else []

    def _of_whole(self, value: bytes) -> list[bytes]:
        answer = json.loads(value)
        (choice,) = answer["choices"]
        message = choice["message"]
        events: list[bytes] = []
        for part, whole in (
            ("reasoning", message.get("reasoning")),
            ("text", message.get("content")),
        ):
            new_text = self._sent.rest(0, part, whole or "")
            if new_text:
                events += self._grown(part, new_text)
        calls = message.get("tool_calls") or ()
        if not self._output and self._open is None and not calls:
            events += self._opened("message")
        events += self._closed()
        for call in calls:
            events += self._called(call)
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        response = self._response(answer, self._output)
        return [*events, self._event(f"response.{status}", response=response)]

    def _grown(self, part: str, new_text: str) -> list[bytes]:
        kind = "reasoning" if part == "reasoning" else "message"
        events: list[bytes] = []
        if self._open is None or self._open["type"] != kind:
            events += self._closed()
            events += self._opened(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += new_text
        name = (
            "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        )
        extra: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        events.append(self._event(name, **self._place, delta=new_text, **extra))
        return events

    @property
    def _place(self) -> dict[str, Any]:
        """Return what names the open item and its only part."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        return {**place, "content_index": 0}

    def _opened(self, kind: str) -> list[bytes]:
        self._open = text_item(kind, self.job_id, len(self._output), "")
        part = dict(self._open["content"][0])
        shown = {**self._open, "status": "in_progress", "content": []}
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=shown
        )
        return [added, self._event("response.content_part.added", **self._place, part=part)]

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        item = self._open
        part = item["content"][0]
        name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        extra: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        events = [
            self._event(f"response.{name}.done", **self._place, text=part["text"], **extra),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _called(self, call: Mapping[str, Any]) -> list[bytes]:
        index = len(self._output)
        item = call_item(self.job_id, index, call)
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{name}.delta", **place, delta=arguments),
            self._event(f"{name}.done", **place, arguments=arguments, name=item["name"]),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _response(
        self, answer: Mapping[str, Any] | None, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return response_with(answer, self.body, output, self.job_id, self.created)

    def _event(self, kind: str, **values: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
