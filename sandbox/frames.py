"""The frames that a worker and its child send each other: a message in JSON, then bytes."""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

_LENGTHS = struct.Struct("!QQ")

#: The exit status of a child that has no memory for a message.
OUT_OF_MEMORY = 77

#: The most seconds of one system call. An error that another thread raises in this one comes between two calls.
_WAIT_S = 1.0


class TooLate(Exception):
    """Raised if no message came in time."""


def send(
    channel: socket.socket,
    message: Mapping[str, Any],
    body: bytes | memoryview = b"",
    limit_s: float | None = None,
) -> None:
    """Send a message and the bytes that follow it. Raises OSError if the other side does not read.

    limit_s: seconds that the message may take, and the bytes again; None for any time.
    """
    text = json.dumps(message).encode()
    channel.settimeout(limit_s)
    channel.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        channel.sendall(body)


def receive(
    channel: socket.socket, max_bytes: int, limit_s: float | None = None
) -> tuple[dict[str, Any], bytearray]:
    """Return the next message and the bytes that follow it.

    max_bytes: the most bytes of both together. Raises TooLate after limit_s seconds, EOFError if the other side has
    ended, and OSError.
    """
    until = None if limit_s is None else time.monotonic() + limit_s
    lengths = _LENGTHS.unpack(_read(channel, _LENGTHS.size, until))
    if sum(lengths) > max_bytes:
        raise OSError(f"a message of {sum(lengths)} bytes, more than {max_bytes}")
    message_length, body_length = lengths
    message: dict[str, Any] = json.loads(_read(channel, message_length, until))
    return message, _read(channel, body_length, until)


def _read(channel: socket.socket, size: int, until: float | None) -> bytearray:
    """Read `size` bytes. until: monotonic seconds after which TooLate is raised; None for never."""
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        left_s = None if until is None else until - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TooLate
        channel.settimeout(None if left_s is None else min(left_s, _WAIT_S))
        try:
            count = channel.recv_into(rest)
        except TimeoutError:
            continue
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return received
