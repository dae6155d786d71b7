"""What a Redis holds, without what may differ between two runs of the same jobs, by RQ or by us.

Left out, besides moments and ids of executions:

- RQ copies a value into the job's field `result` where it saves the whole hash again; ours is in rq:results.
- Our field `closed_by` tells a repeated call from a new one, and `tokenmill_kind` a function from a prompt.
- A failed job without failure_ttl is kept for a year by both; RQ keeps its results for ever.
- RQ does not save when a job ended whose failure goes on no record.
- RQ leaves a job in the dependents of those of its dependencies that ended before the last one.
"""

import base64
import json
import time
import zlib
from typing import Any

from redis import Redis

ROUND_S = 100
"""Times to live are told apart by as much."""

_MOMENTS = ("_at", "last_heartbeat")
_UNLIKE = ("result", "closed_by", "tokenmill_kind")
_OTHER_KEYS = ("rq:worker", "rq:workers", "rq:scheduler", "rq:clean_", "tokenmill:")


def state_of(redis: Redis) -> dict[str, Any]:
    """Every key of RQ's jobs with its value and its time to live; moments are told from absence only."""
    keys = sorted(found.decode() for found in redis.scan_iter())
    state = {
        key: {"value": _value(redis, key), "ttl": _time_to_live(redis, key)}
        for key in keys
        if not key.startswith(_OTHER_KEYS)
    }
    return {key: entry for key, entry in state.items() if entry["value"]}


def _time_to_live(redis: Redis, key: str) -> int | None:
    if key.startswith("rq:results:") and redis.hget(f"rq:job:{key[11:]}", "status") == b"failed":
        return None
    ttl_s = redis.ttl(key)
    return ttl_s if ttl_s < 0 else _rounded(ttl_s)


def _value(redis: Redis, key: str) -> Any:
    kind = redis.type(key)
    if kind == b"hash":
        fields = {name.decode(): value for name, value in redis.hgetall(key).items()}
        if fields.get("status") == b"failed" and not redis.exists(
            key.replace("rq:job:", "rq:results:")
        ):
            fields["ended_at"] = b""
        return {name: _field(name, value) for name, value in fields.items() if name not in _UNLIKE}
    if kind == b"zset":
        return {
            member.decode(): _score(score)
            for member, score in redis.zrange(key, 0, -1, withscores=True)
        }
    if kind == b"set":
        members = sorted(member.decode() for member in redis.smembers(key))
        if key.endswith(":dependents"):
            return [
                member
                for member in members
                if redis.hget(f"rq:job:{member}", "status") == b"deferred"
            ]
        return members
    if kind == b"list":
        return [item.decode() for item in redis.lrange(key, 0, -1)]
    if kind == b"stream":
        return [_entry(fields) for _, fields in redis.xrange(key)]
    return str(redis.get(key))


def _field(name: str, value: bytes) -> Any:
    if name.endswith(_MOMENTS):
        return bool(value)
    if name in ("data", "exc_info"):
        value = zlib.decompress(value)
    return _last_line(value.decode()) if name == "exc_info" else value.decode()


def _entry(fields: dict[bytes, bytes]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for raw_name, value in fields.items():
        name = raw_name.decode()
        if name == "exc_string":
            shown[name] = _last_line(zlib.decompress(base64.b64decode(value)).decode())
        elif name == "return_value":
            shown[name] = json.loads(base64.b64decode(value))
        else:
            shown[name] = value.decode() if name in ("type", "worker_name") else bool(value)
    return shown


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _score(score: float) -> str:
    if score in (float("inf"), float("-inf")) or score < 1e9:
        return str(score)
    return f"in {_rounded(int(score - time.time()))} s"


def _rounded(seconds: int) -> int:
    return round(seconds / ROUND_S) * ROUND_S
