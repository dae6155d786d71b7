"""From the files of a model folder to transformers' tokenizer of it, with its special tokens."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.text.chat_templates import FOLDER as TEMPLATES
from engine.text.ranked_bytes import LLAMA_3_SPLIT, read_tekken, read_tiktoken
from engine.text.sentencepiece_file import build_tokenizer, is_sentencepiece, read_sentencepiece

VOCABULARIES = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json", "vocab.txt")

READ = ("*.json", "*.model", "*.jinja", f"{TEMPLATES}/*.jinja")

MAX_FILE_BYTES = 256 << 20

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a model folder.

    A tokenizer.json is taken as it stands: the classes of transformers 5 that tokenizer_config.json names
    would put their own splitting and decoding in its place.
    Raises ConfigError, or whatever transformers makes of what is in the files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).is_file() for name in VOCABULARIES):
        # transformers 5 would make an empty tokenizer of the model's class
        raise ConfigError(f"{folder} holds none of {', '.join(VOCABULARIES)}; add the model's tokenizer")
    for path in (path for pattern in READ for path in folder.glob(pattern)):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes, more than any tokenizer's; fetch it again"
            )
    # trust_remote_code: unless it is said, code in the folder makes transformers ask the terminal
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    if (folder / "tekken.json").is_file():
        tokenizer, special = read_tekken(folder / "tekken.json")
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return _finish(tokenizer, folder, {key: text for key, text in names.items() if text in special})
    if (folder / "tokenizer.model").is_file():
        return _load_model_file(folder)
    return AutoTokenizer.from_pretrained(str(folder), **options)


def _load_model_file(folder: Path) -> Any:
    """Two formats share the name tokenizer.model: SentencePiece's and tiktoken's."""
    path = folder / "tokenizer.model"
    if is_sentencepiece(path):
        model = read_sentencepiece(path)
        ids = (model.bos_id, model.eos_id, model.unk_id, model.pad_id)
        found = dict(zip(SPECIAL_NAMES, map(model.text_of, ids), strict=True))
        return _finish(build_tokenizer(model), folder, {key: text for key, text in found.items() if text})
    model_type = _read_object(folder / "config.json").get("model_type")
    if model_type != "llama" or not _added_tokens(folder):
        raise ConfigError(
            f"{path} is a tiktoken vocabulary, which says neither how a text is divided nor which special "
            "tokens there are. The first is known of llama alone, the second stands in added_tokens_decoder "
            f"of tokenizer_config.json; here the model type is {model_type!r}. Add the model's tokenizer.json"
        )
    return _finish(read_tiktoken(path, LLAMA_3_SPLIT), folder, {})


def _finish(tokenizer: Any, folder: Path, names: dict[str, str]) -> Any:
    """Add the tokens that stand beside the vocabulary, and what the tokenizer puts around each text.

    names: the special tokens by the vocabulary, which tokenizer_config.json may name otherwise.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    config = _read_object(folder / "tokenizer_config.json")
    for token_id, token in sorted(_added_tokens(folder).items()):
        if token_id > tokenizer.get_vocab_size():
            raise ConfigError(f"{folder}: no file says which token the id {tokenizer.get_vocab_size()} is")
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"{folder}: tokenizer_config.json or added_tokens.json gives the id {token_id} to "
                f"{token.content!r}, the vocabulary gives it {tokenizer.token_to_id(token.content)}"
            )
    named = {**names, **_named(_read_object(folder / "special_tokens_map.json")), **_named(config)}
    ids = {text: tokenizer.token_to_id(text) for text in named.values()}
    around = []
    for name, default in (("bos_token", True), ("eos_token", False)):
        adds = config.get(f"add_{name}", default) and ids.get(named.get(name, "")) is not None
        around.append([named[name]] if adds else [])
    before, behind = around
    if before or behind:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *behind], special_tokens=[(text, ids[text]) for text in before + behind]
        )
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, **named)


def _added_tokens(folder: Path) -> dict[int, Any]:
    """Tokens by their ids, as tokenizer_config.json lists them, or older folders in added_tokens.json."""
    from tokenizers import AddedToken

    listed = _read_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = {
        int(token_id): AddedToken(entry["content"], **{key: entry[key] for key in keys if key in entry})
        for token_id, entry in listed.items()
    }
    older = _read_object(folder / "added_tokens.json")
    return found or {token_id: AddedToken(text, normalized=False) for text, token_id in older.items()}


def _named(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a file names, each as its text or as an object with it."""
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
