"""Tokenizer: text to token ids and back, and chat templates."""

import re
import sys
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidPrompt, InvalidSampling, PromptTooLong
from engine.text.chat_templates import (
    DEVELOPER,
    REASONING_MARKS,
    SYSTEM,
    TEXT_ALONE,
    Messages,
    at_time,
    check_roles,
    check_tools,
    check_variables,
    for_template,
    read_template,
    read_tool_template,
    read_variables,
    takes_parts,
    with_short_ids,
)
from engine.text.control_tokens import BREAK, ControlTokens
from engine.text.stop_strings import IncrementalText
from engine.text.template_probe import HELLO, TemplateProbe
from engine.text.tokenizer_files import byte_alphabet, load_tokenizer

#: Characters per token that hardly any text has on average: the longest tokens of vocabularies are 128 spaces.
MAX_TOKEN_CHARS = 128

#: Texts of which at least one has ordinary tokens, not byte pieces.
ANCHORS = ("a", "e", "1", ".")

#: Marks of reasoning that an assistant's message may hold: templates look for them there.
REASONING_TEXTS = frozenset(mark for pair in REASONING_MARKS for mark in pair)

#: Errors that templates raise besides jinja2's own.
RENDER_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

#: A tool with which templates are tried.
PROBED_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}

#: How a part of a character is decoded.
INCOMPLETE = "\ufffd"

#: A piece of sentencepiece's vocabulary that stands for one byte.
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")

#: If bytes are pieces of the vocabulary, each byte of an incomplete character becomes a replacement character.
BYTE_PIECES_OPEN = 3


