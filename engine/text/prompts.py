"""PromptReader: turns prompts, and continuations behind them, into checked token ids."""

from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidPrompt, PromptTooLong
from engine.text.tokenizer import Tokenizer

MAX_LAST_WORD = 64  # characters
MAX_REMEMBERED = 256
MAX_CHARS = 65_536  # of continuations that are remembered

Texts = tuple[str, ...]
Tail = tuple[tuple[int, ...], int]
"""Tokens behind what all continuations of a prompt share, and which of them is the first to be scored."""
# Tokens, and tails behind them; a remembered word's tails begin with it.
Tails = tuple[list[int], tuple[Tail, ...]]
UNLIKE: Tails = ([], ())


class Continuations:
    """Tokenizes continuations behind prompts, for any number of threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._remembered: dict[tuple[str, Texts], Tails] = {}

    def alone(self, texts: Texts) -> tuple[Tail, ...]:
        """Return tails behind a prompt of token ids: each tokenized by itself."""
        remembered = self._remembered.get(("", texts))
        if remembered is None:
            tails = tuple((tuple(self._tokenizer.encode_alone(text)), 0) for text in texts)
            remembered = self._remember(("", texts), ([], tails))
        return remembered[1]

    def behind(self, prompt: str, token_ids: list[int], texts: Texts) -> Tails:
        """Return the tokens that all continuations of a prompt share, and the tail of each continuation.

        prompt: not empty, and with no space at its end. token_ids: the prompt's.
        """
        for word in _last_words(prompt):
            remembered = self._remembered.get((word, texts))
            if remembered is None:
                remembered = self._remember(
                    (word, texts), self._with_word(prompt, token_ids, word, texts)
                )
            word_ids, tails = remembered
            if word_ids and token_ids[-len(word_ids) :] == word_ids:
                return token_ids[: -len(word_ids)], tails
        return self._with_all(prompt, token_ids, texts)

    def _with_word(self, prompt: str, token_ids: list[int], word: str, texts: Texts) -> Tails:
        """Return the tokens of the prompt's last word, and tails that begin with it.

        Returns UNLIKE if the prompt and a text, tokenized as a whole, have other tokens.
        """
        word_ids = self._tokenizer.encode_alone(word)
        if (
            not word_ids
            or len(word_ids) >= len(token_ids)
            or token_ids[-len(word_ids) :] != word_ids
        ):
            return UNLIKE
        before = token_ids[: -len(word_ids)]
        tails = [tuple(self._tokenizer.encode_alone(word + text)) for text in texts]
        for text, tail in zip(texts, tails, strict=True):
            if self._tokenizer.encode(prompt + text) != [*before, *tail]:
                return UNLIKE
        return word_ids, tuple((tail, len(word_ids)) for tail in tails)

    def _with_all(self, prompt: str, token_ids: list[int], texts: Texts) -> Tails:
        wholes = [tuple(self._tokenizer.encode(prompt + text)) for text in texts]
        num_shared = min(num_common(token_ids, whole) for whole in wholes)
        first = len(token_ids) - num_shared
        return token_ids[:num_shared], tuple((whole[num_shared:], first) for whole in wholes)

    def _remember(self, key: tuple[str, Texts], tails: Tails) -> Tails:
        _, texts = key
        with self._lock:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if sum(map(len, texts)) <= MAX_CHARS:
                self._remembered[key] = tails
        return tails


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its continuations.

    token_ids: the tokens before all continuations. tails: the tokens behind these, a tail for each continuation.
    num_prompt_tokens: tokens of the prompt by itself.
    """

    token_ids: list[int]
    tails: tuple[Tail, ...]
    num_prompt_tokens: int


def from_first_difference(tails: Sequence[Tail]) -> tuple[Tail, ...]:
    """Return tails that are scored from the first token at which any two of them differ.

    A label's beginning may share a token with the prompt's end, and this token can tell labels apart: ":n" holds the
    end of "Sentiment:" and the beginning of "negative". Tokens that all labels have in common do not tell them apart.
    """
    lowest = min(token_ids for token_ids, _ in tails)
    highest = max(token_ids for token_ids, _ in tails)
    # All others sort between these two, so they begin alike too.
    first = num_common(lowest, highest)
    return tuple((token_ids, first) for token_ids, _ in tails)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens at the beginning that are equal in both."""
    pairs = zip(one, other, strict=False)
    differences = (i for i, (x, y) in enumerate(pairs) if x != y)
    return next(differences, min(len(one), len(other)))


def _without(token_ids: tuple[int, ...], prefix: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens without the prefix, if they begin with it."""
    return token_ids[len(prefix) :] if token_ids[: len(prefix)] == prefix else token_ids


