"""Checks Redis: whether it answers, whether it can lose jobs, and whether its user may do what a role needs."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from jobs.common.redis_info import redis_health
from jobs.doctor.findings import Finding, fault, ok, warning

#: Seconds that a connection, or a reply, may take.
TIMEOUT_S = 3.0
#: Errors of a server that does not answer.
_NO_ANSWER = (RedisConnectionError, RedisTimeoutError)
#: Errors of a server that does not serve a client at all.
NOT_SERVED = (*_NO_ANSWER, NoPermissionError)


@dataclass(frozen=True)
class Server:
    """A Redis server that has answered, and what it says of itself.

    config: the settings that this user may read. ahead_s: the seconds by which the server's clock is ahead of ours.
    """

    client: Redis
    user: str
    address: str
    info: Mapping[str, Any]
    latency_s: float
    ahead_s: float
    config: Mapping[str, str]


def reach(url: str) -> Server:
    """Connect to the server of a URL, and return what it says of itself. Raises RedisError."""
    timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    client = Redis.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts)
    round_trips_s = []
    # The fastest round trip counts, because the first one opens the connection too.
    for _ in range(5):
        sent_at = time.time()
        info: Any = client.info("everything")
        round_trips_s.append(time.time() - sent_at)
    config: dict[str, str] = {}
    with suppress(ResponseError):  # on some hosted servers nobody may read the settings
        for name in ("appendfsync", "save"):
            config.update(client.config_get(name))  # type: ignore[arg-type]
    # The clocks are compared at the last round trip.
    ahead_s = 0.0
    server_time_us = info.get("server_time_usec")
    if server_time_us is not None:  # some servers do not say their time
        ahead_s = server_time_us / 1e6 - sent_at
    user, address = _user_and_address(url)
    return Server(
        client=client,
        user=user,
        address=address,
        info=info,
        latency_s=min(round_trips_s),
        ahead_s=ahead_s,
        config=config,
    )


def not_served(url: str, error: RedisError) -> Finding:
    """Return the fault for a server that does not serve us. error: what the client raised."""
    user, address = _user_and_address(url)
    # A server that refuses a password has answered, although redis-py derives this error from its ConnectionError.
    is_unanswered = isinstance(error, _NO_ANSWER) and not isinstance(error, AuthenticationError)
    # This is the fault unless one of the cases below fits better.
    problem = f"refuses to serve user {user!r}"
    mend = "correct user and password in RQ_REDIS_URL (percent-encode @, /, : and #), or the user's rules"
    if isinstance(error, BusyLoadingError):
        problem = "does not serve yet"
        mend = "wait: it reads what it has kept on its disk, and serves once that is done"
    elif is_unanswered:
        problem = "does not answer"
        mend = "start Redis, or name it with --url or RQ_REDIS_URL (rediss:// where it speaks TLS)"
        if url.startswith("rediss:"):
            mend = _mend_of_tls(str(error)) or mend
    elif isinstance(error, NoPermissionError):
        mend = (
            "use the Redis user for this task, or give this user the rules that ops/redis-users.acl has for it, "
            "+info and +ping among them"
        )
    elif str(error).startswith("MISCONF"):
        mend = f"{_LOG}, then BGSAVE"
    return fault("redis", f"{address} {problem} ({error})", mend)


def _mend_of_tls(error: str) -> str:
    """Return how to mend an error of TLS; "" for any other error."""
    if "mismatch" in error:
        return "name the server in RQ_REDIS_URL as its certificate does"
    if "expired" in error:
        return "renew the certificate that the error speaks of, then CONFIG SET tls-cert-file, or restart Redis"
    if "SSL" in error:
        return "give the certificate of its authority: rediss://...?ssl_ca_certs=/path/ca.pem"
    if "No such file" in error:
        return "correct the path ssl_ca_certs in RQ_REDIS_URL"
    return ""


def _user_and_address(url: str) -> tuple[str, str]:
    """Return a URL's user, and the URL without user, password and options."""
    parts = urlsplit(url)
    user = unquote(parts.username or "default")
    if not url:
        return user, "Redis"
    _, _, host = parts.netloc.rpartition("@")
    return user, f"{parts.scheme}://{host}{parts.path}"


