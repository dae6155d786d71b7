"""Checks of Redis: whether it answers, loses nothing, and lets its user do what a role needs."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
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

from jobs.common.keys import RQ, prefixed
from jobs.doctor.findings import Finding, fault, ok, warning

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


#: A round trip, for which a worker's claims wait, and seconds that two clocks may differ.
SLOW_S, MAX_SKEW_S = 0.01, 1.0

#: Share of the memory that Redis may take.
FULL = 0.9

#: RQ keeps each job's results in a stream; nodes of this size hold one with little waste.
STREAM_NODE_BYTES = 512

_LOG = "see Redis' log and the free space of its folder (redis-cli CONFIG GET dir)"


def check_server(server: Server) -> Iterator[Finding]:
    """Look at what the server says of itself."""
    text = str(server.info.get("redis_version", "unknown"))
    answers = f"{server.address} answers in {server.latency_s * 1000:.2f} ms, version {text}"
    if tuple(map(int, re.findall(r"\d+", text)[:2])) < (6, 2):
        yield fault("redis", answers, "install Redis 6.2 or later")
    elif server.latency_s > SLOW_S:
        mend = "move workers nearer to Redis, or see what else it serves (redis-cli --latency, SLOWLOG GET)"
        yield warning("redis", answers, mend)
    else:
        yield ok("redis", answers)
    yield from _durability(server)
    yield from _replay(server) if server.info.get("aof_enabled") else ()
    yield from _faults(server.info)
    size = server.config.get("stream-node-max-bytes", "0")
    if int(size) > STREAM_NODE_BYTES:
        found = f"stream-node-max-bytes is {size}: each finished job takes 6.2 KB in place of 2.8"
        yield warning("redis memory", found, _set("stream-node-max-bytes", STREAM_NODE_BYTES))
    if abs(server.ahead_s) > MAX_SKEW_S:
        found = f"the clock of Redis is {server.ahead_s:+.1f} s from this machine's"
        yield warning("clock", found, "run a time service on both machines (timedatectl set-ntp true)")


def troubles(connection: Redis) -> list[str]:
    """Say what is wrong with a server that answers and yet takes no jobs, or loses them, and what to mend.

    Raises redis.exceptions.ConnectionError or TimeoutError.
    """
    try:
        info: Any = connection.info()
    except ResponseError:  # not as this user
        return []
    return [f"{each.found}: {each.mend}" for each in _faults(info)]


def _faults(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether it takes writes, and keeps them."""
    if info.get("role") == "slave":
        mend = f"name its master, {info.get('master_host')}:{info.get('master_port')}"
        yield fault("redis", "this is a replica, which takes no jobs", mend)
    if info.get("min_slaves_good_slaves") == 0:
        found = "min-replicas-to-write asks for replicas, and there is none: Redis refuses to write"
        yield fault("redis", found, f"start its replicas, or {_set('min-replicas-to-write', 0)}")
    if info.get("cluster_enabled"):
        yield fault("redis", "this is a Redis cluster, which RQ cannot use", "use a Redis that is no cluster")
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if info.get(name, "ok") != "ok":
            yield fault("durability", f"Redis could not write to its disk the last time ({name})", _LOG)
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        found = f"maxmemory-policy is {policy}: with its memory full, Redis throws away jobs and answers"
        yield fault("redis memory", found, _set("maxmemory-policy", "noeviction"))
    used, most = info.get("used_memory", 0), info.get("maxmemory", 0) or info.get("total_system_memory", 0)
    if most and used > FULL * most:
        found = f"{used >> 20} of {most >> 20} MiB in use: soon no job can be enqueued or ended"
        mend = "give Redis more memory (CONFIG SET maxmemory), or keep results for less long (result_ttl)"
        yield fault("redis memory", found, mend)


def _durability(server: Server) -> Iterator[Finding]:
    save, fsync = server.config.get("save"), server.config.get("appendfsync")
    if server.info.get("aof_enabled") and fsync == "no":
        mend = _set("appendfsync", "everysec")
        yield warning("durability", "appendfsync is no: a crash loses what was not on disk", mend)
    elif server.info.get("aof_enabled"):
        yield ok("durability", f"every change is in the append-only file (appendfsync {fsync or 'unknown'})")
    elif save or save is None:
        found = f"no append-only file, at most snapshots (save {save}): a crash loses all jobs since the last"
        yield warning("durability", found, _set("appendonly", "yes"))
    else:
        found = "neither append-only file nor snapshots: a restart loses every job, and what is known of runs"
        yield fault("durability", found, _set("appendonly", "yes"))


def _replay(server: Server) -> Iterator[Finding]:
    """As the default user Redis 7 to 8 replays the append-only file, also where nobody may be that user."""
    client: Any = server.client
    for words in (("SET", prefixed("rq:job:a"), "1"), ("XADD", prefixed("tokenmill:a"), "*", "a", "1")):
        with suppress(ResponseError):  # not as this user, or Redis 6.2, which replays without a user
            if client.execute_command("ACL", "DRYRUN", "default", *words) not in (b"OK", "OK"):
                found = "the default user has no rights: a restart drops every transaction of the file"
                mend = "ACL SETUSER default off ~* &* +@all, and so in its file, before the next restart"
                yield fault("durability", found, mend)
                return


def _set(name: str, value: object) -> str:
    return f"redis-cli CONFIG SET {name} {value}, and the same in redis.conf"


