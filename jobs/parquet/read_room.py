"""ReadRoom: a reader's part of what the files that a process reads may take in memory together."""

from __future__ import annotations

from collections.abc import Callable

from jobs.context.shard_bytes import NoRoomYet, ShardBytes


class ReadRoom:
    """What one reader has reserved, before it reads that. For one thread at a time.

    held: where it is counted. make_room: closes readers that nobody uses, asked for where there is no room.
    """

    def __init__(self, held: ShardBytes, make_room: Callable[[], None] = lambda: None) -> None:
        self.limit = held.limit
        self._held, self._make_room = held, make_room
        self._bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Hold so much in all, in place of what was held before. Raises NoRoomYet."""
        more = num_bytes - self._bytes
        if not self._held.reserve_reading(more, self._bytes):
            self._make_room()
            if not self._held.reserve_reading(more, self._bytes):
                raise NoRoomYet
        self._bytes = num_bytes

    def close(self) -> None:
        """Give all back; may be called more than once."""
        self.reserve(0)
