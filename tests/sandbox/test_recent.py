"""Tests of what a child and its worker remember."""

from random import Random

from sandbox.recent import MAX_CHARS, MAX_TEXTS, Recent


def test_the_latest_texts_are_remembered() -> None:
    recent = Recent[int]()
    for number in range(MAX_TEXTS):
        assert not recent.put(str(number), number)
    assert recent.get("0") == 0
    assert recent.put("more", -1)
    assert (recent.get("0"), recent.get("1"), len(recent)) == (0, None, MAX_TEXTS)


def test_long_texts_are_fewer_and_the_last_is_kept_however_long() -> None:
    recent = Recent[int]()
    for letter in "abc":
        recent.put(letter * (MAX_CHARS // 2), 1)
    assert (len(recent), recent.num_chars) == (2, MAX_CHARS)
    recent.put("d" * 2 * MAX_CHARS, 1)
    assert len(recent) == 1
    recent.put("e", 1)
    assert (len(recent), recent.num_chars) == (1, 1)


def test_two_that_see_the_same_texts_remember_the_same() -> None:
    draw, one, other = Random(1), Recent[int](), Recent[str]()
    for _ in range(2_000):
        text = str(draw.randrange(200)) * draw.randrange(1, 50_000)
        assert (one.get(text) is None) == (other.get(text) is None)
        one.put(text, 1)
        other.put(text, "x")
    assert len(one) == len(other)
