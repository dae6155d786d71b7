"""Messages between driver and ranks: a kind and a value, pickled, over a socket pair of their own."""

import pickle
import socket
import threading
from enum import IntEnum, auto
from typing import Any, NamedTuple

LENGTH_BYTES = 8


class Kind(IntEnum):
    """START, STEP and STOP come from the driver; READY, TOKENS and ERROR from a rank."""

    START = auto()
    READY = auto()
    STEP = auto()
    TOKENS = auto()
    ERROR = auto()
    STOP = auto()


class Message(NamedTuple):
    """value of STEP: the arguments of Runner.launch; of TOKENS: token ids, logprobs and pooled states."""

    kind: Kind
    value: Any = None


def encode(kind: Kind, value: Any = None) -> bytes:
    """Bytes of a message: how many follow, and its pickle."""
    body = pickle.dumps(Message(kind, value), pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


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
        message: Message = pickle.loads(self._read(int.from_bytes(self._read(LENGTH_BYTES), "little")))
        return message

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
