"""Makes the steps that take the most memory, and those by which every kernel is compiled."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.run.config import EngineConfig
from engine.sampling.logit_edits import EditParts, token_mask
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.sampling.sampling_params import MAX_LOGPROBS
from engine.schedule.step_batch import StepBatch

FIRST_CONTEXT = 64  # backends plan shorter contexts in the same way as this one
#: Backends tile shorter ones, down to 16 tokens, in the same way. An expert has only a part of a prompt's rows. Packed
#: experts have a tile for 17 to 64 rows, which one of these prompts brings even if a token takes 4 of 128 experts.
SHORT_PROMPTS = (64, 256, 1024)
#: Behind a common prefix. Two of the first fill a tile of queries. Among few sequences only such as the second spare
#: enough time to share tiles: they fill some tiles by themselves, and leave a short rest.
SHARING_PROMPTS = (32, 144)


def warm_up_steps(config: EngineConfig, max_model_len: int, num_blocks: int) -> list[StepBatch]:
    """Return the largest steps of each kind, over a pool of num_blocks blocks that nobody else uses yet.

    - max_num_seqs prompts, with all log probabilities;
    - one chunk of the whole token budget at the end of the longest context, with all log probabilities;
    - max_num_seqs decodes at the longest context, once with blocks of their own, and once all with the same blocks;
    - single decodes at halving contexts, which a backend may cut into more pieces;
    - short prompts, whose products may have tiles of their own;
    - prompts of two lengths at the end of the longest context, as many as fit, all with the same blocks.
    """
    num_tokens = config.max_num_batched_tokens
    num_seqs = config.num_seqs
    share, remainder = divmod(num_tokens, num_seqs)
    lengths = [share + 1] * remainder + [share] * (num_seqs - remainder)
    prompts = [min(length, max_model_len) for length in lengths]
    contexts = [max_model_len]
    while contexts[-1] > FIRST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    longest_chunk = min(num_tokens, max_model_len)
    lens = [
        (prompts, prompts),
        ([longest_chunk], [max_model_len]),
        ([1] * num_seqs, [max_model_len] * num_seqs),
    ]
    for context in contexts:
        lens.append(([1], [context]))
    for length in SHORT_PROMPTS:
        if length <= longest_chunk:
            lens.append(([length], [length]))
    steps = [
        make_step(query_lens, context_lens, config.block_size, num_blocks)
        for query_lens, context_lens in lens
    ]
    behind_prefix = [steps[2]]  # the longest decodes
    shortest, longer = SHARING_PROMPTS
    for prompt_len in (min(max(share, 2), shortest), longer):
        num_prompts = min(num_seqs, num_tokens // prompt_len)
        if num_prompts > 1 and prompt_len < max_model_len:
            query_lens = [prompt_len] * num_prompts
            context_lens = [max_model_len] * num_prompts
            behind_prefix.append(make_step(query_lens, context_lens, config.block_size, num_blocks))
    for step in behind_prefix:
        same_blocks = np.repeat(step.block_tables[:1], len(step.block_tables), axis=0)
        steps.append(replace(step, block_tables=same_blocks))
    for i, step in enumerate(steps[:2]):
        rows = np.arange(len(step.token_ids))
        steps[i] = replace(
            step,
            sample_tops=np.full_like(step.sample_rows, MAX_LOGPROBS),
            scored_rows=rows,
            scored_token_ids=np.zeros_like(rows),
            scored_tops=np.full_like(rows, MAX_LOGPROBS),
        )
    return steps


def make_step(
    query_lens: list[int], context_lens: list[int], block_size: int, num_blocks: int
) -> StepBatch:
    """Make a step in which sequence i computes the last query_lens[i] of its context_lens[i] tokens, and samples.

    The sequences share the pool's blocks, and one state.
    """
    lens = np.array(query_lens, np.int64)
    contexts = np.array(context_lens, np.int64)
    ends = np.cumsum(lens)
    tokens = np.arange(lens.sum())
    shape = len(lens), -(-int(contexts.max()) // block_size)
    return StepBatch(
        token_ids=np.zeros_like(tokens),
        positions=tokens + np.repeat(contexts - ends, lens),
        slot_mapping=tokens % (num_blocks * block_size),
        sample_rows=ends - 1,
        block_tables=(np.arange(shape[0] * shape[1], dtype=np.int32) % num_blocks).reshape(shape),
        context_lens=contexts,
        query_lens=lens,
        state_parts=whole_parts(lens, contexts, np.zeros_like(lens)),
    )


def whole_parts(
    query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return StepBatch.state_parts of sequences that keep their states in these rows of the pool."""
    ends = np.cumsum(query_lens)
    sources = np.where(query_lens < context_lens, rows, -1)  # a new sequence reads no state
    return np.stack((ends - query_lens, ends, sources, rows, np.full_like(rows, -1)), axis=1)


def with_edits(sampling: SamplingBatch, vocab_size: int) -> list[SamplingBatch]:
    """Return the batch twice: with one ban, which changes logits in place, and with all kinds of edits in each row."""
    parts = EditParts()
    num_rows = len(sampling.values)
    ban = EditParts(banned=[(0, np.zeros(1, np.int64))]).joined(np.zeros(1, np.int64))
    mask = token_mask([0], vocab_size)
    token = np.zeros(1, np.int64)
    for row in range(num_rows):
        parts.allow(row, mask)
        parts.penalize(row, (1.0, 1.0, 2.0), np.ones((1, 2), np.int32))
    parts.banned.append((0, token + 1))
    parts.biased.append((0, token))
    parts.biases.append(np.ones(1, np.float32))
    return [replace(sampling, edits=edits) for edits in (ban, parts.joined(np.arange(num_rows)))]


def nucleus_sampling(num_rows: int) -> SamplingBatch:
    """Return sampling values for which the sampler has most to do."""
    values = neutral_rows(num_rows)
    for name in ("temperature", "top_p", "min_p"):
        values[name] = 0.5
    return SamplingBatch(values, np.zeros(num_rows, np.uint64))
