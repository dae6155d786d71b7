"""Reads the JSON body of a request, within bounds."""

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tokenmill.server.errors import ApiError

#: The most bytes of a body. The pictures of a prompt have at most 20 MiB, a third more in base64.
MAX_BODY_BYTES = 32 << 20
#: The most seconds until a body is here.
BODY_S = 60.0
#: The most commas and brackets of a body: each may become an object of many times its size.
MAX_MARKS = 1_000_000
#: The most levels of nested objects and lists. Code that reads them is recursive.
MAX_DEPTH = 64
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


async def json_body(request: Request) -> Any:
    """Return a request's body. Raises ApiError for one that is too large, too slow or no JSON."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
    return await run_in_threadpool(parsed_body, b"".join(chunks))


def parsed_body(data: bytes) -> Any:
    """Parse JSON. Raises ApiError for a value that a job could not hold."""
    num_marks = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if num_marks > MAX_MARKS:
        raise ApiError(413, f"the body has more than {MAX_MARKS} commas and brackets")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON in UTF-8") from None
    _check_parts(value)
    if _HALF_PAIR.search(data):
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
