"""Rows that share a template cost the least prefill: each shared block once, and each row its own tail."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Engine, EngineConfig, SamplingParams
from engine.run.forward.runner import PendingTokens, PoolSize
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from tests.e2e.conftest import MODEL
from tests.jobs.answering import shard_of

ROWS, SLOTS, BLOCK_SIZE, MAX_MODEL_LEN = 300, 32, 16, 256
TEMPLATE = "Read the date in the following text and write it as year, month and day, with nothing else beside. "


class Drawn(PendingTokens):
    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self._tokens = tokens

    def wait(self) -> NDArray[np.int64]:
        return self._tokens


class DrawingRunner:
    """A model of which only the size of its pool matters."""

    has_graphs = False

    def __init__(self, num_blocks: int) -> None:
        self.pool_size = PoolSize(num_blocks, 0, MAX_MODEL_LEN)
        self._rng = np.random.default_rng(1)

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        return Drawn(self._rng.integers(10, 500, len(step.sample_rows)))

    def close(self) -> None:
        pass


def rows() -> list[str]:
    """A template, one of twenty headings, and some words of each row's own, in no order."""
    rng = random.Random(0)
    headings = ["".join(rng.choices("abcdefgh ", k=60)) for _ in range(20)]
    own = ["".join(rng.choices("stuvwxyz ", k=rng.randrange(5, 60))) for _ in range(ROWS)]
    return [TEMPLATE + rng.choice(headings) + text for text in own]


def least_prefill(prompts: list[list[int]]) -> int:
    """Tokens of the tree of full blocks that can be shared, and of each prompt's own tail."""
    tree, tails = set(), 0
    for prompt in prompts:
        shared = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        tree.update(tuple(prompt[:end]) for end in range(BLOCK_SIZE, shared + 1, BLOCK_SIZE))
        tails += len(prompt) - shared
    return len(tree) * BLOCK_SIZE + tails


@pytest.mark.parametrize(
    ("blocks_per_slot", "as_shard"),
    [(40, False), (5, True)],
    ids=["prompts", "rows of a shard in a small pool"],
)
def test_prefill_computes_each_shared_block_once(blocks_per_slot: int, as_shard: bool) -> None:
    """In any order while the pool holds the whole tree; a shard sorts its rows, and needs no such pool."""
    texts = rows()
    if as_shard:
        shard = shard_of(texts, {"temperature": 0})
        texts = [str(request.prompt) for request in shard.requests()]
    config = EngineConfig(
        str(MODEL),
        device="cpu",
        max_num_seqs=SLOTS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
    )
    with Engine(config, start_runner=lambda *_: DrawingRunner(SLOTS * blocks_per_slot)) as engine:
        engine.generate(texts, SamplingParams(max_tokens=16, ignore_eos=True))
        prompts = [engine._prompts.token_ids(text) for text in texts]
        assert engine.stats().prefill_tokens <= 1.05 * least_prefill(prompts)
