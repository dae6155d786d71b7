"""A body that no job could hold is refused at the door."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from tokenmill.server.answers.bodies import call_of
from tokenmill.server.answers.response_bodies import response_call
from tokenmill.server.errors import ApiError
from tokenmill.server.request_bodies import (
    LARGE_BYTES,
    MAX_DEPTH,
    MAX_MARKS,
    Bodies,
    HeldBody,
    parsed_body,
)


def request_of(data: bytes, chunk_bytes: int = 1000) -> Request:
    """Return a request whose body comes in chunks."""
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def read(bodies: Bodies, data: bytes) -> HeldBody:
    body = HeldBody(bodies)
    await body.read(request_of(data))
    return body


def test_bodies_have_a_bound_together_until_each_is_let_go() -> None:
    async def ask() -> None:
        bodies = Bodies(3000)
        data = json.dumps({"prompt": "x" * 2000}).encode()
        first = await read(bodies, data)
        assert first.value == {"prompt": "x" * 2000}
        with bodies.held() as second, pytest.raises(ApiError) as caught:
            await second.read(request_of(data))
        assert caught.value.status == 503
        assert caught.value.headers["retry-after"] == "1"

        first.let_go()
        assert first.value is None
        first.let_go()
        third = await read(bodies, data)
        with bodies.held() as fourth, pytest.raises(ApiError):
            await fourth.read(request_of(data))
        third.let_go()
        await read(bodies, data)

    asyncio.run(ask())


def test_large_bodies_are_read_too() -> None:
    data = json.dumps("x" * LARGE_BYTES).encode()

    async def ask() -> list[HeldBody]:
        bodies = Bodies()
        return await asyncio.gather(*(read(bodies, data) for _ in range(3)))

    assert [body.value for body in asyncio.run(ask())] == ["x" * LARGE_BYTES] * 3


def test_a_call_that_waits_for_its_answer_holds_no_body() -> None:
    body = {"prompt": "x", "max_tokens": 3}
    call = call_of("/v1/completions", body)
    call.let_arguments_go()
    assert call.arguments == {}


def test_a_body_is_the_value_of_its_json() -> None:
    assert parsed_body('{"a": ["é", 1.5, "\\ud83d\\ude00"]}'.encode()) == {"a": ["é", 1.5, "😀"]}
    assert parsed_body(b"\xef\xbb\xbf1") == 1
    assert parsed_body(b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"temperature": NaN}', 400),
        (b'{"temperature": -Infinity}', 400),
        (b'{"temperature": 1e999}', 400),
        (b"1" * 5000, 400),
        (b'"\\ud800"', 400),
        (b'{"\\uDFFF": 1}', 400),
        (b'"\xed\xa0\x80"', 400),
        ('{"a": 1}'.encode("utf-16"), 400),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), 400),
        (b'{"a":' * 900 + b"1" + b"}" * 900, 400),
        (b"[" + b"0," * MAX_MARKS + b"0]", 413),
        (b"", 400),
    ],
)
def test_a_body_that_no_job_could_hold_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        parsed_body(data)
    assert caught.value.status == status


@pytest.mark.parametrize("value", [True, 5, 1.5, "x", {"a": 1}])
def test_tools_of_a_response_are_a_list(value: object) -> None:
    with pytest.raises(ApiError, match="tools is no list") as caught:
        response_call({"input": "x", "tools": value})
    assert caught.value.status == 400
