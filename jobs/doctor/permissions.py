"""What the connected user may do, asked with the commands and keys that are used.

Each command is queued in a transaction that is then dropped: the server looks at the user's rules when it
queues a command, and carries none of them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from redis.exceptions import NoPermissionError, ResponseError

from ..common.keys import RQ, prefixed
from .findings import Finding, fault, ok, warning
from .redis_server import Server

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

#: Without these RQ shows a worker without its name or address, and this command not what a restart drops.
_SHOWS_MORE = (
    ("client", "setname", "tokenmill-doctor"),
    ("client", "list"),
    ("acl", "dryrun", "default", "ping"),
)

PUBLISH = ("publish", _CHANNEL, "1")

#: What is in a refusal of a key or a channel, of Redis 6 ("one of the keys") and of later ones ("a key").
_OF_KEY, _OF_CHANNEL = " key", " channel"

#: Commands that rules name with their first argument, and how.
_WITH_ARGUMENT = {"script", "client", "memory", "acl"}


def commands_of(role: Role) -> list[tuple[str, ...]]:
    """Return every command that a role needs, with arguments."""
    listed = [each.split() for each in _BOTH.replace("\n", ";").split(";")]
    others = [*_OTHERS, PUBLISH]
    if role == "worker":
        listed += [each.split() for each in _WORKERS.replace("\n", ";").split(";")]
        others += _WORKERS_OTHERS
    return [(words[0], JOB_KEY, *words[1:]) for words in listed if words] + others


def check_permissions(server: Server, role: Role) -> Iterator[Finding]:
    """Name the rules that a role needs and this user lacks."""
    asked = commands_of(role)
    keyed = [("set", prefixed(key).replace("*", "tokenmill-doctor"), "1") for key in KEYS[role]]
    refusals = _refusals(server, [*asked, *keyed, *(_SHOWS_MORE if role == "worker" else ())])
    if refusals is None:
        mend = f"ACL SETUSER {server.user} +@transaction +@connection, in its file too"
        yield fault("permissions", f"user {server.user!r} may not use MULTI and DISCARD", mend)
        return
    commands = [
        _rule(words) for words, refusal in zip(asked, refusals, strict=False) if _is_of_command(refusal)
    ]
    refused_keys = zip(KEYS[role], refusals[len(asked) :], strict=False)
    keys = [f"~{prefixed(key)}" for key, refusal in refused_keys if _OF_KEY in refusal]
    channels = [f"&{RQ}:pubsub:*"] if any(_OF_CHANNEL in refusal for refusal in refusals) else []
    missing = [*keys, *channels, *dict.fromkeys(commands)]
    if missing:
        found = f"user {server.user!r} lacks what a {role} needs: {' '.join(missing)}"
        mend = f"ACL SETUSER {server.user} {' '.join(missing)}, in its file too (ops/redis-users.acl has all)"
        yield fault("permissions", found, mend)
    else:
        yield ok("permissions", f"user {server.user!r} may do all that a {role} needs")
    lacks = [
        _rule(words)
        for words, refusal in zip(_SHOWS_MORE, refusals[-len(_SHOWS_MORE) :], strict=True)
        if refusal
    ]
    if role == "worker" and lacks:
        found = f"without {' '.join(lacks)} less is shown: workers' names and addresses, what a restart drops"
        yield warning("permissions", found, f"ACL SETUSER {server.user} {' '.join(lacks)}, in its file too")


def _rule(words: Sequence[str]) -> str:
    return f"+{words[0]}|{words[1]}" if words[0] in _WITH_ARGUMENT else f"+{words[0]}"


def _is_of_command(refusal: str) -> bool:
    return bool(refusal) and _OF_KEY not in refusal and _OF_CHANNEL not in refusal


def _refusals(server: Server, commands: Sequence[Sequence[str]]) -> list[str] | None:
    """Return how the server refuses each command to this user, "" where it does not.

    None where no transaction can be had; nothing is asked then, as it would be carried out.
    """
    pool = server.client.connection_pool
    connection: Any = pool.get_connection()
    try:
        if _refusal(connection, ("MULTI",)) or _refusal(connection, ("DISCARD",)):
            return None
        connection.send_packed_command(connection.pack_commands([("MULTI",), *commands, ("DISCARD",)]))
        replies = [_reply(connection) for _ in range(len(commands) + 2)]
    finally:
        connection.disconnect()
        pool.release(connection)
    return replies[1:-1]


def _refusal(connection: Any, words: Sequence[str]) -> str:
    connection.send_command(*words)
    return _reply(connection)


def _reply(connection: Any) -> str:
    try:
        connection.read_response()
    except NoPermissionError as error:
        return str(error)
    except ResponseError:  # of a command that another version has otherwise
        return ""
    return ""
