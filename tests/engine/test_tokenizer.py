"""A prompt that cannot fit, text that grows token by token, and hostile files that end in a named error."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, Engine, EngineConfig, PromptTooLong, SamplingParams
from engine.text.stop_strings import IncrementalText, StopStrings
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import make_tokenizer


def test_a_prompt_that_cannot_fit_is_not_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text and as a chat; one that just fits is."""
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefghij ") for _ in range(200_000))
    with Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 22)) as built:
        tokenized: list[str] = []
        inner = built._tokenizer._tokenizer
        assert len(inner.encode(text)) > 5 * built.max_model_len
        encode = inner._encode_plus if hasattr(inner, "_encode_plus") else inner.encode

        def count(text: str, *args: Any, **options: Any) -> Any:
            tokenized.append(text)
            return encode(text, *args, **options)

        monkeypatch.setattr(inner, encode.__name__, count)
        with pytest.raises(PromptTooLong, match="200000 characters, more than 128 for each"):
            built.add("a", text, SamplingParams())
        with pytest.raises(PromptTooLong, match="characters, more than 128"):
            built.chat_token_ids([{"role": "user", "content": text}])
        assert tokenized == []
        built.add("a", "short", SamplingParams())
        assert tokenized == ["short"]


def hostile(folder: Path, into: Path, how: str) -> Path:
    """A copy of a model folder whose tokenizer asks for code of its own, or is no tokenizer."""
    shutil.copytree(folder, into)
    config = json.loads((into / "tokenizer_config.json").read_text())
    if how == "code":
        (into / "evil.py").write_text("open('mark', 'w')\nclass T: pass\n")
        config |= {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
        (into / "tokenizer_config.json").write_text(json.dumps(config))
    elif how == "configuration code":
        (into / "evil.py").write_text("open('mark', 'w')\nclass T: pass\n")
        config.pop("tokenizer_class", None)
        (into / "tokenizer_config.json").write_text(json.dumps(config))
        model = json.loads((into / "config.json").read_text())
        model |= {"auto_map": {"AutoConfig": "evil.T"}, "model_type": "evil"}
        (into / "config.json").write_text(json.dumps(model))
    elif how == "nesting":
        (into / "tokenizer.json").write_text("[" * 100_000)
    else:
        (into / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Evil"}}')
    return into


@pytest.mark.parametrize("how", ["code", "configuration code", "nesting", "no tokenizer"])
def test_a_hostile_tokenizer_is_refused_by_name_and_asks_nobody(
    folder: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sits at the terminal, and would say yes."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    monkeypatch.chdir(tmp_path)
    made = hostile(folder, tmp_path / "model", how)
    try:
        Tokenizer(made)
    except ConfigError as error:
        assert str(made) in str(error)  # noqa: PT017 - it may also load, without the code
    assert asked == []
    assert not (tmp_path / "mark").exists()


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
        watch = StopStrings(
            stop, IncrementalText(lambda ids: "".join(map(chr, ids))), min_tokens=min_tokens
        )
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
