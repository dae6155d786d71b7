"""What occurred in a sequence, counted token by token: each once, whatever has grown meanwhile."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.token_counts import FIRST_ROOM, TokenCounts

TOKENS = st.integers(0, 3 * FIRST_ROOM)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    prompt=st.sets(TOKENS),
    generated=st.lists(st.lists(TOKENS, max_size=FIRST_ROOM), max_size=5),
    all_of_them=st.booleans(),
)
def test_each_token_has_one_entry_and_the_pending_one_lies_behind(
    prompt: set[int], generated: list[list[int]], all_of_them: bool
) -> None:
    if all_of_them:
        generated.append(list(range(3 * FIRST_ROOM)))
    ordered = sorted(prompt)
    counts, expected = TokenCounts(np.array(ordered, np.int32)), Counter(dict.fromkeys(ordered, 0))
    for tokens in generated:
        for token in tokens:
            counts.add([token])
            expected[token] += 1
            assert counts.entries(with_pending=True)[-1].tolist() == [-1, 0]
        assert counts.entries(with_pending=False).tolist() == [[t, n] for t, n in expected.items()]
