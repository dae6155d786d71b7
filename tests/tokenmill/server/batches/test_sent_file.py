"""A file that is deleted between its look-up and its sending is a 404, or a cut answer, and no traceback."""

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from tokenmill.server.batches.file_store import missing
from tokenmill.server.batches.sent_file import SentFile

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}


def sent(path: Path, scope: dict[str, Any] = SCOPE) -> list[Any]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    response = SentFile(path, missing("file", "file-1"))
    response.headers["x-request-id"] = "req_1"
    asyncio.run(response(scope, receive, send))
    return messages


def test_a_file_is_sent_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    start, *body = sent(file)
    assert start["status"] == 200
    assert b"".join(part["body"] for part in body) == b"abc"


def test_a_file_that_is_gone_is_not_found(tmp_path: Path) -> None:
    start, body = sent(tmp_path / "gone")
    assert start["status"] == 404
    assert (b"x-request-id", b"req_1") in start["headers"]
    assert b"no file has the id" in body["body"]


@pytest.mark.parametrize("headers", [[], [(b"range", b"bytes=0-1")]])
def test_a_file_that_goes_behind_its_headers_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: Any
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    opened = anyio.open_file

    async def open_late(*args: Any, **options: Any) -> Any:
        os.unlink(file)
        return await opened(*args, **options)

    monkeypatch.setattr("starlette.responses.anyio.open_file", open_late)
    messages = sent(file, {**SCOPE, "headers": headers})
    whole = [each for each in messages if each["type"] == "http.response.body"]
    assert not any(each.get("body") for each in whole)
