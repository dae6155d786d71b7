"""Makes decode steps as graphs have them, over static rows, for a check of the kernels that run in them."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import CapturableBackend, ForwardBatch
from engine.run.forward.rows import StaticRows
from engine.run.forward.runner import Sampled
from engine.run.forward.warm_up import make_step
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch

NUM_ROWS = 600  # more than a program of either kernel takes at once
NUM_LEFT = 550  # rows of the second step; the others become padding
MOST_BLOCKS = 4  # of a sequence
LONGEST = 4096  # tokens for which a recorded step has blocks, far more than its sequences have
LARGEST = np.iinfo(np.int32).max  # block, so that slots need 64 bits


def begin_steps(backend: CapturableBackend, block_size: int, device: torch.device) -> None:
    """Begin three steps by the backend's `write_rows` and `advance`, which compare what they do.

    In the second step a third of the rows have new sequences. The step before has sampled their tokens in other rows,
    which are written too. The last rows become padding.
    """
    static = StaticRows(NUM_ROWS, MOST_BLOCKS, block_size, device, backend.write_rows)
    sampling = _neutral_sampling(NUM_ROWS)
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


def recorded_batch(
    step: StepBatch,
    backend: CapturableBackend,
    block_size: int,
    device: torch.device,
    *,
    has_states: bool,
) -> ForwardBatch:
    """Return the batch that a graph computes for a step of decodes, without padding.

    The step reads prefixes once if its sequences have any in common. has_states: whether the model keeps states.
    """
    num_seqs = len(step.query_lens)
    static = StaticRows(
        num_seqs,
        -(-LONGEST // block_size),
        block_size,
        device,
        backend.write_rows,
        backend.prefix_limits,
        has_states=has_states,
    )
    seqs = np.arange(num_seqs)
    joining = replace(step, slots=seqs, generations=seqs)
    static.write(joining, _neutral_sampling(num_seqs), None)
    backend.advance(static.state)
    state = static.state
    return ForwardBatch(
        token_ids=state.token_ids,
        positions=state.positions,
        slot_mapping=state.slot_mapping,
        sample_rows=static.indices[:0],
        attention=backend.decode_metadata(
            static.indices,
            state.context_lens,
            state.block_tables,
            LONGEST,
            static.order,
            static.prefixes if static.has_prefixes else None,
        ),
        states=None if static.states is None else static.states.first(num_seqs),
    )


def _neutral_sampling(num_rows: int) -> SamplingBatch:
    return SamplingBatch(neutral_rows(num_rows), np.zeros(num_rows, np.uint64))
