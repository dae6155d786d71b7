"""Messages between driver and ranks over a socket: a kind and some arrays, as bytes, never pickled.

A message is a prefix of three int64 (kind, number of arrays, bytes that follow), then for each array four
int64 (dtype, dimensions, and its shape, 1 where it has no second one), then the arrays, each where `starts`
says. No length is fixed.
"""

import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, auto
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kernels.upload import pack, starts
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_batch import ROW, SamplingBatch
from engine.schedule.logprobs import RowLogprobs
from engine.schedule.step_batch import StepBatch

Array = NDArray[Any]

DTYPES: tuple[np.dtype[Any], ...] = (
    *map(np.dtype, (np.uint8, np.int32, np.int64, np.uint64, np.float32)),
    ROW,
)
PREFIX_BYTES = 3 * 8
NUM_STEP_ARRAYS = len(fields(StepBatch))


class Kind(IntEnum):
    """START, STEP and STOP come from the driver; READY, TOKENS and ERROR from a rank."""

    START = auto()
    READY = auto()
    STEP = auto()
    TOKENS = auto()
    ERROR = auto()
    STOP = auto()


@dataclass(frozen=True)
class Message:
    """A kind and its arrays."""

    kind: Kind
    arrays: list[Array]


def encode(kind: Kind, arrays: Sequence[Array] = ()) -> bytes:
    """Bytes of a message. Arrays have one dimension or two and a dtype of DTYPES."""
    table = [(DTYPES.index(array.dtype), array.ndim, *array.shape, 1)[:4] for array in arrays]
    body = pack([np.array(table, np.int64), *arrays], pin_memory=False).numpy()
    return np.array([kind, len(arrays), len(body)], np.int64).tobytes() + body.tobytes()


def body_bytes(prefix: bytes | bytearray) -> int:
    """How many bytes follow this prefix."""
    return int(np.frombuffer(prefix, np.int64)[2])


def decode(prefix: bytes | bytearray, body: bytearray) -> Message:
    """The message; its arrays are views of `body`."""
    kind, num_arrays, _ = np.frombuffer(prefix, np.int64).tolist()
    table = np.frombuffer(body, np.int64, 4 * num_arrays).reshape(num_arrays, 4)
    forms = [(DTYPES[dtype], tuple(shape[:num_dims])) for dtype, num_dims, *shape in table.tolist()]
    places = starts([table.nbytes, *(dtype.itemsize * prod(shape) for dtype, shape in forms)])[1:]
    arrays: list[Array] = [
        np.ndarray(shape, dtype, body, place) for (dtype, shape), place in zip(forms, places, strict=False)
    ]
    return Message(Kind(kind), arrays)


def pack_step(step: StepBatch, sampling: SamplingBatch) -> list[Array]:
    """Arrays of a STEP, the same for all ranks."""
    ready = sampling.ready_edits()
    edits = [] if ready is None else _arrays(ready)
    return [*_arrays(step), sampling.values, sampling.position, *edits]


def unpack_step(arrays: list[Array]) -> tuple[StepBatch, SamplingBatch]:
    """What `pack_step` packed."""
    values, position, *edits = arrays[NUM_STEP_ARRAYS:]
    sampling = SamplingBatch(values, position, LogitEdits(*edits) if edits else None)
    return StepBatch(*arrays[:NUM_STEP_ARRAYS]), sampling


def _arrays(part: StepBatch | LogitEdits) -> list[Array]:
    return [getattr(part, field.name) for field in fields(part)]


def pack_tokens(
    token_ids: NDArray[np.int64], logprobs: RowLogprobs | None, pooled: NDArray[np.float32] | None
) -> list[Array]:
    """Arrays of TOKENS: those of a step's, of what it pooled, empty where that is nothing, and of what it
    says of tokens."""
    said = [] if logprobs is None else [getattr(logprobs, each.name) for each in fields(logprobs)]
    return [token_ids, np.zeros((0, 0), np.float32) if pooled is None else pooled, *said]


def unpack_tokens(
    arrays: list[Array],
) -> tuple[NDArray[np.int64], RowLogprobs | None, NDArray[np.float32] | None]:
    """What `pack_tokens` packed."""
    token_ids, pooled, *said = arrays
    return token_ids, RowLogprobs(*said) if said else None, pooled if len(pooled) else None


def pack_json(value: dict[str, Any]) -> list[Array]:
    """Arrays of a START or an ERROR: one of UTF-8 JSON."""
    return [np.frombuffer(json.dumps(value).encode(), np.uint8)]


def unpack_json(arrays: list[Array]) -> dict[str, Any]:
    """What `pack_json` packed."""
    value: dict[str, Any] = json.loads(arrays[0].tobytes())
    return value


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
