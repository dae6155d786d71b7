"""What nobody can use in Redis is set aside, so that work goes on; people look at it in the quarantine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common.display import safe_name
from jobs.common.keys import QUARANTINE, prefixed
from jobs.common.shared_keys import OF_A_QUEUE, SHARED
from worker.store.scripts import Scripts

MOST_LINES = 20
"""Logged at a time: the rest is counted, so that a stranger who goes on and on does not fill the log."""

MOST_ENTRIES = 1000
"""Set aside in one call: the rest has its turn at the next look."""

NO_TEXT = b"bytes that are no UTF-8"
NO_EXECUTION = b"it names no job and execution"

_OF_A_WORKER = (
    ("hash", prefixed("rq:worker:%s")),
    ("string", prefixed("tokenmill:worker:%s")),
    ("list", prefixed("tokenmill:samples:%s")),
)
"""Types and keys of a worker by its name."""


@dataclass(frozen=True)
class Entry:
    """What could not be used: in which key it stood, and its bytes, b'' where the whole key is meant."""

    key: bytes
    entry: bytes
    reason: bytes

    def __str__(self) -> str:
        what = f"{safe_name(self.entry)} in {safe_name(self.key)}" if self.entry else safe_name(self.key)
        return f"{what}: {safe_name(self.reason)}"


class Quarantine:
    """The quarantine as one worker fills it. Not thread-safe."""

    def __init__(self, client: Redis, worker_name: str) -> None:
        self._client, self._worker_name = client, worker_name.encode()
        self._scripts = Scripts(client, worker_name)
        self._own = [(kind, key % worker_name) for kind, key in _OF_A_WORKER]
        self._last_seen: bytes | None = None

    def check(self, queue_names: Iterable[str], others: Iterable[tuple[str, str | bytes]] = ()) -> int:
        """Set aside what is of another type among the keys that the jobs of these queues share.

        others: type and key of further ones.
        Returns how many keys were set aside. Raises redis.exceptions.RedisError.
        """
        self._begin_to_look()
        of_queues = [(kind, key % name) for name in queue_names for kind, key in OF_A_QUEUE]
        args = [part for each in (*SHARED, *self._own, *of_queues, *others) for part in each]
        return int(self._scripts.call_many([("check_types", args)])[0])

    def set_aside(self, entries: Sequence[Entry]) -> None:
        """Move entries that cannot be read out of their keys."""
        if entries:
            args = [part for each in entries[:MOST_ENTRIES] for part in (each.key, each.entry, each.reason)]
            self._scripts.call_many([("set_aside", args)])

    def tell(self, log: logging.Logger) -> None:
        """Log what this worker's scripts have set aside since the last call, or the first `check`."""
        self._begin_to_look()
        found = self._news()
        for entry in found[:MOST_LINES]:
            log.warning("set aside in Redis (see docs/recovery.md, %s): %s", QUARANTINE, entry)
        if len(found) > MOST_LINES:
            log.warning("set aside in Redis: %d more", len(found) - MOST_LINES)

    def _begin_to_look(self) -> None:
        """What a worker of the same name left is no news."""
        if self._last_seen is None:
            self._last_seen = self._latest()

    def _latest(self) -> bytes:
        self._scripts.call_many([("check_types", ("stream", QUARANTINE))])
        latest: Any = self._client.xrevrange(QUARANTINE, count=1)
        return bytes(latest[0][0]) if latest else b"0-0"

    def _news(self) -> list[Entry]:
        assert self._last_seen is not None
        if _place(self._latest()) < _place(self._last_seen):
            self._last_seen = b"0-0"  # it was set aside itself, or deleted, and begins anew
        added: Any = self._client.xrange(QUARANTINE, min=self._last_seen)
        news = [fields for entry_id, fields in added if entry_id != self._last_seen]
        self._last_seen = added[-1][0] if added else self._last_seen
        return [
            Entry(*(fields.get(name, b"") for name in (b"key", b"entry", b"reason")))
            for fields in news
            if fields.get(b"worker") == self._worker_name
        ]


def _place(entry_id: bytes) -> tuple[int, int]:
    milliseconds, number = entry_id.split(b"-")
    return int(milliseconds), int(number)
