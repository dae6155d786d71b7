"""What a worker and its child send each other: a message in JSON, and bytes behind it."""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

_LENGTHS = struct.Struct("!QQ")

#: What a child ends with that has no memory for what it is sent.
OUT_OF_MEMORY = 77

#: Seconds in one call of the system: an error that another thread raises into this one comes in between.
_WAIT_S = 1.0


class TooLate(Exception):
    """Raised where nothing came in time."""


def send(
    channel: socket.socket, message: Mapping[str, Any], body: bytes | memoryview = b"", limit_s: float | None = None
) -> None:
    """Raises OSError where nobody reads."""
    text = json.dumps(message).encode()
    channel.settimeout(limit_s)
    channel.sendall(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        channel.sendall(body)


def receive(channel: socket.socket, most: int, limit_s: float | None = None) -> tuple[dict[str, Any], bytearray]:
    """Return the next message and the bytes behind it.

    most: bytes of a message at most. Raises TooLate after limit_s, EOFError where the other side has ended,
    OSError.
    """
    until = None if limit_s is None else time.monotonic() + limit_s
    lengths = _LENGTHS.unpack(_read(channel, _LENGTHS.size, until))
    if sum(lengths) > most:
        raise OSError(f"a message of {sum(lengths)} bytes, more than {most}")
    message: dict[str, Any] = json.loads(_read(channel, lengths[0], until))
    return message, _read(channel, lengths[1], until)


def _read(channel: socket.socket, size: int, until: float | None) -> bytearray:
    found = bytearray(size)
    place = memoryview(found)
    while place:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TooLate
        channel.settimeout(None if left is None else min(left, _WAIT_S))
        try:
            count = channel.recv_into(place)
        except TimeoutError:
            continue
        if count == 0:
            raise EOFError
        place = place[count:]
    return found
