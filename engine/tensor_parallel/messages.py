"""Messages between driver and ranks over a socket: a kind, facts and arrays. Nothing is pickled.

A message begins with its length, a number of eight bytes. Then comes a line of JSON with the kind, the facts, and the
dtype and shape of each array; a dtype is its index in DTYPES. The bytes of the arrays follow.
"""

import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_batch import ROW, SamplingBatch
from engine.schedule.logprobs import RowLogprobs
from engine.schedule.step_batch import StepBatch
from engine.tensor_parallel.block_tables import KeptTables, SentTables

Array = NDArray[Any]

DTYPES = [*map(np.dtype, (np.int32, np.int64, np.uint64, np.float32)), ROW]
LENGTH_BYTES = 8
#: Of a StepBatch; pictures are read by one process alone.
STEP_ARRAYS = [field.name for field in fields(StepBatch) if field.name != "pictures"]


class Kind(IntEnum):
    """The kinds of messages.

    START, STEP, ADAPTER and STOP come from the driver; ARRIVED, MET, READY, TOKENS, LOADED and ERROR from a rank.
    """

    START = auto()
    READY = auto()
    STEP = auto()
    TOKENS = auto()
    ERROR = auto()
    STOP = auto()
    ADAPTER = auto()
    LOADED = auto()
    ARRIVED = auto()
    MET = auto()


class Message(NamedTuple):
    """A message. Messages of kind START, READY, ADAPTER, LOADED and ERROR have facts; STEP and TOKENS have arrays."""

    kind: Kind
    facts: Any
    arrays: list[Array]


def encode(kind: Kind, facts: Any = None, arrays: Sequence[Array] = ()) -> bytes:
    """Write a message as bytes. Each array's dtype must be one of DTYPES."""
    forms = [(DTYPES.index(array.dtype), array.shape) for array in arrays]
    line = json.dumps((kind, facts, forms)).encode() + b"\n"
    body = b"".join((line, *(array.tobytes() for array in arrays)))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode(body: bytes | bytearray) -> Message:
    """Read a message from its bytes, without the length before them."""
    at = body.index(b"\n") + 1
    kind, facts, forms = json.loads(body[:at])
    arrays: list[Array] = []
    for dtype, shape in forms:
        # In the body an array may begin at any byte; its copy is aligned.
        arrays.append(np.ndarray(shape, DTYPES[dtype], body, at).copy())
        at += arrays[-1].nbytes
    return Message(Kind(kind), facts, arrays)


def pack_step(step: StepBatch, sampling: SamplingBatch, tables: SentTables) -> list[Array]:
    """Return the arrays of a STEP, the same for all ranks. tables: what the ranks have of the block tables."""
    num_known, new_blocks = tables.changes(step)
    step = replace(step, block_tables=new_blocks)
    return [
        *(getattr(step, name) for name in STEP_ARRAYS),
        num_known,
        sampling.values,
        sampling.position,
        *_arrays(sampling.ready_edits()),
    ]


def unpack_step(arrays: list[Array], tables: KeptTables) -> tuple[StepBatch, SamplingBatch]:
    """Read the arrays of `pack_step`. tables: the block tables that this rank has."""
    num_known, values, position, *edits = arrays[len(STEP_ARRAYS) :]
    sampling = SamplingBatch(values, position, LogitEdits(*edits) if edits else None)
    # The first arrays are the step's; zip leaves out the others.
    fields_of_step: Any = dict(zip(STEP_ARRAYS, arrays, strict=False))
    step = StepBatch(**fields_of_step)
    block_tables = tables.update(step.slots, step.context_lens, num_known, step.block_tables)
    return replace(step, block_tables=block_tables), sampling


Tokens = tuple[NDArray[np.int64], RowLogprobs | None, NDArray[np.float32] | None]


def pack_tokens(tokens: Tokens) -> list[Array]:
    """Return the arrays of TOKENS: token ids, pooled states ([0, 0] if there are none), and log probabilities."""
    token_ids, logprobs, pooled = tokens
    if pooled is None:
        pooled = np.zeros((0, 0), np.float32)
    return [token_ids, pooled, *_arrays(logprobs)]


def unpack_tokens(arrays: list[Array]) -> Tokens:
    """Read the arrays of `pack_tokens`."""
    token_ids, pooled, *logprob_arrays = arrays
    logprobs = RowLogprobs(*logprob_arrays) if logprob_arrays else None
    return token_ids, logprobs, pooled if len(pooled) else None


def _arrays(part: LogitEdits | RowLogprobs | None) -> list[Array]:
    return [] if part is None else [getattr(part, field.name) for field in fields(part)]


class Channel:
    """Sends and receives whole messages. If the peer has ended, a call raises OSError or EOFError."""

    def __init__(self, end: socket.socket, timeout_s: float | None = None) -> None:
        """timeout_s: how long a call may wait while the peer reads a message, or goes on sending one."""
        self._socket = end
        self._socket.settimeout(timeout_s)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor, for a selector: readable once a message comes or the peer closes its end."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send an encoded message. Messages of several threads are sent one after another."""
        with self._sending:
            self._socket.sendall(message)

    def receive(self) -> Message:
        """Wait for the next message. Raises EOFError if the peer has ended."""
        length = int.from_bytes(self._read(LENGTH_BYTES), "little")
        return decode(self._read(length))

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        unread = memoryview(buffer)
        while unread:
            num_read = self._socket.recv_into(unread)
            if not num_read:
                raise EOFError("the peer has closed its end")
            unread = unread[num_read:]
        return buffer
