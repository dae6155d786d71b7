"""Reads the JSON body of a request, within bounds."""

import asyncio
import json
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tokenmill.server.errors import ApiError

#: The most bytes of a body. The pictures of a prompt have at most 20 MiB, a third more in base64.
MAX_BODY_BYTES = 32 << 20
#: Seconds within which a body must have come.
BODY_S = 60.0


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
    try:
        return await run_in_threadpool(json.loads, b"".join(chunks))
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
