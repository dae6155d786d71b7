"""Files are sent whole, or the range that is asked for; one that is deleted or cut meanwhile brings no traceback."""

import asyncio
import io
from typing import Any

import pytest

from tokenmill.server.batches.sent_file import PIECE_BYTES, SentFile

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "GET",
    "headers": [],
    "asgi": {"spec_version": "2.4"},
}


def sent(source: io.BytesIO, size: int, wanted: str | None = None) -> tuple[Any, bytes]:
    """Return the message that begins the answer, and its body."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    asyncio.run(SentFile(source, size, wanted)(SCOPE, receive, send))
    assert source.closed
    start, *rest = messages
    return start, b"".join(message["body"] for message in rest)


@pytest.mark.parametrize("size", [0, 3, PIECE_BYTES, PIECE_BYTES + 1])
def test_a_file_is_sent_whole(size: int) -> None:
    start, body = sent(io.BytesIO(b"x" * size), size)
    assert (start["status"], body) == (200, b"x" * size)
    assert (b"content-length", str(size).encode()) in start["headers"]


@pytest.mark.parametrize(
    ("wanted", "place", "body"),
    [
        ("bytes=0-0", b"bytes 0-0/10", b"0"),
        ("bytes=2-4", b"bytes 2-4/10", b"234"),
        ("bytes=7-", b"bytes 7-9/10", b"789"),
        ("bytes=7-99", b"bytes 7-9/10", b"789"),
        ("bytes=-3", b"bytes 7-9/10", b"789"),
        ("bytes=-99", b"bytes 0-9/10", b"0123456789"),
    ],
)
def test_a_range_is_sent_alone(wanted: str, place: bytes, body: bytes) -> None:
    start, found = sent(io.BytesIO(b"0123456789"), 10, wanted)
    assert (start["status"], found) == (206, body)
    assert (b"content-range", place) in start["headers"]


@pytest.mark.parametrize("wanted", ["bytes=10-", "bytes=5-4", "bytes=-0"])
def test_a_range_that_the_file_does_not_have_is_refused(wanted: str) -> None:
    start, body = sent(io.BytesIO(b"0123456789"), 10, wanted)
    assert (start["status"], body) == (416, b"")
    assert (b"content-range", b"bytes */10") in start["headers"]


@pytest.mark.parametrize("wanted", ["bytes=-", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b"])
def test_a_range_that_is_none_or_several_gets_the_whole_file(wanted: str) -> None:
    start, body = sent(io.BytesIO(b"0123456789"), 10, wanted)
    assert (start["status"], body) == (200, b"0123456789")


def test_a_file_that_is_cut_while_it_is_sent_lacks_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    start, body = sent(io.BytesIO(b"abc"), 10)
    assert (b"content-length", b"10") in start["headers"]
    assert body == b"abc"
