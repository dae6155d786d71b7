"""ShardBytes: the memory that the shards of one process take, each and together."""

from __future__ import annotations

import threading

#: Room for 250,000 prompts of 1 KB in a shard.
DEFAULT_BYTES = 256 << 20


class NoRoomYet(Exception):
    """Raised where a shard must wait until others have handed out their prompts: open it again later."""


class ShardBytes:
    """Counts the bytes of prompts that open shards hold. Thread-safe.

    limit: bytes of what one shard holds, or has decoded at a time. The shards of a process together begin
    none beyond it.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def check_room(self) -> None:
        """Raise NoRoomYet while the open shards hold as much as one may."""
        if self._held >= self.limit:
            raise NoRoomYet

    def hold(self, num_bytes: int) -> None:
        """Count bytes; negative ones are let go of."""
        with self._lock:
            self._held += num_bytes
