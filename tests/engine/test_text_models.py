"""Tokenizers of the model families: their tokens, the token of a text's beginning, and text from tokens."""

import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import sentencepiece

from engine import ConfigError, Engine, EngineConfig, SamplingParams
from engine.text.sentencepiece_file import read_sentencepiece
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer
from tests.engine.text_models import FAMILIES, byte_ranks, make_text_model, train_sentencepiece

BITS = [
    "the",
    " ",
    "  ",
    "   ",
    "quick",
    "März",
    "日本",
    "\n",
    "\n\n",
    "\t",
    "🎉",
    "1987",
    "\u2581",
    "e\u0301",
    "ﬁ",
]
SENTENCEPIECE = {
    "llama": {},
    "gemma": {
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>", "\n\n", "\u2581\u2581"],
    },
    "normalizing": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "without bytes": {"byte_fallback": False},
    "unigram": {"model_type": "unigram"},
}


def make_texts(count: int, *more: str) -> list[str]:
    rng = random.Random(3)
    return [
        "",
        *("".join(rng.choices([*BITS, *more], k=rng.randrange(1, 14))) for _ in range(count)),
    ]


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("text models")
    return {family: Tokenizer(make_text_model(root / family, family)) for family in FAMILIES}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_tokens_of_a_sentencepiece_file_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    """Runs of spaces, spaces at the beginning, byte pieces, symbols and the names of byte pieces included."""
    path = tmp_path / "tokenizer.model"
    train_sentencepiece(path, **SENTENCEPIECE[name])
    ours, theirs = (
        read_sentencepiece(path)[0],
        sentencepiece.SentencePieceProcessor(model_file=str(path)),
    )
    more = () if name == "unigram" else ("<0x41>", "<turn>")
    for text in make_texts(400, *more):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids) == theirs.decode(ids) or theirs.unk_id() in ids


def test_what_stands_beside_a_sentencepiece_file_counts(tmp_path: Path) -> None:
    """Tokens by their ids, the names of special tokens, and what is put around a text."""
    folder = make_text_model(tmp_path, "sentencepiece", bos_token="<|end|>", add_eos_token=True)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a<|end|>")[::2] == [420, 420]
    assert tokenizer.encode("a")[-1] == 2
    make_text_model(folder, "sentencepiece", added_tokens_decoder={"421": {"content": "<|end|>"}})
    with pytest.raises(
        ConfigError, match=r"gives the id 421 to '<\|end\|>', the vocabulary gives it 420"
    ):
        Tokenizer(folder)


