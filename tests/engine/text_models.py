"""Small tokenizers as the model families have them, each in a folder of its own."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.text.tokenizer_files import byte_alphabet
from tests.engine.checkpoints import TEXTS

LINES = [*TEXTS, "two  spaces   three,\ta tab and    four; a  b   c"] * 9
LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama3": LLAMA_3_SPLIT,
    "qwen": LLAMA_3_SPLIT.replace("{1,3}", ""),
    "gpt_oss": r"\p{N}{1,3}|\s*\S+|\s+",
}
LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GEMMA_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
SPACE = "\u2581"


def train_sentencepiece(path: Path, **options: Any) -> None:
    """Write a model as Llama 2 has it, with the options that differ."""
    content = io.BytesIO()
    llama = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=content, **llama | options
    )
    path.write_bytes(content.getvalue())


def make_text_model(folder: Path, family: str, **config: Any) -> Path:
    """Write the tokenizer of a family: a name of FAMILIES. config: more for tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type = {"gemma": "gemma2", "tekken": "mistral"}.get(family, family)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    named = FAMILIES[family](folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def _llama(folder: Path) -> dict[str, Any]:
    """The normalizer puts the space before a text."""
    prefix = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return _pieces(folder, LLAMA_NAMES, normalizer=prefix)


def _mistral(folder: Path) -> dict[str, Any]:
    """Metaspace, which puts the space before a text itself."""
    splits = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _pieces(folder, LLAMA_NAMES, splits=splits)


def _gemma(folder: Path) -> dict[str, Any]:
    """No space before a text; turns are marked."""
    return _pieces(
        folder, GEMMA_NAMES, normalizer=normalizers.Replace(" ", SPACE), has_prefix=False
    )


def _pieces(
    folder: Path,
    names: dict[str, str],
    *,
    normalizer: Any = None,
    splits: Any = None,
    has_prefix: bool = True,
) -> dict[str, Any]:
    """As converted from SentencePiece: pieces of characters, and one for each byte."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if splits is not None:
        made.pre_tokenizer = splits
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [*names.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    lines = [line[:9] if splits is not None else line[:9].replace(" ", SPACE) for line in LINES]
    made.train_from_iterator(lines, trainer)
    content = json.loads(
        made.to_str()
    )  # byte pieces are special to the trainer, and to nobody else
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"][:3] != "<0x"
    ]
    made = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        made.normalizer = normalizer
    if names is GEMMA_NAMES:
        made.add_special_tokens(
            [AddedToken(text, normalized=False) for text in ("<start_of_turn>", "<end_of_turn>")]
        )
    _begin_with(made, names["bos_token"])
    made.save(str(folder / "tokenizer.json"))
    return {**names, "tokenizer_class": "LlamaTokenizerFast"}


def _sentencepiece(folder: Path) -> dict[str, Any]:
    """A tokenizer.model alone, and a token that stands beside it."""
    train_sentencepiece(folder / "tokenizer.model")
    return {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {"420": {"content": "<|end|>"}},
    }


def _byte_level(folder: Path, split: str, special: list[str], bos: str | None) -> dict[str, Any]:
    made = Tokenizer(models.BPE(ignore_merges=True))
    made.normalizer = normalizers.NFC() if split == SPLITS["qwen"] else None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    if bos is not None:
        _begin_with(made, bos)
    made.save(str(folder / "tokenizer.json"))
    return {
        "bos_token": bos,
        "eos_token": special[-1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _llama3(folder: Path) -> dict[str, Any]:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    return _byte_level(folder, SPLITS["llama3"], special, special[0])


def _qwen(folder: Path) -> dict[str, Any]:
    return _byte_level(
        folder, SPLITS["qwen"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None
    )


def _gpt_oss(folder: Path) -> dict[str, Any]:
    return _byte_level(
        folder, SPLITS["gpt_oss"], ["<|startoftext|>", "<|channel|>", "<|return|>"], None
    )


def byte_ranks(folder: Path) -> list[bytes]:
    """Runs of bytes in the order of their ranks."""
    _llama3(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    alphabet = byte_alphabet()
    vocabulary = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    return [bytes(alphabet[char] for char in text) for text, _ in vocabulary]


def _tekken(folder: Path) -> dict[str, Any]:
    ranks, special = byte_ranks(folder), ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    content = {
        "config": {
            "pattern": SPLITS["llama3"],
            "default_vocab_size": len(ranks) + 10,
            "default_num_special_tokens": 10,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
            for rank, token in enumerate(ranks)
        ],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(special)],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    return {}


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma": _gemma,
    "sentencepiece": _sentencepiece,
    "llama3": _llama3,
    "qwen": _qwen,
    "gpt_oss": _gpt_oss,
    "tekken": _tekken,
}
