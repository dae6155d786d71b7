"""Matcher: follows a completion through its grammar: masks of a step, and forced tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarFailed
from engine.sampling.logit_edits import WORD, token_mask
from engine.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


# A mask of fewer tokens takes some microseconds, less than it takes to wake threads.
SMALL_VOCABULARY = 32_768
MAX_THREADS = 4


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer that its matchers share.

    num_words: the words of 32 bits in a mask. eos_words: int64, the places of the words that have tokens that end a
    text. eos_bits: int32, for each of these words, the bits of these tokens. without_text: ids that stand for no text.
    encode: makes token ids of a text. is_canonical: if the next text is certain, so are its tokens.
    executor: llguidance's threads; None for a small vocabulary.
    """

    num_words: int
    eos_words: NDArray[np.int64]
    eos_bits: NDArray[np.int32]
    without_text: frozenset[int]
    encode: Callable[[str], list[int]]
    is_canonical: bool
    executor: LLExecutor | None

    @classmethod
    def of(cls, tokenizer: LLTokenizer) -> Vocabulary:
        """Make the vocabulary of a tokenizer."""
        from llguidance import LLExecutor

        num_words = -(-tokenizer.vocab_size // WORD)
        is_small = tokenizer.vocab_size < SMALL_VOCABULARY
        special = (i for i in range(tokenizer.vocab_size) if tokenizer.is_special_token(i))
        eos_mask = token_mask(tokenizer.eos_tokens, num_words * WORD)
        eos_words = np.flatnonzero(eos_mask)
        return cls(
            num_words=num_words,
            eos_words=eos_words,
            eos_bits=eos_mask[eos_words],
            without_text=frozenset((*special, *tokenizer.eos_tokens)),
            encode=tokenizer.tokenize_str,
            is_canonical=bool(tokenizer.is_canonical),
            executor=None if is_small else LLExecutor(min(MAX_THREADS, os.cpu_count() or 1)),
        )


class Matcher:
    """Follows one completion through its grammar, up to the last token known. Preemption does not change its state."""

    def __init__(
        self,
        machine: LLMatcher,
        fresh: LLMatcher,
        vocabulary: Vocabulary,
        end_token_ids: frozenset[int],
        allowed: NDArray[np.int32] | None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """machine: llguidance's state of this completion, at its beginning. Each token moves it.

        fresh: the grammar's own state, which stays at the beginning; `accepts` copies it. end_token_ids: every id that
        ends the completion. allowed: a mask of the tokens allowed, [words] int32; None for all tokens.
        forget: called when the machine fails: a grammar's copies share one lexer, so later rows need a new grammar.
        """
        self._forget = forget
        self.machine = machine
        self._fresh = fresh
        self.vocabulary = vocabulary
        self._ends = end_token_ids & vocabulary.without_text
        ends = [token_id for token_id in self._ends if token_id < vocabulary.num_words * WORD]
        #: [words] int32, the tokens that end the completion and stand for no text.
        self.end_mask = token_mask(ends, vocabulary.num_words * WORD)
        self.allowed = allowed
        self.error: str | None = None
        #: Whether this matcher's mask may be the one that took too long in an earlier step.
        self.is_suspect = False

    @property
    def may_end(self) -> bool:
        """Whether the known text is a whole text of the grammar."""
        return bool(self.machine.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return bool(self.machine.is_stopped() and self.machine.is_accepting())

    def accept(self, token_id: int) -> None:
        """Learn the next token. A token that ends the completion and stands for no text changes nothing.

        Raises GrammarFailed for a token that cannot stand there, for a negative id, which says that no token was
        allowed, and for any token once the matcher has failed.
        """
        if token_id < 0 or self.error is not None:
            # A matcher that has failed may still be given a guessed token, whose mask was made before.
            raise GrammarFailed(self.error or "no token is left that it allows")
        if token_id in self._ends:
            return
        if not self.machine.consume_token(token_id):
            self._forget()
            raise GrammarFailed(self.machine_error() or f"token {token_id} cannot stand there")

    def accepts(self, text: str) -> bool:
        """Whether a text is a whole text of the grammar."""
        machine = self._fresh.deep_copy()
        return bool(machine.consume_tokens(self.vocabulary.encode(text)) and machine.is_accepting())

    def forced(self) -> list[int]:
        """Return the tokens that must come next; [] if there is a choice or the end."""
        if self.error is not None:
            return []
        try:
            return self.machine.compute_ff_tokens()
        except Exception as error:  # noqa: BLE001 - a grammar may make llguidance raise anything: only its row ends
            self.fail(str(error))
            return []

    def fail(self, error: str) -> None:
        """Let no token follow: the row ends with this error."""
        self.error = error
        self._forget()

    def num_possible(self, guesses: list[int]) -> int:
        """Return how many of these tokens, one behind another, may come next. One that ends the text does not count."""
        if self.is_suspect:
            return 0
        before_end = list(takewhile(lambda token_id: token_id not in self._ends, guesses))
        return self.machine.validate_tokens(before_end)

    def along(self, guesses: list[int]) -> list[Matcher]:
        """Return this matcher, and for each of these tokens a copy that has accepted the tokens up to this one.

        guesses: tokens that may all come next, one behind another.
        """
        matchers = [self]
        for token_id in guesses:
            following = copy(matchers[-1])
            following.machine = following.machine.deep_copy()
            following.machine.consume_token(token_id)
            matchers.append(following)
        return matchers

    def machine_error(self) -> str:
        """llguidance's own error, on one line; empty if there is none."""
        return " ".join(self.machine.get_error().replace("<non-verbose/>", "").split())


MAX_MASK_S = 2.0  # for one token: a grammar that takes longer would hold up all other rows


def fill_masks(
    matchers: Sequence[Matcher], masks: NDArray[np.int32], *, one_by_one: bool = False
) -> None:
    """Write each matcher's mask of the tokens that may come next: [matchers, num_words] int32, contiguous.

    End tokens are in a mask if the text may end. If a mask leaves no token, the next id is negative, and `accept`
    raises for it. matchers: they share one vocabulary.
    one_by_one: compute one mask after another, as for a small vocabulary; else the masks of a large vocabulary are
    computed side by side. One after another, a mask that takes longer than MAX_MASK_S fails its matcher.
    """
    vocabulary = matchers[0].vocabulary
    address = masks.ctypes.data
    num_bytes = masks.strides[0]
    if vocabulary.executor is not None and not one_by_one:
        machines = [(matcher.machine, row) for row, matcher in enumerate(matchers)]
        vocabulary.executor.unsafe_compute_mask_ptr(machines, address, num_bytes, len(masks))
    else:
        start = time.monotonic()
        for row, matcher in enumerate(matchers):
            matcher.machine.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
            end = time.monotonic()
            if end - start > MAX_MASK_S:
                matcher.error = f"its next token takes too long to find ({end - start:.1f} s)"
            start = end
    words = vocabulary.eos_words
    bits = vocabulary.eos_bits
    has_eos = (masks[:, words] & bits).any(axis=1)
    masks[:, words] &= ~bits
    for row in np.flatnonzero(has_eos).tolist():
        matcher = matchers[row]
        if matcher.may_end:
            masks[row] |= matcher.end_mask
            continue
        error = matcher.machine_error()
        if error:  # after an error llguidance allows only the end
            matcher.fail(error)
    for row, matcher in enumerate(matchers):
        if matcher.error is not None:
            masks[row] = 0
        elif matcher.allowed is not None:
            masks[row, : len(matcher.allowed)] &= matcher.allowed


def fill_step_masks(matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
    """Write the masks of a step. If they take too long, later ones are made one by one, to find the slow matcher."""
    start = time.monotonic()
    fill_masks(matchers, masks, one_by_one=any(matcher.is_suspect for matcher in matchers))
    if time.monotonic() - start > MAX_MASK_S:
        for matcher in matchers:
            matcher.is_suspect = True


# A single token is left to the mask: as a chunk it would cost the step more than it saves.
MIN_TOKENS = 2


class JumpAhead:
    """Says which tokens a grammar forces in one sequence: a Forcing of engine.schedule."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    @classmethod
    def of(cls, matcher: Matcher, params: SamplingParams) -> JumpAhead | None:
        """Return a matcher's JumpAhead, or None if tokens must not be forced.

        They must not if the vocabulary leaves open which they are, if a forced token may be banned, or if log
        probabilities are wanted.
        """
        if not matcher.vocabulary.is_canonical:
            return None
        may_ban = params.bad_words or params.allowed_token_ids is not None or params.min_tokens
        if may_ban or params.logprobs is not None:
            return None
        return cls(matcher)

    def first(self) -> list[int]:
        token_ids = self._matcher.forced()
        return token_ids if len(token_ids) >= MIN_TOKENS else []

    def after(self, token_id: int, num_left: int) -> list[int]:
        return [] if num_left else self.first()
