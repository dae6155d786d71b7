"""Tokenizer: text to token ids and back, and chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidPrompt, PromptTooLong
from engine.text.token_bound import TokenBound

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """The tokenizer of a model folder, for any number of threads at once.

    Raises ConfigError if there is none that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in VOCABULARIES):
            # transformers 5 would make an empty tokenizer of the model's class
            raise ConfigError(f"{folder} holds none of {', '.join(VOCABULARIES)}; add the model's tokenizer")
        for path in folder.glob("*.json"):
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(
                    f"{path} has {path.stat().st_size} bytes, more than any tokenizer's; fetch it again"
                )
        try:
            with _no_panic():
                # trust_remote_code: unless it is said, code in the folder makes transformers ask the terminal
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # whatever it makes of what is in the files
            raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # In its first call transformers would change what other threads are using.
            backend.no_truncation()
            backend.no_padding()
        self.min_tokens = TokenBound(backend)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end token, for models whose configuration names none."""
        token_id = self._tokenizer.eos_token_id
        return frozenset() if token_id is None else frozenset((token_id,))

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Token ids of a prompt, with the special tokens the model's tokenizer adds to every text.

        limit: tokens at most, so that a text which must have more is not tokenized at all; others may have
        more. Raises PromptTooLong for such a text, InvalidPrompt for one that is no valid Unicode.
        """
        return self._encode(text, limit, add_special_tokens=True)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        with _no_panic():
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def chat_token_ids(self, messages: list[dict[str, Any]], *, limit: int | None = None) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        messages: [{"role": ..., "content": ...}, ...]. Raises InvalidPrompt if they are not of that shape,
        or the tokenizer has no chat template, or its template refuses them. limit: as in `encode`.
        """
        from jinja2 import TemplateError

        _check_messages(messages)
        if not self._tokenizer.chat_template:
            raise InvalidPrompt("this model's tokenizer has no chat template; send a plain prompt instead")
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidPrompt(f"the chat template refused these messages: {error}") from error
        return self._encode(text, limit, add_special_tokens=False)

    def _encode(self, text: str, limit: int | None, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise InvalidPrompt(f"the prompt is no valid Unicode text: {error}") from error
        if limit is not None and (at_least := self.min_tokens(text)) > limit:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, so at least {at_least} tokens; "
                f"this engine takes at most {limit}"
            )
        # verbose=False: a text beyond the model's length is our error to name, not a warning to print
        with _no_panic():
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turn a panic of the Rust library into InvalidPrompt: as a BaseException it would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise InvalidPrompt(f"the tokenizer broke down: {error}") from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt(f"messages must be a list of at least one message, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidPrompt(f"message {i} must be an object with a role and a content")
