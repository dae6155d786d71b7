"""Reaching Redis, and what a server says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from jobs.doctor.findings import Finding, fault

#: In which a server has to answer.
TIMEOUT_S = 3.0

#: By which a client is not served, whatever it asks for.
NOT_SERVED = (RedisConnectionError, RedisTimeoutError, NoPermissionError)


@dataclass(frozen=True)
class Server:
    """A server that answers. info: of INFO. config: what this user may read of CONFIG GET. latency_s: of a
    round trip. ahead_s: its clock, less ours."""

    client: Redis
    address: str
    user: str
    info: Mapping[str, Any]
    latency_s: float
    ahead_s: float
    config: Mapping[str, str] = field(default_factory=dict)


class NotReached(Exception):
    """Raised where a server does not serve us: (the finding that says so)."""

    @property
    def finding(self) -> Finding:
        found: Finding = self.args[0]
        return found


def secrets_of(url: str) -> list[str]:
    """Return what no message may repeat of a URL: its password, as it stands there and as it is meant."""
    given = urlsplit(url).netloc.rpartition("@")[0].partition(":")[2]
    return [each for each in {given, unquote(given)} if each]


def reach(url: str, clock: Callable[[], float] = time.time) -> Server:
    """Ask a server for what it is. Raises NotReached."""
    wait: Any = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    client = Redis.from_url(url, retry=Retry(NoBackoff(), 0), **wait)
    took_s = []
    try:
        for _ in range(5):
            asked_at = clock()
            info: Any = client.info("everything")
            took_s.append(clock() - asked_at)
    except RedisError as error:
        raise NotReached(not_served(url, error)) from error
    config: dict[str, str] = {}
    with suppress(ResponseError):  # not as this user, and on some hosted servers not as any
        for name in ("appendfsync", "save", "stream-node-max-bytes"):
            config.update(client.config_get(name))  # type: ignore[arg-type]
    ahead_s = info.get("server_time_usec", asked_at * 1e6) / 1e6 - asked_at
    return Server(client, _shown(url), _user(url), info, min(took_s), ahead_s, config)


def not_served(url: str, error: RedisError) -> Finding:
    """Say why a server refuses this URL, and what to mend."""
    address = _shown(url) if url else "Redis"
    if isinstance(error, BusyLoadingError):
        mend = "wait: it reads what it has kept on its disk, and serves once that is done"
        return fault("redis", f"{address} does not serve yet ({error})", mend)
    if isinstance(error, NOT_SERVED[:2]) and not isinstance(error, AuthenticationError):
        mend = "start Redis, or name it with --url or RQ_REDIS_URL (rediss:// where it speaks TLS)"
        if "SSL" in str(error):
            mend = "give the certificate of its authority: rediss://...?ssl_ca_certs=/path/ca.pem"
        return fault("redis", f"{address} does not answer ({error})", mend)
    mend = "correct user and password in RQ_REDIS_URL (percent-encode @, /, : and #), or the user's rules"
    if isinstance(error, NoPermissionError):
        mend = "give this user the rules of its role in ops/redis-users.acl, +info and +ping among them"
    elif str(error).startswith("MISCONF"):
        mend = "see Redis' log and the free space of its folder (redis-cli CONFIG GET dir), then BGSAVE"
    return fault("redis", f"{address} refuses to serve user {_user(url)!r} ({error})", mend)


def _user(url: str) -> str:
    return unquote(urlsplit(url).username or "default")


def _shown(url: str) -> str:
    """Return a URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
