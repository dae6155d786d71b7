"""How an object of a store is read: in blocks, of which few are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.parquet import object_streams
from jobs.parquet.object_streams import MAX_BLOCKS, MIN_BLOCKS, ObjectReader

BLOCK = 100
CONTENTS = bytes(n % 251 for n in range(60 * BLOCK))


class Source:
    """An object, what was fetched of it, and how many blocks its reader kept at most."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.reader = ObjectReader(self._fetch, len(CONTENTS))
        self.most_kept = 0

    def _fetch(self, start: int, end: int) -> bytes:
        self.fetched.append(start)
        return CONTENTS[start:end]

    def read_at(self, place: int, size: int) -> bytes:
        self.reader.seek(place)
        found = self.reader.read(size)
        self.most_kept = max(self.most_kept, len(self.reader._blocks))
        return found

    def read_through(self, places: int) -> None:
        """Read all of it, at so many places in turn, as a reader of so many columns does."""
        part = len(CONTENTS) // places
        for step in range(0, part, BLOCK // 4):
            for place in range(places):
                start = place * part + step
                assert self.read_at(start, BLOCK // 4) == CONTENTS[start : start + BLOCK // 4]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_streams, "BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("places", [1, MIN_BLOCKS])
def test_who_reads_few_columns_keeps_few_blocks_and_fetches_each_once(places: int) -> None:
    source = Source()
    source.read_through(places)
    assert sorted(source.fetched) == list(range(0, len(CONTENTS), BLOCK))
    assert source.most_kept == MIN_BLOCKS


def test_who_reads_many_columns_comes_to_keep_a_block_of_each() -> None:
    source = Source()
    source.read_through(12)
    assert source.most_kept == MAX_BLOCKS
    again = len(source.fetched) - len(CONTENTS) // BLOCK
    assert 0 < again <= 2 * 12, "until there is room for all of them"


def test_no_more_columns_are_provided_for_than_the_bound() -> None:
    source = Source()
    source.read_through(17)
    assert source.most_kept == MAX_BLOCKS


@given(st.lists(st.tuples(st.integers(0, len(CONTENTS)), st.integers(0, 3 * BLOCK)), max_size=60))
def test_any_reads_give_what_is_there_and_keep_no_more_than_the_bound(reads: list[tuple[int, int]]) -> None:
    source = Source()
    for place, size in reads:
        assert source.read_at(place, size) == CONTENTS[place : place + size]
    assert source.most_kept <= MAX_BLOCKS
