"""The log of actions in Redis: who did what in the dashboard, and with what outcome."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import ACTIONS_KEY

#: The most entries that are kept. Older entries are removed.
MAX_ENTRIES = 2000


@dataclass(frozen=True)
class LogEntry:
    """An entry of the log. Texts are safe to show.

    at: Unix seconds. who: the name of the login. what: the action. about: what the action was done to.
    """

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
    """Return at most `most` entries, the latest first, from number `first` on. Raises RedisError."""
    stored_entries: Any = connection.lrange(ACTIONS_KEY, first, first + most - 1)
    entries = []
    for stored_entry in stored_entries:
        fields = stored.json_object(stored_entry)
        at = stored.seconds(str(fields.get("at")))
        if at is None:
            continue
        entries.append(
            LogEntry(
                at,
                who=_shown(fields, "who"),
                what=_shown(fields, "what"),
                about=_shown(fields, "about"),
                outcome=_shown(fields, "outcome"),
            )
        )
    return entries


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """Return a field of a stored entry as a text that is safe to show."""
    return safe_name(str(fields.get(name, "")), MAX_TEXT_CHARS)
