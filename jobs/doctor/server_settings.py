"""Whether a Redis is set up so that no job is lost: version, durability, memory, clock."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from ..common.keys import prefixed
from .findings import Finding, Level, fault, ok, warning
from .redis_server import Server

#: What scripts and commands of a worker need.
MIN_VERSION = (6, 2)

#: A worker's claims wait for round trips.
SLOW_S = 0.01

#: Shares of the memory that Redis may take.
NEAR_FULL, FULL = 0.75, 0.95

#: Seconds that two clocks may differ: times of jobs and runs come from both.
MAX_SKEW_S = 1.0

#: RQ keeps each job's results in a stream; nodes of this size hold one with little waste.
STREAM_NODE_BYTES = 512

MIB = 1 << 20


def check_server(server: Server) -> Iterator[Finding]:
    """Look at what the server says of itself."""
    yield from _version(server)
    yield from _durability(server)
    yield from _replay(server)
    yield from _service(server.info)
    yield from _streams(server)
    yield from _clock(server)


def troubles(connection: Redis) -> list[str]:
    """Say what is wrong with a server that answers and yet takes no jobs, or loses them, and what to mend.

    Raises redis.exceptions.ConnectionError or TimeoutError.
    """
    try:
        info: Any = connection.info()
    except ResponseError:  # not as this user
        return []
    return [f"{each.found}: {each.mend}" for each in _service(info) if each.level is Level.FAULT]


def _service(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether it takes writes, and keeps them."""
    yield from _role(info)
    yield from _last_writes(info)
    yield from _memory(info)


def _version(server: Server) -> Iterator[Finding]:
    text = str(server.info.get("redis_version", "unknown"))
    version = tuple(int(each) for each in re.findall(r"\d+", text)[:2])
    if version < MIN_VERSION:
        yield fault("redis", f"{server.address} is version {text}", "install Redis 6.2 or later")
    milliseconds = server.latency_s * 1000
    answers = f"{server.address} answers in {milliseconds:.2f} ms as user {server.user!r}, version {text}"
    if server.latency_s > SLOW_S:
        mend = "move workers nearer to Redis, or see what else it serves (redis-cli --latency, SLOWLOG GET)"
        yield warning("redis", answers, mend)
    else:
        yield ok("redis", answers)


def _role(info: Mapping[str, Any]) -> Iterator[Finding]:
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        yield fault("redis", "this is a replica, which takes no jobs", f"name its master, {master}")
    if info.get("min_slaves_good_slaves") == 0:
        found = "min-replicas-to-write asks for replicas, and there is none: Redis refuses to write"
        yield fault("redis", found, "start its replicas, or redis-cli CONFIG SET min-replicas-to-write 0")
    if info.get("cluster_enabled"):
        mend = "use a Redis that is no cluster; RQ's keys of one job lie in several slots"
        yield fault("redis", "this is a Redis cluster, which RQ cannot use", mend)
    clients, most = info.get("connected_clients", 0), info.get("maxclients", 0)
    if most and clients > 0.9 * most:
        mend = f"redis-cli CONFIG SET maxclients {2 * most}, and in redis.conf"
        yield warning("redis", f"{clients} of {most} connections are taken", mend)


def _durability(server: Server) -> Iterator[Finding]:
    save, fsync = server.config.get("save"), server.config.get("appendfsync")
    mend = "redis-cli CONFIG SET appendonly yes, and `appendonly yes` in redis.conf"
    if server.info.get("aof_enabled"):
        told = {
            None: "as often as appendfsync says, which this user may not read: `always` loses nothing",
            "always": "at each write: nothing that was acknowledged is lost",
            "everysec": "once a second: a crash of its machine loses up to that",
        }
        if fsync in told:
            yield ok("durability", f"every change is in the append-only file, written {told[fsync]}")
        else:
            mend = "redis-cli CONFIG SET appendfsync everysec (or always), and in redis.conf"
            yield warning("durability", f"appendfsync is {fsync}: a crash loses what the system held", mend)
    elif save:
        found = f"no append-only file, only snapshots (save {save}): a crash loses all jobs since the last"
        yield warning("durability", found, mend)
    elif save is None:
        found = "no append-only file; whether snapshots are made, this user may not read (CONFIG GET save)"
        yield warning("durability", found, mend)
    else:
        found = "neither append-only file nor snapshots: a restart loses every job, and what is known of runs"
        yield fault("durability", found, mend)


def _replay(server: Server) -> Iterator[Finding]:
    """As the default user Redis 7 to 8 replays the append-only file, also where nobody may be that user."""
    if not server.info.get("aof_enabled"):
        return
    client: Any = server.client
    for words in (("SET", prefixed("rq:job:a"), "1"), ("XADD", prefixed("tokenmill:a"), "*", "a", "1")):
        try:
            told = client.execute_command("ACL", "DRYRUN", "default", *words)
        except ResponseError:  # not as this user, or Redis 6.2, which replays without a user
            return
        if told not in (b"OK", "OK"):
            found = "the default user has no rights: a restart drops every transaction and script of the file"
            mend = "ACL SETUSER default off ~* &* +@all, and so in its file, before the next restart"
            yield fault("durability", found, mend)
            return


def _last_writes(info: Mapping[str, Any]) -> Iterator[Finding]:
    """A disk that is full, for one: Redis then refuses to write."""
    states = {
        "aof_last_write_status": "the append-only file",
        "aof_last_bgrewrite_status": "a shorter append-only file",
        "rdb_last_bgsave_status": "a snapshot",
    }
    for name, what in states.items():
        if info.get(name, "ok") != "ok":
            mend = "see Redis' log and the free space of its folder (redis-cli CONFIG GET dir)"
            yield fault("durability", f"Redis could not write {what} the last time", mend)


def _memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found = f"maxmemory-policy is {policy}: with its memory full, Redis throws away jobs and answers"
        yield fault(
            "redis memory",
            found,
            "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        )
    used, most = info.get("used_memory", 0), info.get("maxmemory", 0)
    owner = "maxmemory" if most else "the machine's memory, as maxmemory is not set"
    most = most or info.get("total_system_memory", 0)
    found = f"{used / MIB:.0f} MiB in use, of {most / MIB:.0f} MiB ({owner})"
    mend = "give Redis more memory (CONFIG SET maxmemory), or keep results for less long (result_ttl)"
    if not most or used <= NEAR_FULL * most:
        yield ok("redis memory", found)
    elif used <= FULL * most:
        yield warning("redis memory", found, mend)
    else:
        yield fault("redis memory", f"{found}: soon no job can be enqueued or ended", mend)


def _streams(server: Server) -> Iterator[Finding]:
    size = server.config.get("stream-node-max-bytes")
    if size is not None and int(size) > STREAM_NODE_BYTES:
        mend = f"redis-cli CONFIG SET stream-node-max-bytes {STREAM_NODE_BYTES}, and in redis.conf"
        found = f"stream-node-max-bytes is {size}: each finished job takes 6.2 KB in place of 2.8"
        yield warning("redis memory", found, mend)


def _clock(server: Server) -> Iterator[Finding]:
    if server.ahead_s is None:
        return
    way = "ahead of" if server.ahead_s > 0 else "behind"
    found = f"the clock of Redis is {abs(server.ahead_s):.1f} s {way} this machine's"
    if abs(server.ahead_s) > MAX_SKEW_S:
        mend = "run a time service on both machines (chronyc tracking, timedatectl set-ntp true)"
        yield warning("clock", found, mend)
    else:
        yield ok("clock", found)
