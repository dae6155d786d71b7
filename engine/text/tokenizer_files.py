"""From the files of a model folder to transformers' tokenizer of it, with its special tokens."""

from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.text.tekken import read_tekken

VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt")

TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a model folder.

    A tokenizer.json is taken as it stands: the classes of transformers 5 that tokenizer_config.json names
    would put their own splitting and decoding in its place.
    Raises ConfigError, or whatever transformers makes of what is in the files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).is_file() for name in VOCABULARIES):
        # transformers 5 would make an empty tokenizer, or tokens that are not SentencePiece's
        raise ConfigError(
            f"{folder} holds none of {', '.join(VOCABULARIES)}; add the model's tokenizer.json (of a "
            "tokenizer.model: AutoTokenizer.from_pretrained(...).save_pretrained(...), with sentencepiece)"
        )
    # trust_remote_code: unless it is said, code in the folder makes transformers ask the terminal
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    if (folder / "tekken.json").is_file():
        return _of_tekken(folder / "tekken.json")
    return AutoTokenizer.from_pretrained(str(folder), **options)


def _of_tekken(path: Path) -> Any:
    """A tokenizer that puts the token for a text's beginning before each text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer, special = read_tekken(path)
    names = {key: text for key, text in TEKKEN_NAMES.items() if text in special}
    if bos := names.get("bos_token"):
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, **names)