def test_a_broken_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    """Cut at any place; of another format; of a format that leaves out what it takes."""
    folder = make_text_model(tmp_path / "llama", "sentencepiece")
    whole = (folder / "tokenizer.model").read_bytes()
    cuts = [1, 2, 3, 7, 100, *range(len(whole) // 2, len(whole) // 2 + 20)]
    for broken in (
        *(whole[:cut] for cut in cuts),
        b"PK\x03\x04 no vocabulary",
        b"IQ== 0\nIg== 1\n",
    ):
        (folder / "tokenizer.model").write_bytes(broken)
        with pytest.raises(
            ConfigError, match=r"tokenizer\.model is no complete SentencePiece model"
        ):
            Tokenizer(folder)
    folder = make_text_model(tmp_path / "tekken", "tekken")
    content = json.loads((folder / "tekken.json").read_text())
    (folder / "tekken.json").write_text(json.dumps({**content, "vocab": [{"rank": 0}]}))
    with pytest.raises(ConfigError, match=r"tekken\.json is no tekken vocabulary"):
        Tokenizer(folder)


def test_a_tekken_file_without_special_tokens_has_the_earliest_ones(tmp_path: Path) -> None:
    folder = make_text_model(tmp_path, "tekken")
    content = json.loads((folder / "tekken.json").read_text())
    del content["special_tokens"]
    content["config"]["default_num_special_tokens"] += 20
    content["config"]["default_vocab_size"] += 20
    (folder / "tekken.json").write_text(json.dumps(content))
    backend = Tokenizer(folder).backend
    assert [backend.id_to_token(token_id) for token_id in (1, 2, 9, 19, 20)] == [
        *("<s>", "</s>", "[TOOL_CALLS]", "[TOOL_CONTENT]", "<SPECIAL_20>")
    ]
    assert Tokenizer(folder).encode("[INST]")[:2] == [1, 3]


def test_ranked_bytes_are_merged_by_rank(text_models: dict[str, Tokenizer], tmp_path: Path) -> None:
    """As tiktoken does it: of all neighbours those two whose join has the lowest rank."""
    ranks = {token: rank for rank, token in enumerate(byte_ranks(tmp_path))}
    backend = text_models["tekken"]._tokenizer.backend_tokenizer
    for text in make_texts(150):
        expected = []
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(text):
            expected += merge([bytes([byte]) for byte in text_bytes(word)], ranks)
        assert text_models["tekken"].encode(text)[1:] == [10 + ranks[token] for token in expected]


def text_bytes(word: str) -> bytes:
    from engine.text.tokenizer_files import byte_alphabet

    alphabet = byte_alphabet()
    return bytes(alphabet[char] for char in word)


def merge(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    while True:
        joins = [(ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(joins, default=(10**9, 0))
        if rank == 10**9:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_begins_with_one_token_for_its_beginning(
    text_models: dict[str, Tokenizer], family: str
) -> None:
    """None where the family has none; one also where the text brings its own."""
    tokenizer = text_models[family]
    bos, bos_id = tokenizer._bos
    assert (bos is None) == (family in ("qwen", "gpt_oss"))
    assert tokenizer.encode("The quick").count(bos_id) == (bos is not None)
    if bos is not None:
        assert tokenizer.encode("The quick")[0] == bos_id
        once, twice = tokenizer.encode(f"{bos}The quick"), tokenizer.encode(f"{bos}{bos}The quick")
        assert (once.count(bos_id), twice.count(bos_id)) == (1, 2)
        assert (once[0], twice[:2]) == (bos_id, [bos_id, bos_id])


def unlike(tokenizer: Tokenizer) -> list[str]:
    """Texts that are other ones when their tokens are decoded in two parts, or one by one."""
    rng, found = random.Random(4), []
    for text in make_texts(60):
        token_ids = tokenizer._encode(text, None, add_special_tokens=False)
        whole = tokenizer.decode(token_ids)
        at = rng.randrange(len(token_ids) + 1)
        parts = tokenizer.decode(token_ids[:at])
        if not parts.endswith("\ufffd"):
            parts += tokenizer.decode(
                token_ids[at:], follows_text=tokenizer.has_text(token_ids[:at])
            )
            found += [text] if parts != whole else []
        watch = StopStrings(
            ["never there"], tokenizer.incremental_text(follows_text=False), min_tokens=0
        )
        for token_id in token_ids:
            watch.add(token_id)
        found += [text] if "".join(watch._pieces) != whole else []
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_text_in_parts_is_the_text_of_the_whole(
    text_models: dict[str, Tokenizer], family: str
) -> None:
    """No space is lost or added where a completion begins, nor between tokens that come one by one."""
    assert unlike(text_models[family]) == []


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral"])
def test_a_stop_string_of_byte_pieces_ends_the_text_at_once(
    text_models: dict[str, Tokenizer], family: str
) -> None:
    """A line's end, and a character of several bytes, with one beside it that is not complete."""
    tokenizer = text_models[family]
    for stop in ("\n", "本", "日本", "🎉"):
        token_ids = tokenizer._encode(f"a 日{stop}\n日b", None, add_special_tokens=False)
        watch = StopStrings([stop], tokenizer.incremental_text(follows_text=True), min_tokens=0)
        ended = next(i for i, token_id in enumerate(token_ids) if watch.add(token_id))
        assert watch.text is not None
        assert watch.text.strip() == "a 日"
        assert stop in tokenizer.decode(token_ids[: ended + 1])
        assert stop not in tokenizer.decode(token_ids[:ended])


@pytest.mark.parametrize("family", ["llama", "mistral", "llama3"])
def test_a_completion_goes_on_where_its_prompt_ends(
    folder: Path, tmp_path: Path, family: str
) -> None:
    """With the space that its first token stands for; cut at a stop string as its text is; and not where
    nothing but special tokens is before it."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "tokenizer.json").unlink()
    make_text_model(tmp_path / "text", family)
    for path in (tmp_path / "text").glob("tokenizer*"):
        shutil.copy(path, copy)
    tokenizer = Tokenizer(copy)
    word = tokenizer._encode("a b quick", None, add_special_tokens=False)[-1]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Engine(EngineConfig(str(copy), kv_cache_bytes=1 << 22)) as built:
        for prompt in (tokenizer.encode("The quick"), tokenizer.encode("a")[:1], [word]):
            (done,) = built.generate([prompt], params)
            whole = tokenizer.decode([*prompt, *done.token_ids])
            assert whole == tokenizer.decode(prompt) + done.text
            if not done.text.isascii() or len(done.text) < 4:
                continue
            (cut,) = built.generate([prompt], replace(params, stop=(done.text[2:4],)))
            assert cut.text == done.text[: done.text.index(done.text[2:4])]
