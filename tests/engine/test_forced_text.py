"""Texts that a form forces are written byte by byte, whatever the model's own tokenizer would make of them."""

import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from engine import InvalidSampling, SamplingParams
from engine.structured.grammars import Grammars
from engine.structured.matcher import Matcher, fill_masks
from engine.text.sentencepiece_file import read_sentencepiece
from tests.engine.text_models import LINES, make_text_model

CONTROL = ("<|im_end|>", "[TOOL_CALLS]", "[INST]")
ADDED = ("<tool_call>", "<think>", "<b>", "    ", "é", "\u2581\u2581")
TEXTS = (
    *(
        "<tool_call>x",
        "a<think>b",
        "[TOOL_CALLS]",
        "<b>",
        "x<b>bold</b>",
        "<|im_end|>",
        "[INST] x",
        "<s>",
        "<unk>",
    ),
    *(
        "xe\u0301y",
        "\u1112\u1161\u11ab",
        "\ufb01 \u212b \u00bd",
        "é",
        "日本 😀",
        "\U0001f468\u200d\U0001f469",
    ),
    *(
        "\u2581",
        "a\u2581b",
        "\u2581\u2581 x",
        "     y",
        "\n\n\t x",
        " lead",
        "trail ",
        "\u00a0x\u3000",
        "\x00\x01",
    ),
)


def byte_level() -> Tokenizer:
    """As Qwen3's: it normalizes, and has tokens beside its vocabulary."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return with_added(made)


def sentencepiece_unigram(tmp_path: Path) -> Tokenizer:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=content,
        model_type="unigram",
        byte_fallback=True,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    (tmp_path / "tokenizer.model").write_bytes(content.getvalue())
    return with_added(read_sentencepiece(tmp_path / "tokenizer.model")[0])


def of_family(tmp_path: Path, family: str) -> Tokenizer:
    return with_added(
        Tokenizer.from_file(str(make_text_model(tmp_path, family) / "tokenizer.json"))
    )


def with_added(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, normalized=False, lstrip=True) for text in ADDED])
    return made


@pytest.fixture(params=["bytes", "llama", "mistral", "gemma", "qwen", "llama3", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return byte_level()
    return (
        sentencepiece_unigram(tmp_path)
        if request.param == "unigram"
        else of_family(tmp_path, request.param)
    )


def forms_of(text: str) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Forms that hold a text, and the texts that they allow, JSON's read and written again."""
    pattern = re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
    schema = {"type": "object", "properties": {text: {"type": "null"}}, "required": [text]}
    yield {"choice": [text, text + "z", "q"]}, {text, text + "z", "q"}
    yield {"regex": f"({pattern}){{1,2}}!"}, {text + "!", text + text + "!"}
    yield {"grammar": f'start: {json.dumps(text, ensure_ascii=False)} "!"'}, {text + "!"}
    yield {"json": {"const": text}}, {json.dumps(text)}
    yield {"json": {"enum": [[text], {text: 1}]}}, {json.dumps([text]), json.dumps({text: 1})}
    yield {"json": {**schema, "additionalProperties": False}}, {json.dumps({text: None})}


def walk(matcher: Matcher, draw: random.Random, *, jumps: bool) -> list[int]:
    """Follow a grammar to its end by tokens that are drawn, or that it forces."""
    token_ids: list[int] = []
    mask = np.zeros((1, matcher.vocabulary.num_words), np.int32)
    while not matcher.must_end:
        following = matcher.forced() if jumps else []
        if not following:
            fill_masks([matcher], mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            following = [int(draw.choice(allowed))]
        if following[0] in matcher._ends:
            return token_ids
        for token_id in following:
            matcher.accept(token_id)
        token_ids += following
    return token_ids


def test_a_forced_text_is_written_as_it_is(tokenizer: Tokenizer) -> None:
    """In choices, patterns, grammars, constants and keys, whether forced tokens are taken or drawn."""
    end = tokenizer.token_to_id(CONTROL[0])
    forms = Grammars(tokenizer, tokenizer.get_vocab_size(), {end})
    before = tokenizer.encode("a", add_special_tokens=False).ids
    draw = random.Random(5)
    for text in TEXTS:
        for form, allowed in forms_of(text):
            (matcher, other) = forms.matchers(
                SamplingParams(n=2, structured_outputs=form), frozenset({end})
            )
            assert matcher is not None
            assert other is not None
            for each, jumps in ((matcher, True), (other, False)):
                token_ids = walk(each, draw, jumps=jumps)
                written = tokenizer.decode(before + token_ids).removeprefix(
                    tokenizer.decode(before)
                )
                written = json.dumps(json.loads(written)) if "json" in form else written
                assert written in allowed, form
    forms.close()


def test_a_control_token_stands_where_a_grammar_names_it(tmp_path: Path) -> None:
    """A text that is spelled like it is a text."""
    tokenizer = of_family(tmp_path, "qwen")
    end, call = tokenizer.token_to_id(CONTROL[0]), tokenizer.token_to_id("<tool_call>")
    forms = Grammars(tokenizer, tokenizer.get_vocab_size(), {end})
    grammar = 'start: <tool_call> "<tool_call>" /[<b>]/ // <nothing>'
    (matcher,) = forms.matchers(
        SamplingParams(structured_outputs={"grammar": grammar}), frozenset({end})
    )
    assert matcher is not None
    token_ids = walk(matcher, random.Random(1), jumps=True)
    assert token_ids[0] == call
    assert call not in token_ids[1:]
    assert tokenizer.decode(token_ids[1:])[:-1] == "<tool_call>"
    with pytest.raises(InvalidSampling, match=r"control tokens that the model has.*<nothing>"):
        forms.matchers(
            SamplingParams(structured_outputs={"grammar": "start: <nothing>"}), frozenset({end})
        )
    forms.close()


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["a", "é"]},
        {"regex": "aé+"},
        {"grammar": 'start: "é"'},
        {"json": {"const": ["é"]}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_what_the_vocabulary_cannot_write_is_refused_by_name(form: dict[str, Any]) -> None:
    made = Tokenizer(models.BPE({char: place for place, char in enumerate('abc"[]{}:,Ġ')}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    end = made.add_special_tokens(["</s>"]) and made.token_to_id("</s>")
    forms = Grammars(made, made.get_vocab_size(), {end})
    with pytest.raises(
        InvalidSampling, match=r"without .*é.*, which the model's vocabulary cannot write"
    ):
        forms.matchers(SamplingParams(structured_outputs=form), frozenset({end}))
    assert forms.matchers(SamplingParams(structured_outputs={"choice": ["ab"]}), frozenset({end}))
    forms.close()
