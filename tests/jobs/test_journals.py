"""What is kept of prompts under way comes back."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobs.context.under_way import KeptCompletion, UnderWay
from tests.jobs.answering import FakeCompletion

TOKENS = st.lists(st.integers(0, 2**31 - 1))
MAYBE = st.none() | st.text()
COMPLETIONS = st.builds(
    KeptCompletion, st.integers(0, 9), TOKENS, st.text(), st.text(), st.integers(0), st.integers(0), MAYBE, MAYBE
)
PLACES = st.integers(0, 99)
LEFT = st.builds(
    UnderWay,
    st.lists(st.tuples(PLACES, st.lists(COMPLETIONS))),
    st.dictionaries(PLACES, st.dictionaries(PLACES, TOKENS)),
    st.integers(0),
)


@given(left=LEFT)
def test_what_is_under_way_comes_back(left: UnderWay) -> None:
    assert UnderWay.from_json(json.loads(json.dumps(left.to_json()))) == left


def test_completions_with_what_is_not_kept_are_not_kept() -> None:
    def way(**values: Any) -> UnderWay:
        return UnderWay([(0, [FakeCompletion(**values)])])

    assert way().can_be_kept
    assert not way(logprobs=()).can_be_kept
    assert not UnderWay().can_be_kept
