"""Who asks: the project of a request's API key.

Without any key in Redis, a server that only this machine reaches takes every request.
"""

from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers

from jobs.api_keys import ApiKey, find_key, has_keys
from tokenmill.server.errors import ApiError

#: The project of requests without a key.
NO_KEY = ApiKey("", "default", "", 0)


class Projects:
    """Tells the key that a request brings. is_local: only this machine reaches the server."""

    def __init__(self, connection: Redis, *, is_local: bool) -> None:
        self._connection = connection
        self._is_local = is_local

    async def of(self, headers: Headers) -> ApiKey:
        """Return the key of a request. Raises ApiError for a missing or wrong one, and RedisError."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        return await run_in_threadpool(self._find, secret)

    def _find(self, secret: str) -> ApiKey:
        if self._is_local and not has_keys(self._connection):
            return NO_KEY
        key = find_key(self._connection, secret) if secret else None
        if key is not None:
            return key
        problem = "the API key is wrong or revoked" if secret else "there is no API key"
        raise ApiError(
            401,
            f"{problem}: send `Authorization: Bearer KEY`, with a key of `tokenmill keys add`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