#: A round trip that takes more seconds is slow. Each claim of a worker waits for a round trip.
SLOW_S = 0.01
#: The most seconds by which two clocks may differ.
MAX_SKEW_S = 1.0
#: If a larger share of the memory is in use, it counts as nearly full.
FULL = 0.9

_LOG = "see Redis' log and the free space of its folder (redis-cli CONFIG GET dir)"


def check_server(server: Server) -> Iterator[Finding]:
    """Yield findings about a server's version, speed, durability, memory and clock."""
    version = server.info["redis_version"]
    summary = f"{server.address} answers in {server.latency_s * 1000:.2f} ms, version {version}"
    version_numbers = [int(digits) for digits in re.findall(r"\d+", version)]
    if version_numbers[:2] < [6, 2]:
        yield fault("redis", summary, "install Redis 6.2 or later")
    elif server.latency_s > SLOW_S:
        mend = "move workers nearer to Redis, or see what else it serves (redis-cli --latency, SLOWLOG GET)"
        yield warning("redis", summary, mend)
    else:
        yield ok("redis", summary)
    yield from _durability(server)
    yield from _faults(server.info)
    if abs(server.ahead_s) > MAX_SKEW_S:
        problem = f"the clock of Redis is {server.ahead_s:+.1f} s from this machine's"
        mend = "run a time service on both machines (timedatectl set-ntp true)"
        yield warning("clock", problem, mend)


def troubles(connection: Redis) -> list[str]:
    """Return the reasons why a server takes no jobs or may lose jobs, each with its remedy. Raises RedisError."""
    try:
        info: Any = connection.info()
    except ResponseError:  # this user may not send INFO
        return []
    return [f"{finding.text}: {finding.mend}" for finding in _faults(info)]