def _last_words(text: str) -> list[str]:
    """Return the text's last word twice: with the white space before it, and without.

    Some tokenizers join a word with the space before it, and others do not. Returns [] if no white space is near the
    end.
    """
    end = text[-MAX_LAST_WORD:]
    start = max((i for i, char in enumerate(end) if char.isspace()), default=-1)
    return [end[start:], end[start + 1 :]] if start >= 0 else []


Picture = NDArray[np.uint8]
"""[height, width, 3], RGB."""
Prompt = str | list[int] | list[str | Picture]
"""A text, its token ids, or texts and the pictures among them."""
Context = str | tuple[int, ...]

SCORED_ROOM = -1  # one token more than max_model_len fits: the last one is scored and not computed


def pictures_in(prompt: object) -> list[Picture]:
    """Return the pictures among a prompt's parts. Raises InvalidPrompt for one of another shape."""
    if not isinstance(prompt, (list, tuple)):
        return []
    pictures = [part for part in prompt if isinstance(part, np.ndarray)]
    for picture in pictures:
        if (
            picture.dtype != np.uint8
            or picture.ndim != 3
            or picture.shape[2] != 3
            or not picture.size
        ):
            raise InvalidPrompt(
                f"a picture must be an array [height, width, 3] of uint8, got {list(picture.shape)} of {picture.dtype}"
            )
    return pictures


def pictures_of(messages: object) -> list[Picture]:
    """Return the pictures in a chat's messages. Raises InvalidPrompt for one of another shape."""
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return pictures_in(
        [
            part.get("image")
            for part in parts
            if isinstance(part, dict) and part.get("type") == "image"
        ]
    )


