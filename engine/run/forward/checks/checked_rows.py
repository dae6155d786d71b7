"""Begins decode steps as graphs do, to check the kernels that write their rows and make their inputs."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import CapturableBackend
from engine.run.forward.rows import StaticRows
from engine.run.forward.runner import Sampled
from engine.run.forward.warm_up import make_step
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch

NUM_ROWS = 600  # more than a program of either kernel takes at once
NUM_LEFT = 550  # rows of the second step; the others become padding
MOST_BLOCKS = 4  # of a sequence
LARGEST = np.iinfo(np.int32).max  # block, so that slots need 64 bits


def begin_steps(backend: CapturableBackend, block_size: int, device: torch.device) -> None:
    """Begin three steps by the backend's `write_rows` and `advance`, which compare what they do.

    In the second step a third of the rows have new sequences. The step before has sampled their tokens in other rows,
    which are written too. The last rows become padding.
    """
    static = StaticRows(NUM_ROWS, MOST_BLOCKS, block_size, device, backend.write_rows)
    sampling = SamplingBatch(neutral_rows(NUM_ROWS), np.zeros(NUM_ROWS, np.uint64))
    rows = np.arange(NUM_ROWS)
    for index, name in enumerate(sampling.values.dtype.names or ()):
        sampling.values[name] = index * NUM_ROWS + rows
    contexts = 1 + rows % ((MOST_BLOCKS - 2) * block_size)
    static.write(_decode_step(contexts, rows, block_size), sampling, None)
    backend.advance(static.state)

    sampled = torch.from_numpy(rows % 7 - 1).to(device)  # -1 stands for none
    static.state.next_token_ids.copy_(sampled)
    new = rows[:NUM_LEFT:3]
    generations = rows[:NUM_LEFT].copy()
    generations[new] += NUM_ROWS
    second = replace(
        _decode_step(1 + contexts[:NUM_LEFT], generations, block_size),
        pending_rows=new,
        pending_samples=new[::-1].copy(),
    )
    static.write(second, sampling, Sampled(static.state.next_token_ids, rows))
    backend.advance(static.state)

    # the sampler writes padding rows too
    static.state.next_token_ids.copy_(sampled)
    backend.advance(static.state)


def _decode_step(
    contexts: NDArray[np.int64], generations: NDArray[np.int64], block_size: int
) -> StepBatch:
    """Make a step of decodes, each with blocks of its own."""
    num_seqs = len(contexts)
    step = make_step([1] * num_seqs, contexts.tolist(), block_size, num_seqs * MOST_BLOCKS)
    blocks = np.arange(step.block_tables.size, dtype=np.int32).reshape(step.block_tables.shape)
    return replace(
        step,
        token_ids=np.arange(num_seqs),
        block_tables=LARGEST - blocks,
        slots=np.arange(num_seqs),
        generations=generations,
    )
