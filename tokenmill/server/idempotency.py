"""Remembers which job, file or batch a client's `Idempotency-Key` has made, so that a retry makes no second one.

Source: draft-ietf-httpapi-idempotency-key-header. As there, another body under the same key is a 422. A retry that
comes before the first answer is a 409 there. Here it waits for that answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from jobs.common import stored
from jobs.common.keys import api_once_key
from tokenmill.server.errors import ApiError

HEADER = "idempotency-key"
MAX_CHARS = 255
#: How long a key is remembered. A day, as in other APIs with the header.
KEPT_S = 24 * 3600


@dataclass(frozen=True)
class Made:
    """What a request makes.

    id: its name. key: where Redis remembers it; None for a request without the header. is_new: whether no earlier
    request has made it.
    """

    id: str
    key: str | None = None
    is_new: bool = True

    @property
    def is_kept(self) -> bool:
        """Whether a later request may ask for it again."""
        return self.key is not None


class IdempotencyKeys:
    """The keys that clients have sent in the last day."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def made(self, request: Request, project: str, body: Any, new_id: str) -> Made:
        """Return what a request makes: `new_id`, or what an earlier request with its key has made.

        body: tells whether two requests ask the same. Raises ApiError for a key with another body, and RedisError.
        """
        key = key_of(request)
        if key is None:
            return Made(new_id)
        asked = {"path": request.scope["path"], "body": body}
        return await run_in_threadpool(self._made, project, key, asked, new_id)

    def _made(self, project: str, key: str, asked: Mapping[str, Any], new_id: str) -> Made:
        name = api_once_key(project, sha256(key.encode()).hexdigest())
        digest = sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        record = json.dumps({"id": new_id, "asked": digest})
        while not self._connection.set(name, record, nx=True, ex=KEPT_S):
            found = self._connection.get(name)
            if found is None:
                continue  # it has expired just now
            known = stored.json_object(found)
            if known.get("asked") != digest:
                raise ApiError(
                    422,
                    "this Idempotency-Key came with another body or path: send a new key",
                    code="idempotency_key_reused",
                )
            return Made(str(known.get("id")), name, is_new=False)
        return Made(new_id, name)

    async def forget(self, made: Made, error: ApiError) -> None:
        """Forget a key whose request has failed, so that a retry is a new one. Raises RedisError.

        A retry that finds no room says nothing of what the first request has made, so its key stays.
        """
        had_no_room = error.status == 429 and not made.is_new
        if made.key is not None and not had_no_room:
            await run_in_threadpool(self._forget, made.key, made.id)

    def _forget(self, key: str, made_id: str) -> None:
        known = stored.json_object(self._connection.get(key) or b"")
        if known.get("id") == made_id:
            self._connection.delete(key)


def key_of(request: Request) -> str | None:
    """Return a request's Idempotency-Key; None without one. Raises ApiError for an empty or long one."""
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= MAX_CHARS:
        raise ApiError(400, f"Idempotency-Key has {len(key)} characters, expected 1 to {MAX_CHARS}")
    return key
