"""An estimate of a run's seconds on a GPU counts what its steps read, and knows what each change is worth."""

from dataclasses import replace

import pytest

from ops.bench.gpu.estimate import MODELS, Engine, Model, Rows, estimate

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
    estimates = [estimate(model, ROWS, engine, max_num_seqs=16) for engine in engines]
    seconds = [made.seconds for made in estimates]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(seconds)
    answers = sum(answer for _, answer in ROWS.lengths())
    assert {made.generated for made in estimates} == {answers}
    assert [made.eager_steps for made in estimates[2:]] == [0, 0, 0]
    assert estimates[0].eager_steps == estimates[0].steps
