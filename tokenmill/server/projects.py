"""Finds the project of a request, and refuses requests beyond its limits.

Without any key in Redis, a server that only this machine reaches takes every request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers

from jobs.api_keys import ProjectLimits, count_request, find_key, has_keys, limits_of
from tokenmill.server.errors import ApiError

#: The project of requests without a key.
NO_KEY_PROJECT = "default"


@dataclass(frozen=True)
class Project:
    """The project of a request. headers: the headers of a response that tell the limit of requests."""

    name: str
    limits: ProjectLimits = field(default_factory=ProjectLimits)
    headers: dict[str, str] = field(default_factory=dict)


class Projects:
    """Finds the project of each request. is_local: only this machine reaches the server."""

    def __init__(
        self, connection: Redis, *, is_local: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._is_local = is_local
        self._clock = clock

    async def of(self, headers: Headers) -> Project:
        """Return a request's project, and count the request. Raises ApiError and RedisError."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        return await run_in_threadpool(self._find, secret)

    def _find(self, secret: str) -> Project:
        name = self._name_of(secret)
        limits = limits_of(self._connection, name)
        most = limits.requests_per_minute
        if most is None:
            return Project(name, limits)

        now = self._clock()
        count = count_request(self._connection, name, now)
        reset_s = 60 - int(now % 60)
        headers = {
            "x-ratelimit-limit-requests": str(most),
            "x-ratelimit-remaining-requests": str(max(0, most - count)),
            "x-ratelimit-reset-requests": f"{reset_s}s",
        }
        if count > most:
            raise ApiError(
                429,
                f"project {name!r} has made its {most} requests of this minute",
                code="rate_limit_exceeded",
                headers={**headers, "retry-after": str(reset_s)},
            )
        return Project(name, limits, headers)

    def _name_of(self, secret: str) -> str:
        if self._is_local and not has_keys(self._connection):
            return NO_KEY_PROJECT
        key = find_key(self._connection, secret) if secret else None
        if key is not None:
            return key.project
        problem = "the API key is wrong or revoked" if secret else "there is no API key"
        raise ApiError(
            401,
            f"{problem}: send `Authorization: Bearer KEY`, with a key of `tokenmill keys add`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
