"""Closes connections whose client keeps one open and does nothing with it."""

from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds within which the head of a request must have come, and the rest of one that was answered before its end.
HEAD_S = 30.0
#: Seconds within which a client must read what fills the connection's buffers.
READ_S = 60.0


class BoundedConnection(H11Protocol):
    """A connection that is closed if its client is too slow. The answer to a request has limits of its own."""

    head_s = HEAD_S
    read_s = READ_S
    _head_timer: TimerHandle | None = None
    _read_timer: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """Await the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._set_head_timer()

    def data_received(self, data: bytes) -> None:
        """Take bytes; what they begin must be whole in time."""
        super().data_received(data)
        self._set_head_timer()

    def on_response_complete(self) -> None:
        """Await the next request, or the rest of this one."""
        super().on_response_complete()
        self._set_head_timer()

    def pause_writing(self) -> None:
        """Await that the client reads."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        _cancel(self._read_timer)
        self._read_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Await nothing more."""
        super().connection_lost(exc)
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._read_timer)
        self._read_timer = None

    def _set_head_timer(self) -> None:
        """Have the time run while no request is answered. More bytes do not begin it anew."""
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
