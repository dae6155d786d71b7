"""Finds the project of a request, and refuses requests beyond its limits.

Without any key in Redis, a server that only this machine reaches takes every request.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers

from jobs.api_keys import KnownKeys, ProjectLimits, count_request, known_keys
from tokenmill.server.errors import ApiError
from tokenmill.serving import Hosts

#: The project of requests without a key.
NO_KEY_PROJECT = "default"
#: The project whose keys open /metrics.
METRICS_PROJECT = "metrics"
#: How old keys and limits may be: a revoked key is refused after so many seconds.
KNOWN_S = 1.0


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
        self._looking = asyncio.Lock()
        self._last_known: KnownKeys | None = None
        self._looked_at = 0.0

    async def of(self, headers: Headers) -> Project:
        """Return a request's project, and count the request. Raises ApiError and RedisError."""
        known = await self._known_for(headers)
        name = self._name_of(headers, known)
        limits = known.limits_of(name)
        if limits.requests_per_minute is None:
            return Project(name, limits)
        return await run_in_threadpool(self._counted, name, limits, limits.requests_per_minute)

    async def check_metrics(self, headers: Headers) -> None:
        """Raise ApiError unless a request may read the metrics, which name all projects. It is not counted."""
        known = await self._known_for(headers)
        if self._needs_no_key(known):
            _check_browser(headers)
        elif self._name_of(headers, known) != METRICS_PROJECT:
            raise ApiError(
                403, f"send a key of the project {METRICS_PROJECT!r}: `tokenmill keys add metrics`"
            )

    async def _known_for(self, headers: Headers) -> KnownKeys:
        """Return all keys and limits, with a key that was added just now. Raises RedisError."""
        known = await self._known(KNOWN_S)
        secret = _secret(headers)
        if secret and known.find(secret) is None and not self._needs_no_key(known):
            return await self._known(0.0)
        return known

    async def _known(self, max_age_s: float) -> KnownKeys:
        asked_at = self._clock()
        async with self._looking:  # requests that come together await the same look
            if self._last_known is None or abs(asked_at - self._looked_at) >= max_age_s:
                self._looked_at = self._clock()
                self._last_known = await run_in_threadpool(known_keys, self._connection)
            return self._last_known

    def _counted(self, name: str, limits: ProjectLimits, most: int) -> Project:
        """Count a request. Raises ApiError for one too many."""
        now = self._clock()
        count = count_request(self._connection, name, now)
        reset_s = 60 - int(now % 60)
        limit_headers = {
            "x-ratelimit-limit-requests": str(most),
            "x-ratelimit-remaining-requests": str(max(0, most - count)),
            "x-ratelimit-reset-requests": f"{reset_s}s",
        }
        if count > most:
            raise ApiError(
                429,
                f"project {name!r} has made its {most} requests of this minute",
                code="rate_limit_exceeded",
                headers={**limit_headers, "retry-after": str(reset_s)},
                project=name,
            )
        return Project(name, limits, limit_headers)

    def _needs_no_key(self, known: KnownKeys) -> bool:
        return self._is_local and not known.needs_key

    def _name_of(self, headers: Headers, known: KnownKeys) -> str:
        if self._needs_no_key(known):
            _check_browser(headers)
            return NO_KEY_PROJECT
        secret = _secret(headers)
        key = known.find(secret) if secret else None
        if key is not None:
            return key.project
        problem = "the API key is wrong or revoked" if secret else "there is no API key"
        raise ApiError(
            401,
            f"{problem}: send `Authorization: Bearer KEY`, with a key of `tokenmill keys add`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


#: The names of a server without keys.
_HOSTS = Hosts((), is_local=True)


def _check_browser(headers: Headers) -> None:
    """Raise ApiError for what a page of another site has a browser send to this machine.

    Where there are keys, such a page has none.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    is_own = origin is None or _HOSTS.allows(origin.partition("://")[2])
    if not _HOSTS.allows(host) or not is_own:
        raise ApiError(
            403,
            "a server without keys is asked for as localhost or 127.0.0.1, by programs and pages of this machine: "
            "use that address, or make a key with `tokenmill keys add PROJECT`",
            code="wrong_host",
        )


def _secret(headers: Headers) -> str:
    """Return the key that a request sends; "" without one."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
