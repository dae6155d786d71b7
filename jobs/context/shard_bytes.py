"""ShardBytes: the memory that the shards of one process take, each and together."""

from __future__ import annotations

import threading

#: Room for 250,000 prompts of 1 KB in a shard.
DEFAULT_BYTES = 256 << 20

#: Of the limit, held in prompts before no further shard begins: what is left is for those that have begun.
BEGIN_SHARE = 2


class NoRoomYet(Exception):
    """Raised where a shard must wait until others have let go of memory: begin again later."""


class ShardBytes:
    """Counts the bytes that open shards hold: of prompts, and of files that are being read. Thread-safe.

    limit: of the prompts of all shards together, and as much again of all files that are read. Who would be
    beyond it waits, and holds nothing meanwhile. Alone, nobody waits: a file's own bounds hold then.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held = self._reading = 0

    @property
    def held(self) -> int:
        """Bytes of prompts that are held now."""
        return self._held

    @property
    def reading(self) -> int:
        """Bytes that are reserved now for files that are read."""
        return self._reading

    def check_room(self) -> None:
        """Raise NoRoomYet while the open shards hold so many prompts that a further one might not fit."""
        if self._held >= self.limit // BEGIN_SHARE:
            raise NoRoomYet

    def hold(self, num_bytes: int, own: int = 0) -> None:
        """Count bytes of prompts; own: what the caller holds already. Raises NoRoomYet."""
        with self._lock:
            if self._held > own and self._held + num_bytes > self.limit:
                raise NoRoomYet
            self._held += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Count bytes of prompts no more."""
        with self._lock:
            self._held -= num_bytes

    def reserve_reading(self, num_bytes: int, own: int) -> bool:
        """Reserve bytes for a reader, negative ones to give back; return whether there is room.

        own: what the reader has reserved already.
        """
        with self._lock:
            if num_bytes > 0 and self._reading > own and self._reading + num_bytes > self.limit:
                return False
            self._reading += num_bytes
            return True
