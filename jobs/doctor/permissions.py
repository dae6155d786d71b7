"""What the connected user may do, asked with the commands and keys that are used.

Each command is queued in a transaction that is then dropped: the server looks at the user's rules when it
queues a command, and carries none of them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from jobs.common.keys import RQ, prefixed
from jobs.doctor.findings import Finding, fault, ok
from jobs.doctor.redis_server import Server

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
