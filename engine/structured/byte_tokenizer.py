"""Rewrites a tokenizer for llguidance, so that a text's tokens are its bytes and nothing else.

A model's own tokenizer reads `<tool_call>` as a control token, rewrites letters in Unicode's normal form (NFC), and
spells a space and U+2581 alike. A grammar forces bytes, so none of this may happen: the rewritten tokenizer turns a
text into tokens that decode to exactly this text. Ids stay as they are.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.text.tokenizer_files import byte_alphabet

#: Begins the name of a token that stands for no text. Unicode has no character at this code point, so no text has it.
HIDDEN = "\ufdd0"

#: llguidance takes an added token of this form for a control token.
_MARKUP = re.compile("<.*>", re.DOTALL)

#: Pre-tokenizers that cut a text and keep all of it.
_CUTTERS = ("Split", "Digits", "Punctuation", "ByteLevel")

_TO_BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def tokenizer_of_bytes(tokenizer: str) -> str:
    """Rewrite the JSON of a `tokenizers.Tokenizer`. A tokenizer that is not decoded byte by byte stays as it is."""
    content = json.loads(tokenizer)
    decoders = list(_steps(content["decoder"], "decoders"))
    kinds = {decoder["type"] for decoder in decoders}
    if content["model"]["type"] not in ("BPE", "Unigram") or not kinds & {
        "ByteLevel",
        "ByteFallback",
    }:
        return tokenizer
    has_byte_pieces = "ByteFallback" in kinds
    space = _written_space(decoders) if has_byte_pieces else " "
    for step in ("normalizer", "truncation", "padding", "post_processor"):
        content[step] = None
    content["pre_tokenizer"] = None if has_byte_pieces else _cutters(content["pre_tokenizer"])
    added = {token["id"]: token for token in content["added_tokens"]}
    names = _names(_texts(content["model"]["vocab"], added), added, space)
    _rename(content["model"], names, space)
    content["added_tokens"] = [
        _added_token(token_id, name)
        for token_id, name in names.items()
        if name.startswith(HIDDEN)
        or (token_id in added and (has_byte_pieces or _is_decoded_as_it_is(name)))
    ]
    return json.dumps(content, ensure_ascii=False)


def _texts(vocabulary: Any, added: dict[int, Any]) -> dict[int, str]:
    """Return the texts of tokens by their ids. vocabulary: ids by text (BPE), or a list by id (unigram)."""
    if isinstance(vocabulary, dict):
        texts = {token_id: text for text, token_id in vocabulary.items()}
    else:
        texts = {token_id: text for token_id, (text, _) in enumerate(vocabulary)}
    return texts | {token_id: token["content"] for token_id, token in added.items()}


def _names(texts: dict[int, str], added: dict[int, Any], space: str) -> dict[int, str]:
    """Name each id up to the last one. Control tokens and ids without a token get names that no text spells."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for token_id in range(max(texts, default=-1) + 1):
        name = texts.get(token_id, HIDDEN).replace(space, " ")
        token = added.get(token_id)
        is_control = token is not None and (token["special"] or _MARKUP.fullmatch(token["content"]))
        if is_control or name == HIDDEN or name in taken:
            name = f"{HIDDEN}[{token_id}]"
        taken.add(name)
        names[token_id] = name
    return names


def _rename(model: dict[str, Any], names: dict[int, str], space: str) -> None:
    """Replace the texts of a model's tokens by their names. space: the character that the model writes for a space."""
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        # Tokens added to the vocabulary have no score; the least is given to them.
        scores += [min(scores)] * (len(names) - len(scores))
        model["vocab"] = [[names[token_id], score] for token_id, score in enumerate(scores)]
        return
    if model["unk_token"] in model["vocab"]:
        model["unk_token"] = names[model["vocab"][model["unk_token"]]]
    model["dropout"] = None
    vocabulary = {name: token_id for token_id, name in names.items()}
    model["vocab"] = vocabulary
    prefix_length = len(model["continuing_subword_prefix"] or "")
    merges = (
        [left.replace(space, " "), right.replace(space, " ")] for left, right in model["merges"]
    )
    # A merge stays only if both its tokens and the token that they make have kept their texts.
    model["merges"] = [
        [left, right]
        for left, right in merges
        if left in vocabulary and right in vocabulary and left + right[prefix_length:] in vocabulary
    ]


def _added_token(token_id: int, name: str) -> dict[str, Any]:
    """Return an added token that swallows no blanks around it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": name, "special": name.startswith(HIDDEN), **flags}


def _is_decoded_as_it_is(text: str) -> bool:
    """Whether byte-level decoding leaves a text unchanged: it is ASCII, or has a character that stands for no byte."""
    alphabet = byte_alphabet()
    return text.isascii() or any(char not in alphabet for char in text)


def _written_space(decoders: list[dict[str, Any]]) -> str:
    """Return the text that the vocabulary has for a space."""
    for decoder in decoders:
        if (
            decoder["type"] == "Replace"
            and decoder["content"] == " "
            and "String" in decoder["pattern"]
        ):
            return str(decoder["pattern"]["String"])
    return " "


def _cutters(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the pre-tokenizers that keep all of a text; one of them writes it as bytes."""
    steps = []
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if step["type"] not in _CUTTERS or step.get("behavior") == "Removed":
            continue
        if step["type"] == "ByteLevel":
            step = {**step, "add_prefix_space": False}
        steps.append(step)
    if not any(step["type"] == "ByteLevel" for step in steps):
        steps.append(_TO_BYTES)
    return {"type": "Sequence", "pretokenizers": steps}


def _steps(step: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """Yield the single steps of a decoder or pre-tokenizer. key: where a sequence keeps its steps."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[key]:
        yield from _steps(part, key)
