"""Stores the keys that clients of `tokenmill serve` send, and the limits of their projects.

A key belongs to one project.

Redis holds only the hashes of keys. A key has 256 random bits, so nobody can try all keys, and one round of SHA-256 is
enough.
"""

import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import API_KEYS_KEY, API_LIMITS_KEY, api_rate_key
from jobs.errors import wrong_value_error

#: The beginning of every key.
PREFIX = "tm-"
#: The length of a key's id, which is the beginning of the key's hash. Lists show it, and `keys revoke` takes it.
ID_CHARS = 12
#: A field beside the keys. It is set when a key is revoked, and never removed.
_HAD_KEYS = "had-keys"


@dataclass(frozen=True)
class ApiKey:
    """A key without its secret.

    id: the beginning of the secret's hash. name: what people call the key. created_at: Unix seconds.
    """

    id: str
    project: str
    name: str
    created_at: int


#: A project's name is also the name of a folder.
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def add_key(connection: Redis, project: str, name: str) -> str:
    """Make a key, and return its secret. Nobody can read the secret again, because Redis keeps only its hash.

    name: what people call the key. Raises InvalidValue for a name that no project may have.
    """
    _check_project(project)
    secret = PREFIX + secrets.token_urlsafe(32)
    record = {"project": project, "name": name, "created_at": int(time.time())}
    connection.hset(API_KEYS_KEY, _hash(secret), json.dumps(record))
    return secret


def list_keys(connection: Redis) -> list[ApiKey]:
    """Return all keys, the oldest first."""
    records = _records(connection)
    keys = [_key(stored.text(digest), record) for digest, record in records.items()]
    return sorted(keys, key=lambda key: (key.created_at, key.id))


def revoke_key(connection: Redis, key_id: str) -> bool:
    """Remove the key with this id; return whether there was such a key."""
    if not key_id:
        return False
    for digest in map(stored.text, _records(connection)):
        if digest[:ID_CHARS] == key_id:
            # `_HAD_KEYS` is set before the key is removed. If Redis held no key and no such field, a local server
            # would accept any request.
            connection.hset(API_KEYS_KEY, _HAD_KEYS, "1")
            return bool(connection.hdel(API_KEYS_KEY, digest))
    return False


def has_keys(connection: Redis) -> bool:
    """Whether requests need a key: whether a key was ever made, even if all keys have been revoked since."""
    return bool(connection.exists(API_KEYS_KEY))


def _records(connection: Redis) -> dict[bytes, bytes]:
    """Return the records of all keys by their hashes."""
    records: Any = connection.hgetall(API_KEYS_KEY)
    records.pop(_HAD_KEYS.encode(), None)  # this field records that keys were revoked; it is no key
    return dict(records)


@dataclass(frozen=True)
class ProjectLimits:
    """The limits of a project; None for no limit.

    open_batches: the most batches that have not ended. stored_bytes: the most bytes of all uploads together.
    tokens_queued: the most tokens of prompts and answers, over all open batches and all calls that clients await.
    """

    requests_per_minute: int | None = None
    open_batches: int | None = None
    stored_bytes: int | None = None
    tokens_queued: int | None = None


def set_limits(connection: Redis, project: str, limits: ProjectLimits) -> None:
    """Set a project's limits, which replace its earlier ones. Raises InvalidValue."""
    _check_project(project)
    connection.hset(API_LIMITS_KEY, project, json.dumps(asdict(limits)))


@dataclass(frozen=True)
class KnownKeys:
    """All keys and limits at one moment.

    needs_key: whether requests need a key; see has_keys. keys: the keys by their hashes. limits: the limits by project.
    """

    needs_key: bool
    keys: Mapping[str, ApiKey]
    limits: Mapping[str, ProjectLimits]

    def find(self, secret: str) -> ApiKey | None:
        """Return the key with this secret; None if there is none. Hashes are compared in constant time."""
        digest = _hash(secret)
        key_of_secret = None
        # The search does not stop at the key, so that its duration tells nothing about the keys.
        for known_digest, key in self.keys.items():
            if hmac.compare_digest(known_digest, digest):
                key_of_secret = key
        return key_of_secret

    def limits_of(self, project: str) -> ProjectLimits:
        """Return a project's limits."""
        return self.limits.get(project, ProjectLimits())


def known_keys(connection: Redis) -> KnownKeys:
    """Read all keys and limits. Raises RedisError."""
    with connection.pipeline(transaction=False) as pipe:
        pipe.hgetall(API_KEYS_KEY)
        pipe.hgetall(API_LIMITS_KEY)
        records, limit_records = pipe.execute()
    # If all keys were revoked, the field _HAD_KEYS is still there, so that requests still need a key.
    needs_key = bool(records)
    keys = {}
    for field_name, record in records.items():
        digest = stored.text(field_name)
        if digest != _HAD_KEYS:
            keys[digest] = _key(digest, record)
    limits = {stored.text(name): _limits(record) for name, record in limit_records.items()}
    return KnownKeys(needs_key, keys, limits)


def _limits(record: bytes) -> ProjectLimits:
    """Return the limits in a record. Where a value is missing or is not a count, there is no limit."""
    values = stored.json_object(record)
    limits = {}
    for field in fields(ProjectLimits):
        limits[field.name] = stored.count(values.get(field.name))
    return ProjectLimits(**limits)


def count_request(connection: Redis, project: str, now: float) -> int:
    """Count a request of a project; return the number of its requests in this minute. now: Unix seconds."""
    key = api_rate_key(project, int(now // 60))
    with connection.pipeline(transaction=False) as pipe:
        pipe.incr(key)
        pipe.expire(key, 120)  # the minute is over by then
        count, _ = pipe.execute()
    return int(count)


def _check_project(project: str) -> None:
    """Raise InvalidValue for a name that no project may have."""
    if _PROJECT.fullmatch(project) is None:
        raise wrong_value_error(
            "project", project, "1 to 64 letters, digits, - and _, a letter or digit first"
        )


def _hash(secret: str) -> str:
    """Return the hash by which Redis knows a key."""
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _key(digest: str, record: Any) -> ApiKey:
    """Return the key that a record of Redis describes. digest: the key's hash."""
    values = stored.json_object(record)
    return ApiKey(
        id=digest[:ID_CHARS],
        project=_shown(values.get("project")),
        name=_shown(values.get("name")),
        created_at=stored.count(values.get("created_at")) or 0,
    )


def _shown(value: object) -> str:
    """Return a text of a record, safe to show; "" for anything else."""
    return safe_name(value) if isinstance(value, str) else ""
