"""Sampling values that hold several: stop strings, words, token ids, biases. Each as a tuple, or a mapping,
that nobody changes and that can be a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from engine.errors import InvalidSampling
from engine.sampling.parameters.ranges import TOKEN_ID, Range, brief

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 1024
MAX_MARK_CHARS = 64
MAX_DIGITS = 10  # of a token id
BIAS = Range(-100, 100, integer=False)


class TokenBias(Mapping[int, float]):
    """What to add to the logits of some tokens: token id to number, ascending by id. Nobody changes it."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = {token_id: biases[token_id] for token_id in sorted(biases)}

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(tuple(self._biases.items()))

    def __repr__(self) -> str:
        return f"TokenBias({self._biases!r})"


def stop_strings(stop: object) -> tuple[str, ...]:
    """One string or several. Raises InvalidSampling."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
        raise InvalidSampling("stop must be a string or a list of strings", brief(stop))
    return _texts(stop, "stop", "a stop string", MAX_STOPS)


def reasoning_marks(marks: object) -> tuple[str, ...]:
    """None, or two. Raises InvalidSampling."""
    if not isinstance(marks, (list, tuple)) or not all(isinstance(text, str) for text in marks):
        raise InvalidSampling("reasoning_marks must be a list of two texts", brief(marks))
    if marks and (len(marks) != 2 or marks[0] == marks[1]):
        raise InvalidSampling("reasoning_marks must be two texts that differ", brief(marks))
    for text in marks:
        if not 0 < len(text) <= MAX_MARK_CHARS or text != text.strip() or "\ufffd" in text:
            raise InvalidSampling(
                f"a reasoning mark must have 1 to {MAX_MARK_CHARS} characters, without blanks around them",
                brief(text),
            )
    return _texts(marks, "reasoning_marks", "a reasoning mark", 2)


def stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """Check stop token ids and return them in their order. Raises InvalidSampling."""
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidSampling("stop_token_ids must be a list of token ids", brief(token_ids))
    if len(token_ids) > MAX_STOPS:
        raise InvalidSampling(f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOPS} are allowed")
    for token_id in token_ids:
        TOKEN_ID.check("stop_token_ids", token_id)
    return tuple(token_ids)


def bad_words(words: object) -> tuple[str, ...]:
    """Each once; none for None. Raises InvalidSampling."""
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)) or not all(isinstance(text, str) for text in words):
        raise InvalidSampling("bad_words must be a list of strings", brief(words))
    return tuple(dict.fromkeys(_texts(words, "bad_words", "a bad word", MAX_BAD_WORDS)))


def allowed_token_ids(token_ids: object) -> tuple[int, ...] | None:
    """Ascending, each once; None for None. Raises InvalidSampling."""
    if token_ids is None:
        return None
    if not isinstance(token_ids, (list, tuple, range)):
        raise InvalidSampling("allowed_token_ids must be a list of token ids", brief(token_ids))
    if not token_ids:
        raise InvalidSampling("allowed_token_ids is empty, so that no token could be chosen; leave it out")
    if set(map(type, token_ids)) != {int}:
        for token_id in token_ids:
            TOKEN_ID.check("allowed_token_ids", token_id)
    return _ascending(tuple(token_ids))


@lru_cache(maxsize=16)  # rows of a run name the same ids again and again, perhaps all of a vocabulary
def _ascending(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    ordered = tuple(sorted(set(token_ids)))
    for token_id in (ordered[0], ordered[-1]):
        TOKEN_ID.check("allowed_token_ids", token_id)
    return ordered


def logit_bias(biases: object) -> TokenBias | None:
    """Token ids, also as the text that they are as JSON's keys, to numbers; None for None or for none.

    Raises InvalidSampling.
    """
    if biases is None or isinstance(biases, TokenBias):
        return biases or None
    if not isinstance(biases, Mapping):
        raise InvalidSampling("logit_bias must be a mapping of token ids to numbers", brief(biases))
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = _token_id(key)
        if token_id in checked:
            raise InvalidSampling(f"logit_bias names token id {token_id} twice")
        BIAS.check("a bias of logit_bias", bias)
        checked[token_id] = float(bias)
    return TokenBias(checked) if checked else None


def _token_id(key: object) -> int:
    """A key of logit_bias: an integer, or digits."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS:
        key = int(key)
    if type(key) is not int:
        raise InvalidSampling("a key of logit_bias must be a token id", brief(key))
    TOKEN_ID.check("a key of logit_bias", key)
    return key


def _texts(texts: list[str] | tuple[str, ...], name: str, what: str, most: int) -> tuple[str, ...]:
    if len(texts) > most:
        raise InvalidSampling(f"{name} holds {len(texts)} strings; at most {most} are allowed")
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidSampling(f"{what} must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"{what} is no valid Unicode: it holds half of a surrogate pair"
            raise InvalidSampling(problem) from None
    return tuple(texts)
