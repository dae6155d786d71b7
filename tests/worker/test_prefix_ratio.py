"""Rows that share a template cost the least prefill: each shared block once, and each row its own tail."""

import random

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.e2e.conftest import MODEL
from tests.jobs.answering import shard_of
from tests.worker.test_urgent_prompts import BLOCK_SIZE, DrawingRunner

ROWS, SLOTS = 300, 32
TEMPLATE = "Read the date in the following text and write it as year, month and day, with nothing else beside. "


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
    ("blocks_per_slot", "as_shard"), [(40, False), (5, True)], ids=["prompts", "rows of a shard in a small pool"]
)
def test_prefill_computes_each_shared_block_once(blocks_per_slot: int, as_shard: bool) -> None:
    """In any order while the pool holds the whole tree; a shard sorts its rows, and needs no such pool."""
    texts = rows()
    if as_shard:
        shard = shard_of(texts, {"temperature": 0})
        texts = [str(request.prompt) for request in shard.requests()]
    config = EngineConfig(
        str(MODEL), device="cpu", max_num_seqs=SLOTS, block_size=BLOCK_SIZE, max_num_batched_tokens=512
    )
    with Engine(config, start_runner=lambda *_: DrawingRunner(SLOTS * blocks_per_slot)) as engine:
        engine.generate(texts, SamplingParams(max_tokens=16, ignore_eos=True))
        prompts = [engine._prompts.token_ids(text) for text in texts]
        assert engine.stats().prefill_tokens <= 1.05 * least_prefill(prompts)
