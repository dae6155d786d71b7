"""Connections of browsers, none of which is kept for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds that a connection lasts at most; a browser makes a new one for its next request.
CONNECTION_S = 30.0

#: At a time. A further one takes the place of the oldest, so that those that hang keep nobody out.
MAX_CONNECTIONS = 500


class TimedConnection(H11Protocol):
    """One connection. What is being answered at its end is answered first."""

    made_at: float

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            oldest: Any = min(self.connections, key=lambda each: getattr(each, "made_at", 0.0))
            oldest.transport.abort()
            self.connections.discard(oldest)
        super().connection_made(transport)
        self.made_at = self.loop.time()
        self._end = self.loop.call_later(CONNECTION_S, self.shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


class TriesInTurn:
    """Lets logins be tried freely until ten were wrong; from then on one a second, and few wait for it."""

    def __init__(self, pause_s: float = 1.0) -> None:
        self._pause_s, self._wrong, self._waiting = pause_s, 0, 0
        self._turn = asyncio.Lock()

    async def take(self) -> bool:
        """Wait for a try. False: too many wait already."""
        if self._wrong < 10:
            return True
        if self._waiting >= 10:
            return False
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(self._pause_s)
        finally:
            self._waiting -= 1
        return True

    def note(self, *, is_right: bool) -> None:
        """Take note of what the try was."""
        self._wrong = 0 if is_right else self._wrong + 1
