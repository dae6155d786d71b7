"""The bench of host time runs the engine itself, and what it is compared with does the same work."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench.host_time import STEPS, make_prompts, median_ms, start_engine
from ops.bench.list_bookkeeping import TOKEN, ListEngine


def test_both_bookkeepings_make_the_same_batches() -> None:
    """Over block ends; block numbers differ, the tokens' places in the blocks do not."""
    prompts = make_prompts(num_seqs=20, context=40)
    engine, runner = start_engine(prompts, overlap=False)
    lists = ListEngine([[*prompt, TOKEN] for prompt in prompts], block_size=16)
    with engine:
        lists.step()  # the engine has decoded once already
        for _ in range(STEPS):
            engine.step()
            ours, theirs = runner.last_step, lists.step()
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.positions.tolist() == theirs.positions.tolist()
            assert ours.context_lens.tolist() == theirs.context_lens.tolist()
            assert (ours.slot_mapping % 16).tolist() == (theirs.slot_mapping % 16).tolist()
            assert ours.block_tables.shape == theirs.block_tables.shape
            assert len(np.unique(theirs.slot_mapping)) == len(prompts)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_measured_step_decodes_all_sequences(overlap: bool) -> None:
    """Or a step's time would say nothing: also where the prompts are more than a usual step takes."""
    engine, _ = start_engine(make_prompts(num_seqs=250, context=200), overlap=overlap)
    with engine:
        before = engine.stats()
        assert median_ms(engine.step, STEPS) > 0
        after = engine.stats()
        assert after.decode_tokens - before.decode_tokens == 250 * STEPS
        assert after.prefill_tokens == before.prefill_tokens