@dataclass(frozen=True)
class AddedToken:
    """A token that stands for one text wherever it occurs. is_special: completions' texts leave it out."""

    token_id: int
    is_special: bool


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token. partial: its bytes if they are only part of a character, else None."""

    text: str
    partial: bytes | None


class Tokenizer:
    """The tokenizer of a model folder, for any number of threads at once.

    chat_template: the name of one of the model's chat templates; None for the default one. template: its source, None
    if there is none. added_tokens: by text, the tokens that are added to the vocabulary.
    Raises ConfigError if the folder's tokenizer cannot be read, or has no such template.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self._tokenizer: Any = open_tokenizer(folder)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # else transformers does so in its first call, while other threads may be using it
            backend.no_truncation()
            backend.no_padding()
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self.added_tokens = {
            token.content: AddedToken(id_, token.special) for id_, token in added.items()
        }
        self._bos = (self._tokenizer.bos_token, self._tokenizer.bos_token_id)
        self._anchor, self._anchor_text = self._find_anchor(backend)
        self._num_open = 1 if _decodes_bytes(backend) else BYTE_PIECES_OPEN
        self._token_texts: dict[int, TokenText] = {}
        self.template = read_template(folder, chat_template)
        self._tool_template = read_tool_template(folder, chat_template) or self.template
        self._check_templates(folder)
        self._probe = TemplateProbe(self._render)
        self._takes_parts = False if self.template is None else takes_parts(self._probe)
        self._control = ControlTokens(
            backend, self.added_tokens, self._control_texts(), REASONING_TEXTS
        )
        self._takes_short_ids = self._probe.takes_short_ids_alone()
        # Developer messages become system messages only if the template shows system messages, but no developer ones.
        shows_developer = self._probe.shows_role(DEVELOPER)
        self._takes_developer = shows_developer or not self._probe.shows_role(SYSTEM)

    def _check_templates(self, folder: Path) -> None:
        """Raise ConfigError if the chat template cannot be read: every chat would fail."""
        from jinja2 import TemplateError, TemplateSyntaxError

        for tools in (None, [PROBED_TOOL]):
            if (self.template if tools is None else self._tool_template) is None:
                continue
            try:
                self._render([HELLO], tools=tools)
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"{folder}: the chat template cannot be read, line {error.lineno}: {error.message}; mend it, or "
                    "name another with chat_template"
                ) from error
            except (TemplateError, *RENDER_ERRORS):  # it refuses this chat; others may work
                continue

    def end_token_ids(self, vocab_size: int) -> frozenset[int]:
        """Return the tokenizer's own end token, which ends texts beside those that the configuration names.

        vocab_size: the model's. A token beyond it cannot be generated, and is left out.
        """
        token_id = self._tokenizer.eos_token_id
        if token_id is None or token_id >= vocab_size:
            return frozenset()
        return frozenset((token_id,))

    @property
    def prefix(self) -> list[int]:
        """Return the token that stands for an empty text: the one that begins texts, or else ends them.

        Raises InvalidPrompt if there is neither.
        """
        token_id = self._bos[1] if self._bos[1] is not None else self._tokenizer.eos_token_id
        if token_id is None:
            raise InvalidPrompt(
                "this tokenizer has no token to stand for an empty context; give one"
            )
        return [token_id]

    def encode_alone(self, text: str, *, limit: int | None = None) -> list[int]:
        """Return the token ids of the text, with no special tokens added. limit: as in `encode`."""
        return self._encode(text, limit, add_special_tokens=False)

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """Return a prompt's token ids, with the tokenizer's special tokens.

        A prompt that already begins with the text of the first special token gets this token once, not twice.
        limit: a text that is far too long for this number of tokens raises PromptTooLong, and is not tokenized. A text
        that is a little too long is tokenized, and gives more tokens. Raises InvalidPrompt for invalid Unicode.
        """
        token_ids = self._encode(text, limit, add_special_tokens=True)
        bos, bos_id = self._bos
        if bos and text.startswith(bos) and token_ids[:2] == [bos_id, bos_id]:
            del token_ids[0]
        return token_ids

    def encode_cut(self, text: str, most: int) -> list[int]:
        """Encode a text and cut it to `most` tokens as transformers does: special tokens stay. Raises InvalidPrompt."""
        whole = self._encode(text, None, add_special_tokens=True)
        if len(whole) <= most:
            return whole
        text_ids = self.encode_alone(text)
        num_added = len(whole) - len(text_ids)
        start = 0
        while whole[start : start + len(text_ids)] != text_ids:
            start += 1
            if start > num_added:  # the special tokens are not around the text
                return whole[:most]
        num_kept = max(0, most - num_added)
        cut = (
            text_ids[len(text_ids) - num_kept :]
            if self._tokenizer.truncation_side == "left"
            else text_ids[:num_kept]
        )
        return whole[:start] + cut + whole[start + len(text_ids) :]

    def encode_pair(self, first: str, second: str, most: int, vocab_size: int) -> list[int]:
        """Encode two texts as one. If they are too long, the longer one is cut first, as in transformers.

        most: tokens of the pair, with its special tokens. A control token that a text spells is read as text.
        If the model tells the two texts apart, vocab_size is added to the ids of the second. Raises InvalidPrompt.
        """
        if self.backend is None:
            raise InvalidPrompt(
                "this tokenizer takes no pairs of texts: it is not one of the tokenizers library"
            )
        for text in (first, second):
            _check_unicode(text)
        with _no_panic():
            both = [self._control.value_encoding(text) for text in (first, second)]
        short, long = sorted(map(len, both))
        room = max(0, most - self.backend.num_special_tokens_to_add(is_pair=True))
        if short + long > room:
            # The longer text loses tokens until it is as short as the other one; then both are cut alike.
            long = max(short, room - short)
            if short + long > room:
                short = room // 2
                long = room // 2 + room % 2
            sizes = (short, long) if len(both[0]) <= len(both[1]) else (long, short)
            for encoding, size in zip(both, sizes, strict=True):
                encoding.truncate(size, direction=self._tokenizer.truncation_side)
        whole = self.backend.post_process(*both)
        if "token_type_ids" not in self._tokenizer.model_input_names:
            return list(whole.ids)
        return [
            token + vocab_size * kind for token, kind in zip(whole.ids, whole.type_ids, strict=True)
        ]

    @property
    def max_length(self) -> int:
        """The most tokens of a text, as the tokenizer's files say; a very large number if they say nothing."""
        length = getattr(self._tokenizer, "model_max_length", None)
        return length if type(length) is int and length > 0 else sys.maxsize

    def surplus(self, vocab_size: int) -> str | None:
        """Return a warning if the tokenizer has more tokens than the model has embeddings (vocab_size); else None."""
        num_tokens = len(self._tokenizer)
        if num_tokens <= vocab_size:
            return None
        return (
            f"the tokenizer has {num_tokens} tokens, the model has embeddings for {vocab_size}: prompts with tokens "
            "beyond these are refused"
        )

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` that does the work; None if this tokenizer has none."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word, at the beginning of a text and behind a space.

        Raises InvalidSampling for a word without tokens.
        """
        token_ids_of_all: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip()
            texts = (bare, " " + bare) if bare else (word,)
            # A dict, as both texts may have the same tokens.
            found = dict.fromkeys(tuple(self.encode_alone(text)) for text in texts)
            found.pop((), None)
            if not found:
                raise InvalidSampling("a bad word has no tokens; leave it out", repr(word))
            token_ids_of_all += found
        return tuple(token_ids_of_all)

    def decode(
        self,
        token_ids: list[int],
        *,
        follows_text: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of token ids, without special tokens unless they are asked for.

        follows_text: other text stands before this text, so the first token keeps its space.
        spaces_between_special_tokens: as in SamplingParams; it holds for all tokens added to the vocabulary.
        """
        anchor = self._anchor if follows_text else []
        whole = anchor + token_ids
        cuts = [0, len(whole)]
        if not skip_special_tokens and not spaces_between_special_tokens:
            # Two added tokens side by side are decoded apart, so that no space comes between them.
            is_added = [token_id in self._added_ids for token_id in whole]
            cuts[1:1] = [i for i in range(1, len(whole)) if is_added[i - 1] and is_added[i]]
        text = "".join(
            self._decode(whole[start:end], skip_special_tokens) for start, end in pairwise(cuts)
        )
        return text[len(self._anchor_text) :] if anchor else text

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        with _no_panic():
            text = self._tokenizer.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        assert isinstance(text, str)
        return text

    def token_text(self, token_id: int) -> TokenText:
        """Return a token's text as it stands behind other text, also that of a special token."""
        known = self._token_texts.get(token_id)
        if known is None:
            text = self.decode([token_id], follows_text=True, skip_special_tokens=False)
            partial_bytes = self._partial_bytes(token_id) if INCOMPLETE in text else None
            known = TokenText(text, partial_bytes)
            self._token_texts[token_id] = known
        return known

    def _partial_bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes if they are not whole characters. None if they are, or are not known."""
        if self.backend is None or token_id in self._added_ids:
            return None
        written = self.backend.id_to_token(token_id)
        if _decodes_bytes(self.backend):
            byte_of = byte_alphabet()
            token_bytes = bytes(byte_of[char] for char in written if char in byte_of)
        elif BYTE_PIECE.fullmatch(written):
            token_bytes = bytes([int(written[1:-1], 16)])
        else:
            return None
        try:
            token_bytes.decode()
        except UnicodeDecodeError:
            return token_bytes
        return None

    def incremental_text(
        self,
        *,
        follows_text: bool,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalText:
        """Return an object that makes the text of tokens that come one by one. The arguments are those of `decode`."""
        decode = partial(
            self.decode,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        behind = partial(decode, follows_text=True)
        is_joined = not skip_special_tokens and not spaces_between_special_tokens
        return IncrementalText(
            behind if follows_text else decode,
            behind=behind,
            num_open=self._num_open,
            joined=self._added_ids if is_joined else (),
        )

    def encode_behind(self, text: str) -> list[int]:
        """Encode a text that stands behind others, without the space that many tokenizers put first."""
        anchor = self.encode_alone(self._anchor_text)
        both = self.encode_alone(self._anchor_text + text)
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
        return self.encode_alone(text)

    def has_text(self, token_ids: list[int]) -> bool:
        """Whether any of the tokens is not special."""
        return any(token_id not in self._special_ids for token_id in token_ids)

    def chat_token_ids(
        self, messages: Messages, *, limit: int | None = None, **options: Any
    ) -> list[int]:
        """Return a conversation's token ids. options: those of `chat_text`. Raises what `chat_text` and `encode` raise.

        limit: as in `encode`.
        """
        return self.encode_alone(self.chat_text(messages, **options), limit=limit)

    def chat_text(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        split_special_tokens: bool = True,
        kinds: Container[str] = TEXT_ALONE,
        now: float | None = None,
    ) -> str:
        """Return the text of a conversation, ready for the model's answer.

        messages, tools: in OpenAI's shape. kinds: the kinds of parts that messages may have. chat_template_kwargs:
        variables of the template. split_special_tokens: a control token that messages, tools or variables spell is
        text, and the text returned has BREAK there. now: Unix seconds that the template takes for the present.
        Raises InvalidPrompt for messages or tools of another shape, and if the model's template is missing or refuses
        them.
        """
        from jinja2 import TemplateError

        if self.template is None:
            raise InvalidPrompt(
                "this model's tokenizer has no chat template; send a plain prompt instead"
            )
        tools = check_tools(tools)
        template = self._tool_template if tools else self.template
        variables = check_variables(chat_template_kwargs, read_variables(template))
        as_parts = self._takes_parts if kinds is TEXT_ALONE else None
        messages = for_template(
            messages, takes_parts=as_parts, kinds=kinds, takes_developer=self._takes_developer
        )
        check_roles(messages, str(template))
        if self._takes_short_ids:
            messages = with_short_ids(messages)
        if split_special_tokens:
            messages = [self._control.broken_message(message) for message in messages]
            tools = self._control.broken(tools)
            variables = self._control.broken(variables)
        try:
            dated = template if now is None or template is None else at_time(template, now)
            text = self._render(messages, tools=tools, chat_template=dated, **variables)
        except (TemplateError, *RENDER_ERRORS) as error:
            raise InvalidPrompt(f"the chat template refused these messages: {error}") from error
        self._probe.check(messages, tools, variables)
        return text

    @property
    def tool_template(self) -> str | None:
        """The template of chats with tools."""
        return self._tool_template

    @property
    def control_tokens(self) -> frozenset[str]:
        """The texts of tokens that values must not forge: special ones, and the marks of the template's turns."""
        return self._control.texts

    def add_control_texts(self, texts: Collection[str]) -> None:
        """Make the marks of pictures control tokens too. Call it before there are requests."""
        self._control = self._control.with_texts(texts)

    def _control_texts(self) -> set[str]:
        """Return the texts of special tokens, and of other added tokens that the template writes around a turn."""
        special = {text for text, token in self.added_tokens.items() if token.is_special}
        chat = [HELLO, {"role": "assistant", "content": "text"}, HELLO]
        turns = "".join(self._probe.texts(chat) + self._probe.texts([HELLO]))
        return special | {
            text for text in self.added_tokens.keys() - REASONING_TEXTS if text in turns
        }

    def _render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render a chat, by the model's own template unless another is given."""
        if chat_template is None:
            chat_template = self._tool_template if tools else self.template
        # a variable may have the name of an argument, such as `tokenize`: then the argument counts
        options = {
            "chat_template": chat_template,
            "tools": tools,
            "add_generation_prompt": True,
            "tokenize": False,
        }
        text = self._tokenizer.apply_chat_template(messages, **{**variables, **options})
        assert isinstance(text, str)
        return text

    def _find_anchor(self, backend: Any) -> tuple[list[int], str]:
        """Find tokens to decode before other tokens, and the text of these first tokens.

        They are needed only if a token's text at the beginning differs from its text further on; else both are empty.
        """
        if backend is None or _decodes_bytes(backend):
            return [], ""
        for text in ANCHORS:
            token_ids = backend.encode(text, add_special_tokens=False).ids
            # The last token must not be a byte piece ("<0x0A>"): it could make one character with the bytes behind it.
            if self.decode(token_ids) == text and backend.id_to_token(token_ids[-1])[:3] != "<0x":
                return token_ids, text
        return [], ""

    def _encode(self, text: str, limit: int | None, *, add_special_tokens: bool) -> list[int]:
        _check_unicode(text)
        if limit is not None and len(text) > MAX_TOKEN_CHARS * limit:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, more than {MAX_TOKEN_CHARS} for each of the "
                f"{limit} tokens that this engine takes at most"
            )
        if BREAK in text:
            with _no_panic():
                return self._control.encode(text, add_special_tokens=add_special_tokens)
        # verbose=False: a text beyond the model's length is our error to name, not a warning to print
        with _no_panic():
            return list(
                self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InvalidPrompt(f"the prompt is no valid Unicode text: {error}") from error


def _decodes_bytes(backend: Any) -> bool:
    """Whether this is byte-level BPE, whose tokens are one run of bytes, decoded as a whole."""
    from tokenizers.decoders import ByteLevel

    return backend is not None and isinstance(backend.decoder, ByteLevel)


def open_tokenizer(folder: Path) -> Any:
    """Load transformers' tokenizer of a folder. Raises ConfigError if it cannot be read."""
    try:
        with _no_panic():
            tokenizer = load_tokenizer(folder)
        length = getattr(tokenizer, "model_max_length", 0)
        if not isinstance(length, int | float):
            raise ConfigError(
                f"{folder}: the tokenizer's model_max_length is no number but a {type(length).__name__}"
            )
        return tokenizer
    except ConfigError:
        raise
    except Exception as error:  # whatever it makes of what is in the files
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turn a panic of the Rust library into InvalidPrompt: as a BaseException it would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise InvalidPrompt(f"the tokenizer broke down: {error}") from error
