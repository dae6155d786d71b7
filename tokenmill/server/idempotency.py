"""Remembers what was made for each `Idempotency-Key` of a client, so that a retry makes no second job, file or batch.

Source: draft-ietf-httpapi-idempotency-key-header. Another body under the same key is a 422, as in the draft. A retry
that comes before the first answer is a 409 in the draft. This server lets such a retry wait for that answer instead.
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
#: For how many seconds a key is remembered: a day, as in other APIs with the header.
KEPT_S = 24 * 3600


@dataclass(frozen=True)
class Made:
    """The job, file or batch that a request makes.

    id: its id. key: the key in Redis under which the id is remembered; None for a request without the header.
    is_new: whether no earlier request has made it.
    """

    id: str
    key: str | None = None
    is_new: bool = True

    @property
    def is_kept(self) -> bool:
        """Whether a later request with the same Idempotency-Key gets the same job, file or batch."""
        return self.key is not None


class IdempotencyKeys:
    """The keys that clients have sent in the last day."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def made(self, request: Request, project: str, body: Any, new_id: str) -> Made:
        """Return what a request makes. Its id is `new_id`, or the id that an earlier request with its key got.

        body: the content of the request, which must be equal to that of the earlier request. Raises RedisError, and
        ApiError if the key came with another body or path.
        """
        key = key_of(request)
        if key is None:
            return Made(new_id)
        content = {"path": request.scope["path"], "body": body}
        return await run_in_threadpool(self._made, project, key, content, new_id)

    def _made(self, project: str, key: str, content: Mapping[str, Any], new_id: str) -> Made:
        """Record what a request with a key makes, or return what an earlier request has recorded."""
        redis_key = api_once_key(project, sha256(key.encode()).hexdigest())
        digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        record = json.dumps({"id": new_id, "asked": digest})
        while not self._connection.set(redis_key, record, nx=True, ex=KEPT_S):
            earlier_record = self._connection.get(redis_key)
            if earlier_record is None:
                continue  # it has expired just now
            earlier = stored.json_object(earlier_record)
            if earlier.get("asked") != digest:
                raise ApiError(
                    422,
                    "this Idempotency-Key came with another body or path: send a new key",
                    code="idempotency_key_reused",
                )
            return Made(str(earlier.get("id")), redis_key, is_new=False)
        return Made(new_id, redis_key)

    async def forget(self, made: Made, error: ApiError) -> None:
        """Forget the key of a request that has failed, so that a retry starts anew. Raises RedisError.

        The key is not forgotten if a retry was refused at a limit: what the first request made may still be fine.
        """
        is_refused_retry = error.status == 429 and not made.is_new
        if made.key is not None and not is_refused_retry:
            await run_in_threadpool(self._forget, made.key, made.id)

    def _forget(self, redis_key: str, made_id: str) -> None:
        record = stored.json_object(self._connection.get(redis_key) or b"")
        if record.get("id") == made_id:
            self._connection.delete(redis_key)


def key_of(request: Request) -> str | None:
    """Return the Idempotency-Key of a request; None if it has none. Raises ApiError for an empty or long key."""
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= MAX_CHARS:
        raise ApiError(400, f"Idempotency-Key has {len(key)} characters, expected 1 to {MAX_CHARS}")
    return key
