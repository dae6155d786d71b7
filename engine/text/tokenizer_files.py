"""Loads transformers' tokenizer from a model folder, with its special tokens."""

import base64
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.errors import ConfigError
from engine.text.sentencepiece_file import read_sentencepiece

VOCABULARIES = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json", "vocab.txt")

#: Special tokens of the earliest tekken files, which list none. Source: mistral-common's Tekkenizer.
EARLY_TEKKEN = (
    *(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
    ),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
    ),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)

TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def load_tokenizer(folder: Path) -> Any:
    """Load the transformers tokenizer of a model folder.

    A tokenizer.json is taken as it stands: classes of transformers 5 would put their own splitting in its place.
    Raises ConfigError, or any error of transformers.
    """
    from transformers import PreTrainedTokenizerFast

    if not any((folder / name).is_file() for name in VOCABULARIES):
        # transformers 5 would make an empty tokenizer of the model's class
        raise ConfigError(
            f"{folder} holds none of {', '.join(VOCABULARIES)}; add the model's tokenizer"
        )
    # trust_remote_code: left unset, it makes transformers ask on the terminal if there is code in the folder
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    if (folder / "tekken.json").is_file():
        return _of_tekken(folder / "tekken.json")
    if (folder / "tokenizer.model").is_file():
        return _of_sentencepiece(folder)
    # Late: it lists all models' modules, which takes a third of a second.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)


def _of_tekken(path: Path) -> Any:
    """Make the tokenizer of a tekken.json; it puts the beginning token before each text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer, special = read_tekken(path)
    names = {key: text for key, text in TEKKEN_NAMES.items() if text in special}
    bos = names.get("bos_token")
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, **names)


def read_tekken(path: Path) -> tuple[Any, list[str]]:
    """Return the tokenizers.Tokenizer of a tekken.json, Mistral's, and its special tokens in the order of their ids.

    The parts whose join has the lowest rank are merged first. Raises ConfigError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        listed = sorted(content.get("special_tokens") or (), key=lambda token: int(token["rank"]))
        special = [str(token["token_str"]) for token in listed] or list(EARLY_TEKKEN)
        num_special = int(config.get("default_num_special_tokens") or len(special))
        special += [f"<SPECIAL_{number}>" for number in range(len(special), num_special)]
        entries = content["vocab"]
        if config.get("default_vocab_size"):
            entries = entries[: int(config["default_vocab_size"]) - num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
        return _build_tekken(ranks, str(config["pattern"]), special), special
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no tekken vocabulary ({error!r}); fetch it again") from error


def _build_tekken(ranks: dict[bytes, int], split: str, special: list[str]) -> Any:
    """Build the tokenizer. ranks: by a token's bytes. split: a word's pattern. special: the tokens of the first ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    chars = {byte: char for char, byte in byte_alphabet().items()}
    written = {token: "".join(chars[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[left], written[right]) for left, right in known]
    vocab = {text: i for i, text in enumerate(special)}
    vocab |= {written[token]: rank + len(special) for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special]
    )
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Return, by character, the byte that byte-level BPE writes as it; printable ones are written as themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(unprintable)
    }


def _of_sentencepiece(folder: Path) -> Any:
    """Make the tokenizer of the folder, as if it had a tokenizer.json for its tokenizer.model."""
    from tokenizers.processors import TemplateProcessing

    tokenizer, names = read_sentencepiece(folder / "tokenizer.model")
    with TemporaryDirectory() as copied_folder:
        for path in folder.glob("*.json"):
            shutil.copy(path, copied_folder)
        tokenizer.save(f"{copied_folder}/tokenizer.json")
        made = load_tokenizer(Path(copied_folder))
    for token_id, token in made.init_kwargs.get("added_tokens_decoder", {}).items():
        given_id = made.convert_tokens_to_ids(str(token))
        if given_id != token_id:
            raise ConfigError(
                f"{folder}: tokenizer_config.json or added_tokens.json gives the id {token_id} to "
                f"{str(token)!r}, the vocabulary gives it {given_id}"
            )
    for name, text in names.items():
        if getattr(made, name) is None:
            setattr(made, name, text)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    before = []
    if config.get("add_bos_token", True) and made.bos_token:
        before.append(made.bos_token)
    behind = []
    if config.get("add_eos_token", False) and made.eos_token:
        behind.append(made.eos_token)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *behind],
        special_tokens=[(text, made.convert_tokens_to_ids(text)) for text in before + behind],
    )
    return made
