"""Reaching Redis, and what a server says of itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

from .findings import Finding, fault

#: In which a server has to answer, and how often its answer is timed.
TIMEOUT_S, NUM_PINGS = 3.0, 20

#: What is asked of CONFIG, which a worker's user may not read.
CONFIG_NAMES = ("appendfsync", "save", "stream-node-max-bytes")


#: By which a client is not served, whatever it asks for.
NOT_SERVED = (RedisConnectionError, RedisTimeoutError, NoPermissionError)


@dataclass(frozen=True)
class Server:
    """A server that answers.

    client: with short time limits. user: as whom it is asked. info: of INFO. config: of CONFIG GET, without
    what this user may not read. latency_s: of a round trip, the median. ahead_s: its clock, less ours.
    """

    client: Redis
    address: str
    user: str
    info: Mapping[str, Any]
    config: Mapping[str, str]
    latency_s: float
    ahead_s: float | None


class NotReached(Exception):
    """Raised where a server does not serve us: (the finding that says so)."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def shown_url(url: str) -> str:
    """Return a URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def secrets_of(url: str) -> list[str]:
    """Return what no message may repeat of a URL: its password, as it stands there and as it is meant."""
    given = urlsplit(url).netloc.rpartition("@")[0].partition(":")[2]
    return [each for each in {given, unquote(given)} if each]


def client_of(url: str) -> Redis:
    """Return a client that waits TIMEOUT_S at most, and tries once."""
    return Redis.from_url(
        url,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


def reach(url: str, clock: Callable[[], float] = time.time) -> Server:
    """Ask a server for what it is. Raises NotReached."""
    address = shown_url(url)
    client = client_of(url)
    try:
        client.ping()
        latency_s = statistics.median(_timed(client.ping) for _ in range(NUM_PINGS))
        before = clock()
        info: Any = client.info("everything")
        ours = (before + clock()) / 2
    except RedisError as error:
        raise NotReached(not_served(url, error)) from error
    theirs = info.get("server_time_usec")
    return Server(
        client,
        address,
        user_of(url),
        info,
        _read_config(client),
        latency_s,
        theirs / 1e6 - ours if isinstance(theirs, int) else None,
    )


def user_of(url: str) -> str:
    """Return as whom a URL connects."""
    return unquote(urlsplit(url).username or "default")


def not_served(url: str, error: RedisError) -> Finding:
    """Say why a server does not serve whoever connects with this URL, and what to mend."""
    address, user = shown_url(url) if url else "Redis", user_of(url)
    is_refusal = isinstance(error, (AuthenticationError, NoPermissionError))
    if isinstance(error, BusyLoadingError):
        mend = "wait: it reads what it has kept on its disk, and serves once that is done"
        return fault("redis", f"{address} does not serve yet ({error})", mend)
    if isinstance(error, (RedisConnectionError, RedisTimeoutError)) and not is_refusal:
        mend = "start Redis, or name it with --url or RQ_REDIS_URL (rediss:// where it speaks TLS)"
        if "SSL" in str(error):
            mend = "give the certificate of its authority: rediss://...?ssl_ca_certs=/path/ca.pem"
        return fault("redis", f"{address} does not answer ({error})", mend)
    if isinstance(error, NoPermissionError):
        mend = "give this user the rules of its role in ops/redis-users.acl, +info and +ping among them"
    elif str(error).startswith("MISCONF"):  # to PING, too
        mend = "see Redis' log and the free space of its folder (redis-cli CONFIG GET dir), then BGSAVE"
    else:
        mend = "correct user and password in RQ_REDIS_URL (percent-encode @, /, : and #), or the user's rules"
    return fault("redis", f"{address} refuses to serve user {user!r} ({error})", mend)


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _read_config(client: Redis) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in CONFIG_NAMES:
        try:
            value: Any = client.config_get(name)
        except ResponseError:  # not as this user, and on some hosted servers not as any
            return {}
        found.update(value)
    return found
