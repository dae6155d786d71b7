"""Steps that take the most memory a step can take, and have every kernel compiled that steps will use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.batch import SamplingBatch, StepBatch
from engine.config import EngineConfig

FIRST_CONTEXT = 64  # no backend plans otherwise for shorter ones


def warm_up_steps(config: EngineConfig, max_model_len: int, num_blocks: int) -> list[StepBatch]:
    """The largest steps of each kind, over a pool of num_blocks blocks that nobody else uses yet.

    As many prompts as may run, sharing the token budget; one chunk of the whole budget at the end of the
    longest context; as many decodes as may run, at the longest context; and single decodes at doubling
    contexts, because a backend may cut longer ones into more pieces.
    """
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    prompt_len = min(num_tokens // num_seqs, max_model_len)
    contexts = [max_model_len]
    while contexts[-1] > FIRST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    return [
        make_step(num_seqs, prompt_len, prompt_len, config.block_size, num_blocks),
        make_step(1, min(num_tokens, max_model_len), max_model_len, config.block_size, num_blocks),
        make_step(num_seqs, 1, max_model_len, config.block_size, num_blocks),
        *(make_step(1, 1, context, config.block_size, num_blocks) for context in contexts),
    ]


def make_step(num_seqs: int, query_len: int, context_len: int, block_size: int, num_blocks: int) -> StepBatch:
    """A step of equal sequences, the last query_len tokens of each, all sampling; they share the blocks."""
    tokens = np.arange(num_seqs * query_len)
    tables = np.arange(num_seqs * -(-context_len // block_size)).reshape(num_seqs, -1) % num_blocks
    return StepBatch(
        token_ids=np.zeros_like(tokens),
        positions=tokens % query_len + context_len - query_len,
        slot_mapping=tokens % (num_blocks * block_size),
        sample_rows=np.arange(1, num_seqs + 1) * query_len - 1,
        block_tables=tables.astype(np.int32),
        context_lens=_repeat(context_len, num_seqs),
        query_lens=_repeat(query_len, num_seqs),
    )


def nucleus_sampling(num_rows: int) -> SamplingBatch:
    """Sampling values that take the sampler's longest way."""
    half = np.full(num_rows, 0.5, np.float32)
    counter = np.zeros(num_rows, np.uint64)
    return SamplingBatch(
        temperature=half,
        top_p=half,
        top_k=np.zeros(num_rows, np.int64),
        min_p=half,
        seed=counter,
        sample_index=counter,
        position=counter,
        banned={},
    )


def _repeat(value: int, count: int) -> NDArray[np.int64]:
    return np.full(count, value, np.int64)