Role = Literal["worker", "producer"]

#: Whose commands are asked for: a key that each of them may be asked with.
JOB_KEY = prefixed("rq:job:tokenmill-doctor")
_CHANNEL = prefixed("rq:pubsub:tokenmill-doctor")

#: Keys, as rules name them, that each role uses.
KEYS = {
    "worker": ("rq:*", "tokenmill:*"),
    "producer": (
        *("rq:queues", "rq:queue:*", "rq:job:*", "rq:results:*", "rq:wip:*", "rq:finished:*", "rq:failed:*"),
        *("rq:deferred:*", "rq:ready:*", "rq:scheduled:*", "rq:canceled:*"),
        *("rq:execution:*", "rq:executions:*"),
        *("rq:groups", "rq:group:*", "rq:workers", "rq:workers:*", "rq:worker:*"),
        *("tokenmill:run:*", "tokenmill:worker:*", "tokenmill:samples:*"),
    ),
}

#: Commands that look like `COMMAND key argument...`.
_BOTH = """
    del; exists; expire 1; pexpire 1; persist; ttl; pttl; type; get; set 1; hset a 1; hget a; hgetall; hmget a
    hdel a; hexists a; hkeys; hlen; hstrlen a; lpush a; rpush a; lrem 0 a; lrange 0 1; llen; lpos a; sadd a
    srem a; smembers; scard; zadd 1 a; zrem a; zscore a; zcard; zcount 0 1; zrange 0 1; zrevrange 0 1
    zrangebyscore 0 1; zremrangebyscore 0 1; xrevrange + -; xlen
"""
_WORKERS = f"""
    hincrby a 1; hincrbyfloat a 1; sscan 0; xrange - +; hsetnx a 1; lpop; ltrim 0 1; srandmember; xadd * a 1
    rename {JOB_KEY}-b
"""

#: Those with their key in another place, or without one.
_OTHERS = (("xread", "COUNT", "1", "STREAMS", JOB_KEY, "0"), ("info",), ("ping",))
_WORKERS_OTHERS = (
    ("evalsha", "0" * 40, "1", JOB_KEY),
    ("script", "load", "return 1"),
    ("script", "exists", "0" * 40),
    ("memory", "usage", JOB_KEY),
    ("subscribe", _CHANNEL),
    ("unsubscribe", _CHANNEL),
)

#: Commands that rules name with their first argument.
_WITH_ARGUMENT = {"script", "memory"}


def commands_of(role: Role) -> list[tuple[str, ...]]:
    """Return every command that a role needs, with arguments."""
    listed = [each.split() for each in _BOTH.replace("\n", ";").split(";")]
    others: list[tuple[str, ...]] = [*_OTHERS, ("publish", _CHANNEL, "1")]
    if role == "worker":
        listed += [each.split() for each in _WORKERS.replace("\n", ";").split(";")]
        others += _WORKERS_OTHERS
    return [(words[0], JOB_KEY, *words[1:]) for words in listed if words] + others


def check_permissions(server: Server, role: Role) -> Iterator[Finding]:
    """Name the rules that a role needs and this user lacks."""
    asked = commands_of(role)
    keyed = [("set", prefixed(key).replace("*", "tokenmill-doctor"), "1") for key in KEYS[role]]
    refusals = _refusals(server.client, [*asked, *keyed])
    if refusals is None:
        mend = f"ACL SETUSER {server.user} +@transaction +@connection, in its file too"
        yield fault("permissions", f"user {server.user!r} may not use MULTI and DISCARD", mend)
        return
    missing = [
        f"~{prefixed(key)}"
        for key, refusal in zip(KEYS[role], refusals[len(asked) :], strict=True)
        if " key" in refusal  # of Redis 6 ("one of the keys") and of later ones ("a key")
    ]
    missing += [f"&{RQ}:pubsub:*"] if any(" channel" in refusal for refusal in refusals) else []
    for words, refusal in zip(asked, refusals, strict=False):
        if refusal and " key" not in refusal and " channel" not in refusal:
            missing.append(f"+{words[0]}|{words[1]}" if words[0] in _WITH_ARGUMENT else f"+{words[0]}")
    if not missing:
        yield ok("permissions", f"user {server.user!r} may do all that a {role} needs")
        return
    rules = " ".join(dict.fromkeys(missing))
    mend = f"ACL SETUSER {server.user} {rules}, in its file too (ops/redis-users.acl has all)"
    yield fault("permissions", f"user {server.user!r} lacks what a {role} needs: {rules}", mend)


def _refusals(client: Redis, commands: Sequence[Sequence[str]]) -> list[str] | None:
    """Return how the server refuses each command to this user, "" where it does not.

    None where no transaction can be had; nothing is asked then, as it would be carried out.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        for word in ("MULTI", "DISCARD"):
            connection.send_command(word)
            if _reply(connection):
                return None
        connection.send_packed_command(connection.pack_commands([("MULTI",), *commands, ("DISCARD",)]))
        return [_reply(connection) for _ in range(len(commands) + 2)][1:-1]
    finally:
        connection.disconnect()
        pool.release(connection)


def _reply(connection: Any) -> str:
    try:
        connection.read_response()
    except NoPermissionError as error:
        return str(error)
    except ResponseError:  # of a command that another version has otherwise
        return ""
    return ""
