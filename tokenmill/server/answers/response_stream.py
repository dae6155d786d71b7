"""The response objects of `/v1/responses`, and the events of streamed ones.

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
    """Makes the response object of a chat's answer, or its events. created: Unix seconds.

    job_id: for the response's id. body: the values of the request's body.
    """

    job_id: str
    body: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    #: The number of the next event.
    _sequence: int = 0
    #: The items that are complete.
    _output: list[dict[str, Any]] = field(default_factory=list)
    #: The item whose text still grows.
    _open: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._sent = SentTexts(self.job_id)

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the OpenAI object of a response. answer: the value of the chat's job."""
        return response_object(answer, self.body, self.job_id, self.created)

    async def events(self, answer: AsyncIterator[TextPiece | bytes]) -> AsyncIterator[bytes]:
        """Yield the events of an answer. If the answer raises ApiError, the last event is that error.

        answer: pieces of the text, and then the job's value as JSON.
        """
        try:
            yield self._event("response.created", response=self._response(None, []))
            yield self._event("response.in_progress", response=self._response(None, []))
            async for part in answer:
                if isinstance(part, TextPiece):
                    events = self._piece_events(part)
                else:
                    events = self._final_events(json.loads(part))
                for event in events:
                    yield event
        except ApiError as error:
            yield self._event("error", code=error.code, message=error.message, param=error.param)

    def _piece_events(self, piece: TextPiece) -> list[bytes]:
        """Return the events for a piece of the text; [] if it adds nothing to what was sent."""
        new_text = self._sent.take(piece)
        if not new_text:
            return []
        return self._text_events(piece.part, new_text)

    def _final_events(self, answer: Mapping[str, Any]) -> list[bytes]:
        """Return the events for the whole answer: the rest of the texts, the tool calls, and the response's end."""
        (choice,) = answer["choices"]
        message = choice["message"]
        events: list[bytes] = []
        reasoning = message.get("reasoning") or ""
        text = message.get("content") or ""
        for part, whole_text in (("reasoning", reasoning), ("text", text)):
            new_text = self._sent.rest(0, part, whole_text)
            if new_text:
                events += self._text_events(part, new_text)

        calls = message.get("tool_calls") or ()
        is_empty = not self._output and self._open is None and not calls
        if is_empty:
            # A response has at least one item: here a message without text.
            events += self._open_item("message")
        events += self._close_item()
        for call in calls:
            events += self._call_events(call)
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        response = self._response(answer, self._output)
        events.append(self._event(f"response.{status}", response=response))
        return events

    def _text_events(self, part: str, new_text: str) -> list[bytes]:
        """Return the events that add to the text of an item. part: "text" or "reasoning"."""
        item_type = "reasoning" if part == "reasoning" else "message"
        events: list[bytes] = []
        if self._open is None or self._open["type"] != item_type:
            events += self._close_item()
            events += self._open_item(item_type)
        assert self._open is not None
        self._open["content"][0]["text"] += new_text
        if item_type == "reasoning":
            name = "response.reasoning_text.delta"
            events.append(self._event(name, **self._open_part, delta=new_text))
        else:
            name = "response.output_text.delta"
            events.append(self._event(name, **self._open_part, delta=new_text, logprobs=[]))
        return events

    @property
    def _open_part(self) -> dict[str, Any]:
        """Return the fields that identify the open item and its only content part."""
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    def _open_item(self, item_type: str) -> list[bytes]:
        """Open an item with an empty text, and return its events. item_type: "message" or "reasoning"."""
        index = len(self._output)
        self._open = text_item(item_type, self.job_id, index, "")
        part = dict(self._open["content"][0])
        added_item = {**self._open, "status": "in_progress", "content": []}
        return [
            self._event("response.output_item.added", output_index=index, item=added_item),
            self._event("response.content_part.added", **self._open_part, part=part),
        ]

    def _close_item(self) -> list[bytes]:
        """Complete the open item, and return its events; [] if no item is open."""
        if self._open is None:
            return []
        item = self._open
        part = item["content"][0]
        if item["type"] == "reasoning":
            name = "response.reasoning_text.done"
            text_done = self._event(name, **self._open_part, text=part["text"])
        else:
            name = "response.output_text.done"
            text_done = self._event(name, **self._open_part, text=part["text"], logprobs=[])
        events = [
            text_done,
            self._event("response.content_part.done", **self._open_part, part=part),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _call_events(self, call: Mapping[str, Any]) -> list[bytes]:
        """Add an item for a tool call, and return its events."""
        index = len(self._output)
        item = call_item(self.job_id, index, call)
        self._output.append(item)
        item_fields = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        added_item = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=added_item),
            self._event(f"{name}.delta", **item_fields, delta=arguments),
            self._event(f"{name}.done", **item_fields, arguments=arguments, name=item["name"]),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _response(
        self, answer: Mapping[str, Any] | None, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the OpenAI object of the response with these items. answer: None while it is in progress."""
        return response_with(answer, self.body, output, self.job_id, self.created)

    def _event(self, kind: str, **values: Any) -> bytes:
        """Return the next server-sent event. kind: its type, such as "response.created"."""
        content = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
