"""What the driver and its ranks send each other arrives as it was."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.sampling.logit_edits import EditParts
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.batch.step_batch import StepBatch
from engine.tensor_parallel.channel import Channel
from engine.tensor_parallel.messages import (
    DTYPES,
    PREFIX_BYTES,
    Kind,
    decode,
    encode,
    pack_step,
    unpack_step,
)


def test_messages_arrive_as_they_were_whatever_their_size() -> None:
    """Every dtype, empty arrays, and megabytes through a socket's small buffer."""
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 200, size).astype(dtype) for dtype in DTYPES for size in (0, 1, 13, (5, 3))]
    arrays += [rng.integers(0, 9, (700, 1001)), np.zeros((0, 2), np.int64), np.asfortranarray(arrays[7])]
    ours, theirs = map(Channel, socket.socketpair())
    message = encode(Kind.STEP, arrays)
    assert len(message) > 5_000_000
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(ours.send, message)
        received = theirs.receive()
        sent.result()
    assert received.kind is Kind.STEP
    for array, expected in zip(received.arrays, arrays, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_a_step_arrives_as_it_was() -> None:
    ids, lens = np.arange(4), np.arange(1, 3)
    step = StepBatch(ids, ids + 1, ids + 2, ids[:2], np.ones((2, 3), np.int32), lens, lens)
    values = neutral_rows(3)
    values["temperature"] = values["seed"] = np.arange(3)
    parts = EditParts(pending=[(1, 0)], banned=[(0, np.array([1, 2])), (1, np.array([7]))])
    parts.penalize(1, (0.5, 1.5, 2.5), np.array([(7, 1), (-1, 0)], np.int32))
    for edits in (None, parts.joined(np.array([0, 2]))):
        sampling = SamplingBatch(values, np.arange(3, dtype=np.uint64), edits)
        message = encode(Kind.STEP, pack_step(step, sampling))
        prefix, body = message[:PREFIX_BYTES], bytearray(message[PREFIX_BYTES:])
        same_step, same_sampling = unpack_step(decode(prefix, body).arrays)
        assert repr(same_step) == repr(step)
        assert repr(same_sampling) == repr(sampling)
