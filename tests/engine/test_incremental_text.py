"""Text grows token by token, whatever the script, and stop strings are found across tokens."""

from __future__ import annotations

import random

from engine.text.stop_strings import IncrementalText, StopStrings
from tests.engine.checkpoints import make_tokenizer


def test_incremental_text_is_a_prefix_of_the_whole_text() -> None:
    """At each token, for every script, broken bytes and special tokens included; never half a character."""
    tokenizer = make_tokenizer()
    rng = random.Random(4)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    texts = ["naïve café Ñandú 日本語 🎉🎉 עברית", "🇫🇷" * 20, "plain " * 30]
    cases = [tokenizer.encode(text) for text in texts]
    cases += [[rng.randrange(500) for _ in range(120)] for _ in range(60)]
    for i, case in enumerate(cases):
        text, given = IncrementalText(decode), ""
        for j, token_id in enumerate(case):
            given += text.add(token_id)
            whole = decode(case[: j + 1])
            assert whole.startswith(given)
            assert len(whole) - len(given) <= 1
            if i < len(texts):
                assert "\ufffd" not in given
        assert given == decode(case).removesuffix("\ufffd")


def test_stop_strings_across_tokens_and_window() -> None:
    """A stop string spread over many tokens, the earliest of several, and one that is complete too early."""

    def first_end(text: str, stop: tuple[str, ...], min_tokens: int = 0) -> tuple[int, str | None]:
        watch = StopStrings(stop, IncrementalText(lambda ids: "".join(map(chr, ids))), min_tokens=min_tokens)
        for i, char in enumerate(text):
            if watch.add(ord(char)):
                return i + 1, watch.text
        return len(text), watch.text

    long = "x" * 50 + "abcdefghijklmnopqrstuvwxyz" * 2
    assert first_end(long, ("abcdefghijklmnopqrstuvwxyz",)) == (76, "x" * 50)
    assert first_end("say stop now", ("now", "stop")) == (8, "say ")
    assert first_end("aXbXc", ("X",), min_tokens=2) == (4, "aXb")
    assert first_end("abcabc", ("bc",), min_tokens=3) == (6, "abca")
    assert first_end("none", ("X",)) == (4, None)
