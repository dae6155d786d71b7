"""Prompts prepared in threads are those of `add`, to the token, and cost a step nothing more."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.text.tokenizer import Tokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
THREADS, WAIT_S = 4, 60


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 22)) as built:
        yield built


def make_texts(count: int) -> list[str]:
    rng = random.Random(1)
    words = ["the ", "März ", "日本語", "e\u0301", "\n\n", "1987-03-03", "<|im_end|>", "x" * 30]
    return ["".join(rng.choices(words, k=rng.randrange(1, 400))) for _ in range(count)]


def test_token_ids_are_the_same_in_many_threads_at_once(folder: Path, tmp_path: Path) -> None:
    """Also of a tokenizer that comes with truncation and padding, which transformers turns off when used."""
    cut = tmp_path / "model"
    shutil.copytree(folder, cut)
    content = json.loads((cut / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (cut / "tokenizer.json").write_text(json.dumps(content))
    plain, shared = Tokenizer(folder), Tokenizer(cut)
    assert shared._tokenizer.backend_tokenizer.truncation is None
    texts = make_texts(40)
    chats = [[{"role": "user", "content": text}] for text in texts]
    expected = [
        (plain.encode(text), plain.chat_token_ids(chat))
        for text, chat in zip(texts, chats, strict=True)
    ]
    at_once = threading.Barrier(THREADS)

    def tokenize_all(number: int) -> bool:
        at_once.wait(WAIT_S)
        for i in sorted(range(len(texts)), key=lambda i: (i * (2 * number + 1)) % len(texts)):
            ids, chat_ids = shared.encode(texts[i]), shared.chat_token_ids(chats[i])
            assert (ids, chat_ids) == expected[i]
            assert shared.decode(ids) == plain.decode(ids)
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(tokenize_all, range(THREADS)))


def test_a_prepared_prompt_is_completed_as_its_text(engine: Engine) -> None:
    """Prepared beside the steps of another one, with and without samples."""
    text = "the quick brown fox " * 4
    engine.add("text", text, GREEDY)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.prepare, text)
        done = engine.step()
        engine.add("prepared", future.result(WAIT_S), GREEDY)
    while engine.has_unfinished:
        done += engine.step()
    first, second = sorted(done, key=lambda completion: completion.request_id, reverse=True)
    assert (first.request_id, second.request_id) == ("text", "prepared")
    assert first.token_ids == second.token_ids
    assert second.num_cached_tokens > 0
