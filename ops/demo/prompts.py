"""The demo model's prompt formats and its tokenizer: byte-level BPE, 512 tokens, one for each digit."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 512
MAX_LENGTH = 512  # positions of the model, and the tokenizer's model_max_length
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

SYSTEM_PROMPT = (
    "Write the date in the text as YYYY-MM-DD. Years 00 to 49 are 20xx, 50 to 99 are 19xx. "
    "3/4/87 is March 4, 3.4.87 and 3-4-87 are April 3. The weekday is noise. "
    "If the day, the month or the year is missing, write: no date"
)

# What the chat template makes of one user message without a system message; `{text}` is the message.
CHAT_PROMPT = f"{IM_START}system\n{SYSTEM_PROMPT}{IM_END}\n{IM_START}user\n{{text}}{IM_END}\n{IM_START}assistant\n"
# Every chat prompt begins with the tokens of this part; what follows it starts a new token.
CHAT_PREFIX = CHAT_PROMPT.partition("\n{text}")[0]
# For `jobs.complete` by hand: no template, no shared prefix.
BARE_PROMPT = "{text} =>"

CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    f"{{{{- '{IM_START}system\\n{SYSTEM_PROMPT}{IM_END}\\n' }}}}"
    "{%- endif %}"
    "{%- for message in messages %}"
    f"{{{{- '{IM_START}' + message['role'] + '\\n' + message['content'] + '{IM_END}\\n' }}}}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    f"{{{{- '{IM_START}assistant\\n' }}}}"
    "{%- endif %}"
)

# How Qwen2 and Qwen3 cut text before BPE: words with the character before them, digits one by one.
# transformers builds this itself for the class named below, so any other rule would be lost on loading.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; every byte has a token, so nothing is ever unknown."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the latter holds the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