class PromptReader:
    """Turns prompts into token ids that the model can take, or says why it cannot."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._continuations = Continuations(tokenizer)

    def pair(self, context: object, continuation: object) -> tuple[Context, Context]:
        """Return what is scored, and what stands before it.

        A context's last spaces become part of the continuation, as in lm-evaluation-harness. An empty list of token
        ids is replaced by the tokenizer's `prefix`. Raises InvalidPrompt.
        """
        if isinstance(context, str) and isinstance(continuation, str):
            text = context.rstrip()
            return context[len(text) :] + continuation, text
        if not isinstance(context, (list, tuple)) or not isinstance(continuation, (list, tuple)):
            raise InvalidPrompt(
                "context and continuation must be two strings or two lists of token ids, got "
                f"{type(context).__name__} and {type(continuation).__name__}"
            )
        self.check_ids([*context, *continuation])
        if context:
            return tuple(continuation), tuple(context)
        prefix = tuple(self._tokenizer.prefix)
        return _without(tuple(continuation), prefix), prefix

    def continued(
        self,
        prompt: object,
        continuations: Sequence[str | Sequence[int]],
        *,
        truncate_prompt_tokens: int | None = None,
        num_ends: int = 0,
        are_labels: bool = False,
    ) -> Continued:
        """Return the tokens before all of a prompt's continuations, and their tails.

        A continuation that is a text is tokenized together with a prompt that is a text, and the prompt's last spaces
        are part of the continuation. Behind a prompt of token ids it is tokenized alone.
        num_ends: the number of end tokens behind each continuation. are_labels: the continuations are compared with
        each other, so all are scored from the first token at which any two differ.
        Raises InvalidPrompt or PromptTooLong.
        """
        before, tails = self._continued(
            prompt, continuations, truncates=truncate_prompt_tokens is not None
        )
        if not are_labels or len(tails) == 1:
            for number, (tail, first) in enumerate(tails):
                if len(tail) <= first:
                    raise InvalidPrompt(
                        f"continuation {number} has no token of its own behind the prompt"
                    )
        longest_tail = max(len(token_ids) for token_ids, _ in tails) + num_ends
        most_tokens = self.max_model_len - SCORED_ROOM
        # Tails may begin with the prompt's last tokens: those before the first token that is scored.
        num_prompt_tokens_in_tail = tails[0][1]
        if truncate_prompt_tokens is not None:
            most_before = most_tokens - longest_tail
            if truncate_prompt_tokens != -1:
                most_before = min(most_before, truncate_prompt_tokens - num_prompt_tokens_in_tail)
            before = before[-max(1, most_before) :]
        num_prompt_tokens = len(before) + num_prompt_tokens_in_tail
        if are_labels and len(tails) > 1:
            tails = from_first_difference(tails)
            if not before and tails[0][1] == 0:
                before = self._tokenizer.prefix  # the first token scored needs a token before it
        num_tokens = len(before) + longest_tail
        if num_tokens > most_tokens:
            raise PromptTooLong(
                f"the prompt and its longest continuation have {num_tokens} tokens; this engine "
                f"takes {most_tokens} (max_model_len={self.max_model_len}, plus one that is only scored)"
            )
        for token_ids in (before, *(token_ids for token_ids, _ in tails)):
            self.check_ids(token_ids)
        return Continued(before, tails, num_prompt_tokens)

    def _continued(
        self, prompt: object, continuations: Sequence[str | Sequence[int]], *, truncates: bool
    ) -> tuple[list[int], tuple[Tail, ...]]:
        """Return the tokens that all continuations share, and the tail of each. truncates: the prompt is cut later."""
        texts = tuple(part for part in continuations if isinstance(part, str))
        if not isinstance(prompt, str) or len(texts) < len(continuations):
            most = -1 if truncates else None
            before = self.token_ids(prompt, truncate_prompt_tokens=most, room=SCORED_ROOM)
            alone = iter(self._continuations.alone(texts))
            tails = []
            for part in continuations:
                tails.append(next(alone) if isinstance(part, str) else (tuple(part), 0))
            return before, tuple(tails)
        # The prompt's last spaces become part of each continuation.
        text = prompt.rstrip()
        spaces = prompt[len(text) :]
        texts = tuple(spaces + continuation for continuation in texts)
        if text:
            token_ids = self._tokenizer.encode(
                text, limit=None if truncates else self.max_model_len
            )
            return self._continuations.behind(text, token_ids, texts)
        # An empty prompt: the prefix stands before the texts, and is not doubled.
        prefix = self._tokenizer.prefix
        tails = []
        for tail_ids, _ in self._continuations.alone(texts):
            tails.append((_without(tail_ids, tuple(prefix)), 0))
        return prefix, tuple(tails)

    def token_ids(
        self, prompt: object, *, truncate_prompt_tokens: int | None = None, room: int = 1
    ) -> list[int]:
        """Return a text's token ids, or a checked copy of a list of token ids. Raises InvalidPrompt or PromptTooLong.

        truncate_prompt_tokens: as in SamplingParams. room: tokens of max_model_len that are kept for new tokens.
        """
        most = self.max_model_len - room
        if isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
            prompt = "".join(prompt)
        if isinstance(prompt, str):
            limit = most if truncate_prompt_tokens is None else None
            token_ids = self._tokenizer.encode(prompt, limit=limit)
        elif isinstance(prompt, (list, tuple)):
            token_ids = list(prompt)
        else:
            raise InvalidPrompt(
                f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}"
            )
        if not token_ids:
            raise InvalidPrompt("the prompt is empty; it needs at least one token")
        token_ids = self.truncated(token_ids, truncate_prompt_tokens, room)
        self._check_length("the prompt has", len(token_ids), room)
        self.check_ids(token_ids)
        return token_ids

    def check_continued(self, token_ids: Sized, continued: Collection[int]) -> None:
        """Raise InvalidPrompt or PromptTooLong for a completion that cannot go on."""
        self._check_length("prompt and completion have", len(token_ids) + len(continued), 1)
        self.check_ids(continued)

    def _check_length(self, what: str, num_tokens: int, room: int) -> None:
        most = self.max_model_len - room
        if num_tokens > most:
            less_or_more = {
                1: ", less one new token",
                SCORED_ROOM: ", plus one that is only scored",
            }
            raise PromptTooLong(
                f"{what} {num_tokens} tokens; this engine takes {most} (max_model_len={self.max_model_len}, as the "
                f"model and the KV pool allow{less_or_more.get(room, '')}): shorten it, or cut it by "
                "truncate_prompt_tokens where that is taken"
            )

    def check_ids(self, token_ids: Iterable[object]) -> None:
        """Raise InvalidPrompt for an id that is no token of the vocabulary."""
        for token_id in token_ids:
            if type(token_id) is not int:  # a bool is an int to isinstance
                raise InvalidPrompt(f"token ids must be integers, got {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise InvalidPrompt(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}"
                )

    def truncated(
        self, token_ids: list[int], truncate_prompt_tokens: int | None, room: int = 1
    ) -> list[int]:
        """Return the last truncate_prompt_tokens tokens.

        None keeps all tokens. -1 keeps the most that leave `room` tokens of max_model_len.
        """
        if truncate_prompt_tokens is None:
            return token_ids
        most = self.max_model_len - room if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        return token_ids[-most:]
