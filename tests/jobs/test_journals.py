"""What a journal holds is what was put in, or nothing: damaged, cut or another's bytes are told from its own."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.context.answers import Answer
from jobs.context.journal_bytes import MAX_RECORD_BYTES, JournalUnfit, packed, unpacked
from jobs.context.under_way import KeptCompletion, UnderWay, answer_from_json, answer_to_json

RECORDS = st.lists(st.tuples(st.sampled_from([b"A", b"U"]), st.recursive(st.text() | st.integers(), st.lists)))
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
ANSWERS = st.builds(
    Answer,
    MAYBE | st.lists(MAYBE).map(tuple),
    st.text() | st.lists(st.text()).map(tuple),
    st.integers(0),
    st.integers(0) | st.lists(st.integers(0)).map(tuple),
    st.integers(0),
    *[MAYBE] * 3,
    st.dictionaries(
        st.text(),
        MAYBE
        | st.lists(st.floats(width=32, allow_nan=False)).map(lambda values: array("f", values))
        | st.lists(st.tuples(st.text(), st.floats(allow_nan=False))).map(tuple),
    ),
    st.integers(0),
    MAYBE,
)


def found_in(contents: bytes, whose: str = "it") -> list[tuple[bytes, Any]]:
    return list(unpacked(contents, whose))


@given(records=RECORDS)
def test_records_come_back(records: list[tuple[bytes, Any]]) -> None:
    assert found_in(packed("it", ((kind, json.dumps(value)) for kind, value in records))) == records


@given(left=LEFT)
def test_what_is_under_way_comes_back(left: UnderWay) -> None:
    assert UnderWay.from_json(json.loads(left.to_json())) == left


@given(answer=ANSWERS)
def test_an_answer_comes_back(answer: Answer) -> None:
    assert answer_from_json(json.loads(answer_to_json(answer))) == answer


def test_bytes_that_are_cut_changed_or_anothers_are_no_journal() -> None:
    whole = packed("it", [(b"A", "[1, 2]"), (b"U", '{"a": null}')])
    assert len(found_in(whole)) == 2
    for length in range(len(whole)):
        with pytest.raises(JournalUnfit):
            found_in(whole[:length])
        changed = whole[:length] + bytes([whole[length] ^ 1]) + whole[length + 1 :]
        with pytest.raises(JournalUnfit):
            found_in(changed)
    with pytest.raises(JournalUnfit, match="another plan or model"):
        found_in(whole, "other")
    with pytest.raises(JournalUnfit):
        found_in(whole + b"A")


def test_a_record_beyond_its_bound_is_left_out_and_one_that_is_no_json_refused() -> None:
    large = json.dumps("a" * MAX_RECORD_BYTES)
    assert found_in(packed("it", [(b"A", large), (b"A", "1")])) == [(b"A", 1)]
    for text in ("[", "[" * 100_000, "nothing"):
        with pytest.raises(JournalUnfit):
            found_in(packed("it", [(b"A", text)]))


@pytest.mark.parametrize(
    "value", [None, [], [1, 2, 3], [[], [], -1], [[[0, [[0]]]], [], 0], [[], [[0, [[0, "a"]]]], 0]]
)
def test_what_is_nothing_under_way_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        UnderWay.from_json(value)


def test_completions_with_what_is_not_kept_are_not_kept() -> None:
    class Scored(KeptCompletion):
        logprobs: Any = ()

    values = (0, [1], "a", "stop", 1, 0, None, None)
    assert UnderWay([(0, [KeptCompletion(*values)])]).can_be_kept
    assert not UnderWay([(0, [Scored(*values)])]).can_be_kept
    assert not UnderWay().can_be_kept
