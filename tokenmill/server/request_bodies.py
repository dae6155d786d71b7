"""Reads the JSON body of a request, within bounds."""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tokenmill.server.errors import ApiError

#: The most bytes of a body. The pictures of a prompt have at most 20 MiB, a third more in base64.
MAX_BODY_BYTES = 32 << 20
#: The most bytes of all bodies together. A body counts from its first byte until its job is in Redis.
MAX_HELD_BYTES = 128 << 20
#: Bodies below this size are parsed on the event loop, because a thread would cost more.
SMALL_BYTES = 16 << 10
#: Bodies from this size on are parsed one at a time, because parsing takes several times a body's size.
LARGE_BYTES = 1 << 20
#: The most seconds in which a body must come.
BODY_S = 60.0
#: The most commas and opening brackets of a body: each may become an object of many bytes.
MAX_MARKS = 1_000_000
#: The most levels of nested objects and lists, because code that reads them is recursive.
MAX_DEPTH = 64
T = TypeVar("T")
#: An escape of half of a surrogate pair.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class HeldBody:
    """The body of one request. value: the parsed JSON; None before `read` and after `let_go`."""

    def __init__(self, bodies: "Bodies") -> None:
        self.value: Any = None
        self._bodies = bodies
        self._num_bytes = 0

    async def read(self, request: Request) -> None:
        """Read and parse the body of a request. Raises ApiError if it is too large, too slow or not JSON."""
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > MAX_BODY_BYTES:
                        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                    self._bodies.take(len(chunk))
                    self._num_bytes += len(chunk)
                    data += chunk
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
        if len(data) < SMALL_BYTES:
            self.value = parsed_body(data)
        elif len(data) < LARGE_BYTES:
            self.value = await run_in_threadpool(parsed_body, data)
        else:
            async with self._bodies.parsing_large:
                self.value = await run_in_threadpool(parsed_body, data)

    async def apply(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function with the arguments and the body's value, and return its result.

        The function is called in a thread, unless the body is small.
        """
        if self._num_bytes < SMALL_BYTES:
            return function(*arguments, self.value)
        return await run_in_threadpool(function, *arguments, self.value)

    def let_go(self) -> None:
        """Drop the value, which is not needed any more, and make room for other bodies."""
        self.value = None
        self._bodies.give_back(self._num_bytes)
        self._num_bytes = 0


class Bodies:
    """The bodies that a server holds. max_bytes: the most bytes of all of them together."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._num_free = max_bytes
        self.parsing_large = asyncio.Lock()

    @contextmanager
    def held(self) -> Iterator[HeldBody]:
        """A context manager around the body of a request, which is let go at the end of the block at the latest."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            body.let_go()

    def take(self, num_bytes: int) -> None:
        """Count bytes that have been read. Raises ApiError if there is no room for them."""
        if num_bytes > self._num_free:
            raise ApiError(
                503,
                "the server holds as many bytes of requests as it may: try again",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        self._num_free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count bytes that are no longer held."""
        self._num_free += num_bytes


def parsed_body(data: bytes | bytearray) -> Any:
    """Parse JSON and return its value. Raises ApiError for a value that a job cannot hold."""
    num_marks = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_marks > MAX_MARKS:
        raise ApiError(413, f"the body has more than {MAX_MARKS} commas and brackets")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON in UTF-8") from None
    _check_parts(value)
    if _HALF_PAIR.search(data):
        # Two halves may form a pair, which is fine. A half without its other half cannot be encoded.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "a text of the body has half of a surrogate pair") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_parts(value: Any) -> None:
    """Raise ApiError for infinite numbers, and for more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts: list[Any] = []
        for part in level:
            if isinstance(part, float) and not math.isfinite(part):
                raise ApiError(400, "a number of the body is too large")
            if isinstance(part, dict):
                parts += part.values()
            elif isinstance(part, list):
                parts += part
        level = parts
        if not level:
            return
    raise ApiError(400, f"the body has more than {MAX_DEPTH} objects and lists within each other")
