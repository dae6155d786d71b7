"""The log of actions in Redis: who did what in the dashboard, and what came of it."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import ACTIONS_KEY

#: The most entries that are kept, the latest ones.
MAX_ENTRIES = 2000


@dataclass(frozen=True)
class LogEntry:
    """One action. Texts are safe to show. at: Unix seconds. who: the name of the login. about: what it was done to."""

    at: float
    who: str
    what: str
    about: str
    outcome: str


def write_entry(connection: Redis, entry: LogEntry) -> None:
    """Add an action to the log. Raises RedisError."""
    with connection.pipeline(transaction=False) as pipe:
        pipe.lpush(ACTIONS_KEY, json.dumps(asdict(entry)))
        pipe.ltrim(ACTIONS_KEY, 0, MAX_ENTRIES - 1)
        pipe.execute()


def count_entries(connection: Redis) -> int:
    """Return how many actions the log has. Raises RedisError."""
    length: Any = connection.llen(ACTIONS_KEY)
    return int(length)


def read_entries(connection: Redis, first: int, most: int) -> list[LogEntry]:
    """Return actions, the latest first, without the first ones. Raises RedisError."""
    raws: Any = connection.lrange(ACTIONS_KEY, first, first + most - 1)
    entries = []
    for raw in raws:
        fields = stored.json_object(raw)
        at = stored.seconds(str(fields.get("at")))
        if at is not None:
            texts = (fields.get(name, "") for name in ("who", "what", "about", "outcome"))
            entries.append(LogEntry(at, *(safe_name(str(text), MAX_TEXT_CHARS) for text in texts)))
    return entries
