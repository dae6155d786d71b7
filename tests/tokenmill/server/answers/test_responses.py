"""`/v1/responses` through OpenAI's client, whole and streamed."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.tokenmill.server.conftest import Served
from tokenmill.server.answers.jobs_asked import TextPiece
from tokenmill.server.answers.response_bodies import response_call
from tokenmill.server.answers.response_stream import ResponseStream
from tokenmill.server.errors import ApiError


def chat_of(**body: Any) -> dict[str, Any]:
    return dict(response_call({"input": "x", **body}).arguments)


def test_a_response_has_openais_type(served: Served) -> None:
    answer = served.client.responses.create(
        model="fake", input="hello", instructions="be brief", max_output_tokens=3, store=False
    )
    assert answer.output_text.startswith("echo:")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert answer.id.startswith("resp_")


def test_a_streamed_response_ends_with_the_whole_one(served: Served) -> None:
    events = list(
        served.client.responses.create(
            model="fake", input="hello", max_output_tokens=3, stream=True
        )
    )
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert [each.sequence_number for each in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("store", True),
        ("background", True),
        ("tools", [{"type": "web_search"}]),
        ("include", ["reasoning.encrypted_content"]),
        ("truncation", "auto"),
        ("input", [{"type": "computer_call"}]),
        ("input", 5),
        ("input", []),
        ("no_such_option", 1),
    ],
)
def test_what_is_not_built_is_refused_by_name(served: Served, name: str, value: Any) -> None:
    body = {"model": "fake", "input": "x", name: value}
    with pytest.raises(openai.BadRequestError, match=name.split("_")[0]):
        served.client.post("/responses", cast_to=object, body=body)


def test_items_become_the_messages_of_a_chat() -> None:
    messages = chat_of(
        instructions="brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "what is"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text"}]},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                ],
            },
        ],
    )["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert messages[1]["content"] == "what is"
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert messages[5]["content"][1]["type"] == "image_url"


def test_formats_and_tools_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    chat = chat_of(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    )
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": schema, "strict": True}
    chat = chat_of(
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": False}],
        tool_choice={"type": "function", "name": "f"},
    )
    assert chat["tools"][0]["function"]["name"] == "f"
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ApiError, match="format"):
        chat_of(text={"format": {"type": "xml"}})


#: OpenAI's types of events, by their names.
EVENT_TYPES = {
    get_args(event_type.model_fields["type"].annotation)[0]: event_type
    for event_type in get_args(get_args(ResponseStreamEvent)[0])
}
USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "text"},
        {"content": "text", "reasoning": "thought"},
        {"content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"content": "text", "reasoning": "thought", "tool_calls": [CALL]},
        {"content": ""},
    ],
)
def test_events_tell_what_the_whole_response_holds(message: dict[str, Any]) -> None:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"choices": [choice], "usage": USAGE, "model": "m"}
    body = {"model": "m", "input": "x"}

    async def parts() -> AsyncIterator[TextPiece | bytes]:
        if message.get("reasoning"):
            yield TextPiece(0, "reasoning", 0, "tho")
        if message.get("reasoning") is None and message.get("content"):
            yield TextPiece(0, "text", 0, "te")
        yield json.dumps(answer).encode()

    async def read() -> list[dict[str, Any]]:
        events = []
        async for event in ResponseStream("id", body, created=1).events(parts()):
            name, data = event.decode().strip().split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    events = asyncio.run(read())
    for event in events:
        EVENT_TYPES[event["type"]].model_validate(event)
    whole = ResponseStream("id", body, created=1).whole(answer)
    assert events[-1]["response"] == whole
    parsed = Response.model_validate(whole)
    assert parsed.output_text == (message["content"] or "")
    assert [item.type for item in parsed.output if item.type == "function_call"] == [
        "function_call" for _ in message.get("tool_calls", ())
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
