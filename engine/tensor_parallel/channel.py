"""Channel: one end of the socket pair between the driver and a rank."""

from __future__ import annotations

import socket
import threading

from engine.tensor_parallel.messages import PREFIX_BYTES, Message, body_bytes, decode


class Channel:
    """Sends and receives whole messages. A peer that has ended shows as an OSError or EOFError."""

    def __init__(self, end: socket.socket, timeout_s: float | None = None) -> None:
        """timeout_s: how long the peer may take to read a message, or to go on with one it has begun."""
        self._socket = end
        self._socket.settimeout(timeout_s)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor, for a selector: it is readable when a message or the peer's end comes."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send an encoded message, whole also where another thread sends one."""
        with self._sending:
            self._socket.sendall(message)

    def receive(self) -> Message:
        """Wait for the next message. Raises EOFError if the peer has ended."""
        prefix = self._read(PREFIX_BYTES)
        return decode(prefix, self._read(body_bytes(prefix)))

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        rest = memoryview(buffer)
        while rest:
            num_read = self._socket.recv_into(rest)
            if not num_read:
                raise EOFError("the peer has closed its end")
            rest = rest[num_read:]
        return buffer
