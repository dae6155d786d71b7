"""Finds the project of a request by its key, and refuses requests beyond the project's limits.

While Redis has no keys, a server that only this machine reaches needs none.
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
#: For how many seconds keys and limits are cached. A revoked key is still accepted for this time.
KNOWN_S = 1.0


@dataclass(frozen=True)
class Project:
    """The project of a request. headers: for the response, with the project's limits and what is left of them."""

    name: str
    limits: ProjectLimits = field(default_factory=ProjectLimits)
    headers: dict[str, str] = field(default_factory=dict)


class Projects:
    """Finds the project of each request. is_local: whether only this machine reaches the server."""

    def __init__(
        self, connection: Redis, *, is_local: bool, clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._is_local = is_local
        self._clock = clock
        self._reading = asyncio.Lock()
        self._cached: KnownKeys | None = None
        self._cached_at = 0.0

    async def of(self, headers: Headers) -> Project:
        """Return the project of a request, and count the request. headers: of the request.

        Raises RedisError, and ApiError for a wrong key or too many requests.
        """
        known = await self._known_for(headers)
        name = self._name_of(headers, known)
        limits = known.limits_of(name)
        if limits.requests_per_minute is None:
            return Project(name, limits)
        return await run_in_threadpool(self._count, name, limits, limits.requests_per_minute)

    async def check_metrics(self, headers: Headers) -> None:
        """Raise ApiError unless a request may read the metrics, which name all projects.

        The request is not counted.
        """
        known = await self._known_for(headers)
        if self._needs_no_key(known):
            _check_browser(headers)
        elif self._name_of(headers, known) != METRICS_PROJECT:
            raise ApiError(
                403, f"send a key of the project {METRICS_PROJECT!r}: `tokenmill keys add metrics`"
            )

    async def _known_for(self, headers: Headers) -> KnownKeys:
        """Return all keys and limits. If they lack the key of the request, read them again. Raises RedisError."""
        known = await self._known(KNOWN_S)
        secret = _secret(headers)
        if secret and known.find(secret) is None and not self._needs_no_key(known):
            return await self._known(0.0)
        return known

    async def _known(self, max_age_s: float) -> KnownKeys:
        """Return all keys and limits, from the cache if it is young enough."""
        began_at = self._clock()
        # Requests that come at the same time wait here, and share one reading.
        async with self._reading:
            # abs, because the clock may have been set back since the last reading.
            if self._cached is None or abs(began_at - self._cached_at) >= max_age_s:
                self._cached_at = self._clock()
                self._cached = await run_in_threadpool(known_keys, self._connection)
            return self._cached

    def _count(self, name: str, limits: ProjectLimits, most: int) -> Project:
        """Count a request, and return its project. Raises ApiError if it is one too many. most: requests a minute."""
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
        """Whether the server accepts requests without a key."""
        return self._is_local and not known.needs_key

    def _name_of(self, headers: Headers, known: KnownKeys) -> str:
        """Return the name of a request's project. Raises ApiError."""
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


#: The host names by which a server without keys may be called.
_HOSTS = Hosts((), is_local=True)


def _check_browser(headers: Headers) -> None:
    """Raise ApiError if a browser sends the request for a page of another site. headers: of the request.

    Only a server without keys needs this check. Where a key is needed, a page of another site has none.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    is_own = origin is None or _HOSTS.allows(origin.partition("://")[2])
    if not _HOSTS.allows(host) or not is_own:
        raise ApiError(
            403,
            "a server without keys answers only at localhost or 127.0.0.1, and only programs and pages of this "
            "machine: use that address, or make a key with `tokenmill keys add PROJECT`",
            code="wrong_host",
        )


def _secret(headers: Headers) -> str:
    """Return the key in a request's headers; "" if there is none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
