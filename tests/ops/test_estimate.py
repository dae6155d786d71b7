"""An estimate of a run's seconds on a GPU counts what its steps read, and knows what each change is worth."""

from dataclasses import replace

import pytest

from ops.bench.gpu.estimate import MODELS, Engine, Model, Rows, estimate, prefill_pairs, steps_of

ROWS = Rows("some", num_rows=40, shared=320, prompt=(5, 20), answer=(4, 9))
EAGER = Engine("eager", has_graphs=False, has_mixed_graphs=False)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_change_makes_a_run_shorter_and_none_changes_what_it_generates(model: Model) -> None:
    engines = [
        EAGER,
        replace(EAGER, has_graphs=True),
        Engine("graphs"),
        Engine("once", reads_prefix_once=True),
        Engine("FP8", reads_prefix_once=True, kv_itemsize=1),
    ]
    estimates = estimate(model, ROWS, engines, max_num_seqs=16)
    seconds = [made.seconds for made in estimates]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(seconds)
    answers = sum(answer for _, answer in ROWS.lengths())
    assert {made.generated for made in estimates} == {answers}
    assert [made.eager_steps for made in estimates[2:]] == [0, 0, 0]
    assert estimates[0].eager_steps == estimates[0].steps


def test_prompts_that_share_tiles_are_multiplied_with_their_prefix_by_whole_tiles() -> None:
    """96 tails of 30 to 34 behind 320 tokens, 24 at once: two of them fill a tile."""
    rows = Rows("tails", num_rows=96, shared=320, prompt=(30, 34), answer=(1, 1))
    model = next(model for model in MODELS if model.name == "Qwen3-8B")
    alone = Engine("alone", reads_prefix_once=True)
    sharing = replace(alone, shares_tiles=True)
    num_checked = 0
    for batch in steps_of(rows, 24, 1 << 20):
        num_rows = len(batch.prefills)
        if num_rows < 20 or sum(batch.prefill_lens) > 34 * num_rows:
            continue  # the first step computes the prefix
        pairs_alone = prefill_pairs(model, alone, batch)
        assert pairs_alone == num_rows * 64 * 384
        assert 0.5 * pairs_alone < prefill_pairs(model, sharing, batch) < 0.75 * pairs_alone
        num_checked += 1
    assert num_checked >= 2
