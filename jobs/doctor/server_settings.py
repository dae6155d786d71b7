"""Whether a Redis is set up so that no job is lost: version, durability, memory, clock."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from jobs.common.keys import prefixed
from jobs.doctor.findings import Finding, fault, ok, warning
from jobs.doctor.redis_server import Server

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