def _faults(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with a server. info: the server's reply to INFO."""
    if info.get("role") == "slave":
        mend = f"name its master, {info.get('master_host')}:{info.get('master_port')}"
        yield fault("redis", "this is a replica, which takes no jobs", mend)
    if info.get("min_slaves_good_slaves") == 0:
        problem = (
            "min-replicas-to-write asks for replicas, and there is none: Redis refuses to write"
        )
        yield fault(
            "redis",
            problem,
            f"start its replicas, or {_setting_advice('min-replicas-to-write', 0)}",
        )
    if info.get("cluster_enabled"):
        yield fault(
            "redis",
            "this is a Redis cluster, which RQ cannot use",
            "use a Redis that is not a cluster",
        )

    health = redis_health(info)
    if health.failed_writes:
        problem = (
            f"Redis could not write to its disk the last time ({', '.join(health.failed_writes)})"
        )
        yield fault("durability", problem, _LOG)

    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        problem = f"maxmemory-policy is {policy}: with its memory full, Redis throws away jobs and answers"
        yield fault("redis memory", problem, _setting_advice("maxmemory-policy", "noeviction"))
    used_bytes = health.used_bytes
    max_bytes = health.limit_bytes
    if max_bytes and used_bytes > FULL * max_bytes:
        when = "now" if used_bytes >= max_bytes else "soon"
        problem = f"{used_bytes >> 20} of {max_bytes >> 20} MiB in use: {when} no job can be enqueued or ended"
        mend = "give Redis more memory (CONFIG SET maxmemory), or keep results for less long (result_ttl)"
        yield fault("redis memory", problem, mend)


def _durability(server: Server) -> Iterator[Finding]:
    """Yield findings about what a crash or restart of the server would lose."""
    save = server.config.get("save")
    fsync = server.config.get("appendfsync")
    has_append_only_file = bool(server.info.get("aof_enabled"))
    if not has_append_only_file and save == "":
        problem = "neither append-only file nor snapshots: a restart loses every job and the state of runs"
        yield fault("durability", problem, _setting_advice("appendonly", "yes"))
    elif not has_append_only_file:
        problem = f"no append-only file, at most snapshots (save {save}): a crash loses all jobs after the last one"
        yield warning("durability", problem, _setting_advice("appendonly", "yes"))
    elif fsync == "no":
        problem = "appendfsync is no: a crash loses what was not on disk"
        yield warning("durability", problem, _setting_advice("appendfsync", "everysec"))
    else:
        yield ok(
            "durability",
            f"every change is in the append-only file (appendfsync {fsync or 'unknown'})",
        )

    if has_append_only_file and not _can_be_replayed(server.client):
        problem = "the default user has no rights: a restart drops every transaction of the file"
        mend = "before the next restart: ACL SETUSER default off ~* &* +@all, and the same in Redis' ACL file"
        yield fault("durability", problem, mend)


def _can_be_replayed(client: Any) -> bool:
    """Whether a restarted server would carry out the writes in its append-only file; True if that is not known.

    Redis 7 and 8 carry out these writes as the default user, even if nobody can log in as that user.
    """
    writes = (("SET", prefixed("rq:job:a"), "1"), ("XADD", prefixed("tokenmill:a"), "*", "a", "1"))
    try:
        replies = [client.execute_command("ACL", "DRYRUN", "default", *write) for write in writes]
    except ResponseError:
        # This user may not send ACL. Or this is Redis 6.2, which carries out the writes of its file without any user.
        return True
    return all(reply in (b"OK", "OK") for reply in replies)


def _setting_advice(name: str, value: object) -> str:
    """Return the advice to change a setting of Redis."""
    return f"redis-cli CONFIG SET {name} {value}, and the same in redis.conf"


Role = Literal["worker", "producer", "dashboard"]

#: The keys that each role uses, as rules of Redis users name them.
_PRODUCERS_KEYS = """
    rq:queues rq:queue:* rq:job:* rq:results:* rq:wip:* rq:finished:* rq:failed:* rq:deferred:* rq:ready:*
    rq:scheduled:* rq:canceled:* rq:execution:* rq:executions:* rq:groups rq:group:* rq:workers rq:worker:*
    tokenmill:run:* tokenmill:worker:* tokenmill:samples:*
"""
KEYS: Mapping[Role, str] = {
    "worker": "rq:* tokenmill:*",
    "producer": _PRODUCERS_KEYS,
    "dashboard": f"{_PRODUCERS_KEYS} rq:rl-keys rq:rl:* rq:suspended tokenmill:dashboard:* tokenmill:worker-deaths",
}

#: The commands that each role needs, with arguments. K stands for a key, C for a channel, SHA for a script's hash.
_PRODUCERS = """
    del K; exists K; expire K 1; pexpire K 1; persist K; ttl K; pttl K; type K; get K; set K 1; hset K a 1
    hget K a; hgetall K; hmget K a; hdel K a; hexists K a; hkeys K; hlen K; hstrlen K a; lpush K a; rpush K a
    lrem K 0 a; lrange K 0 1; llen K; lpos K a; sadd K a; srem K a; smembers K; scard K; zadd K 1 a; zrem K a
    zscore K a; zcard K; zcount K 0 1; zrange K 0 1; zrevrange K 0 1; zrangebyscore K 0 1
    zremrangebyscore K 0 1; xrevrange K + -; xlen K; xread COUNT 1 STREAMS K 0; info; ping; publish C 1
"""
_WORKERS = """
    hincrby K a 1; hincrbyfloat K a 1; sscan K 0; xrange K - +; hsetnx K a 1; lindex K 0; lpop K; ltrim K 0 1; mget K
    srandmember K; xadd K * a 1; rename K K; evalsha SHA 1 K; script load 1; script exists SHA
    memory usage K; subscribe C; unsubscribe C
"""
_DASHBOARDS = "ltrim K 0 1; zremrangebyrank K 0 1; getrange K 0 1; setrange K 0 a"
_PLACEHOLDERS = {"K": prefixed("rq:job:a"), "C": prefixed("rq:pubsub:a"), "SHA": "0" * 40}


def commands_of(role: Role) -> list[tuple[str, ...]]:
    """Return the commands that a role needs, each as a tuple of its words."""
    # Every role needs the producers' commands.
    further_commands = {"worker": _WORKERS, "dashboard": _DASHBOARDS, "producer": ""}
    lines = f"{_PRODUCERS}\n{further_commands[role]}"
    commands = []
    for command in lines.replace("\n", ";").split(";"):
        words = tuple(_PLACEHOLDERS.get(word, word) for word in command.split())
        if words:
            commands.append(words)
    return commands


def check_permissions(server: Server, role: Role) -> Iterator[Finding]:
    """Yield one finding: whether this user may do all that a role needs. A fault names the missing rules."""
    # The commands that test whether the user may use the role's keys, each with the pattern of the keys.
    pattern_of_command: dict[tuple[str, ...], str] = {}
    for pattern in map(prefixed, KEYS[role].split()):
        command = ("set", pattern.replace("*", "a"), "1")
        pattern_of_command[command] = pattern
    commands = [*pattern_of_command, *commands_of(role)]
    missing_rules: dict[str, None] = {}  # a set that keeps its order
    for words, refusal in _refusals(server.client, commands):
        rule = _missing_rule(words, refusal, pattern_of_command.get(tuple(words)))
        if rule is not None:
            missing_rules[rule] = None
    if not missing_rules:
        yield ok("permissions", f"user {server.user!r} may do all that a {role} needs")
        return
    rules = " ".join(missing_rules)
    mend = (
        f"ACL SETUSER {server.user} {rules}, and the same in Redis' ACL file (ops/redis-users.acl has all rules); "
        f"if no {role} is to run here, say with --role what runs here"
    )
    yield fault("permissions", f"user {server.user!r} lacks what a {role} needs: {rules}", mend)


def _missing_rule(words: Sequence[str], refusal: str, key_pattern: str | None) -> str | None:
    """Return the rule that a user lacks for a command; None if no rule is missing.

    words: the command. refusal: why the server refuses the command; "" if it is permitted.
    key_pattern: the pattern of the keys, if the command tests whether the user may use them; None for other commands.
    """
    if " key" in refusal:  # Redis 6 says "one of the keys", later versions say "a key"
        if key_pattern is None:
            # The command's key is only an example. Other commands test the keys.
            return None
        return f"~{key_pattern}"
    if " channel" in refusal:
        return f"&{RQ}:pubsub:*"
    if not refusal:
        return None
    command, *arguments = words
    if command in ("script", "memory"):
        command = f"{command}|{arguments[0]}"  # a rule names the subcommand too
    return f"+{command}"


def _refusals(
    client: Redis, commands: Sequence[Sequence[str]]
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield each command, and the server's reason to refuse it to this user; "" if the command is permitted.

    No command is carried out.
    """
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_command("MULTI")
        refusal = _refusal(connection)
        if refusal:
            # The user may not send MULTI, and outside a transaction the commands would be carried out. The category
            # @transaction holds MULTI and DISCARD.
            yield ("@transaction",), refusal
            return
        connection.send_packed_command(connection.pack_commands([*commands, ("DISCARD",)]))
        for words in commands:
            yield words, _refusal(connection)
    finally:
        connection.disconnect()
        client.connection_pool.release(connection)


def _refusal(connection: Any) -> str:
    """Read the reply to a command. Returns why the command is not permitted; "" if it is permitted."""
    try:
        connection.read_response()
    except NoPermissionError as error:
        return str(error)
    except ResponseError:  # permitted, but this version of Redis wants other arguments
        return ""
    return ""
