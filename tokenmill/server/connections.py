"""Closes connections that a client keeps open without using them."""

from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: The most seconds for the head of a request, and for the rest of a request that was answered before its end.
HEAD_S = 30.0
#: The most seconds that a client may let the connection's buffers stay full.
READ_S = 60.0


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client is too slow. How long an answer takes is bounded elsewhere."""

    head_s = HEAD_S
    read_s = READ_S
    _head_timer: TimerHandle | None = None
    _read_timer: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_head_timer()

    def data_received(self, data: bytes) -> None:
        """Take bytes. Start the timer if they begin a request."""
        super().data_received(data)
        self._set_head_timer()

    def on_response_complete(self) -> None:
        """Start the timer: for the next request, or for the rest of a request that was answered before its end."""
        super().on_response_complete()
        self._set_head_timer()

    def pause_writing(self) -> None:
        """Start a timer, because the client has to read before more can be written."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read."""
        super().resume_writing()
        _cancel(self._read_timer)
        self._read_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(exc)
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._read_timer)
        self._read_timer = None

    def _set_head_timer(self) -> None:
        """Start the timer while no request is being answered, and stop it otherwise. A running timer goes on."""
        cycle: Any = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering or self.transport.is_closing():
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)


def _cancel(timer: TimerHandle | None) -> None:
    """Cancel a timer if there is one."""
    if timer is not None:
        timer.cancel()
