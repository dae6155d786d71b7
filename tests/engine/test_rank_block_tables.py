"""Ranks get the blocks that they do not have, and their tables are those of the driver at every step."""

import random

import numpy as np
import pytest

from engine.sampling.sampling_params import SamplingParams
from engine.schedule.block_manager import BlockManager
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.step_batch import StepBatch, build_sampling_batch, build_step_batch
from engine.tensor_parallel.block_tables import KeptTables, SentTables
from engine.tensor_parallel.messages import (
    LENGTH_BYTES,
    Kind,
    decode,
    encode,
    pack_step,
    unpack_step,
)

BLOCK = 4
MAX_LEN = 128


def sequence(number: int, prompt: int, answer: int, first: int = 0) -> Sequence:
    token_ids = [(first + token) % 50 for token in range(prompt)]
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return Sequence(str(number), token_ids, sampling, stop_token_ids=frozenset(), follows_text=True)


def steps_of(scheduler: Scheduler) -> list[tuple[StepBatch, bytes]]:
    """Run all sequences; return each step as the driver has it, checked against what a rank makes of its message."""
    sent = SentTables(scheduler.max_num_seqs, BLOCK)
    kept = KeptTables(scheduler.max_num_seqs, MAX_LEN, BLOCK)
    steps = []
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        step = build_step_batch(batch, scheduler.slots)
        sampling = build_sampling_batch(batch, scheduler.slots)
        message = encode(Kind.STEP, arrays=pack_step(step, sampling, sent))
        arrived, _ = unpack_step(decode(message[LENGTH_BYTES:]).arrays, kept)
        assert arrived.block_tables.shape == step.block_tables.shape
        columns = np.arange(step.block_tables.shape[1])
        is_read = columns < -(-step.context_lens // BLOCK)[:, None]
        assert (arrived.block_tables[is_read] == step.block_tables[is_read]).all()
        steps.append((step, message))
        scheduler.advance(batch)
        scheduler.receive(np.full(len(batch.sampling), 7, np.int64))
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_has_the_drivers_block_tables_though_rows_come_go_and_are_preempted(
    seed: int,
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        BlockManager(40, BLOCK), max_num_seqs=6, max_num_batched_tokens=24, max_model_len=MAX_LEN
    )
    for number in range(20):
        first = rng.choice([0, 0, number])
        scheduler.add(sequence(number, rng.randint(1, 50), rng.randint(1, 40), first))
    steps_of(scheduler)
    assert scheduler.num_preemptions > 0


def test_a_decode_step_sends_no_block_that_the_ranks_have() -> None:
    scheduler = Scheduler(
        BlockManager(200, BLOCK), max_num_seqs=6, max_num_batched_tokens=600, max_model_len=MAX_LEN
    )
    for number in range(6):
        scheduler.add(sequence(number, 100, 9, first=number))
    lengths = [len(message) for _, message in steps_of(scheduler)]
    table_bytes = 6 * 25 * 4
    assert lengths[0] - lengths[1] > table_bytes
    assert max(lengths[1:]) - min(lengths[1:]) <= 6 * 4 + 8, "a block of each sequence"
