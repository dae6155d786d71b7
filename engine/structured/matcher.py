"""Matcher: follows one completion through its grammar, and says which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarFailed
from engine.sampling.logit_edits import WORD, token_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MASK_S = 2.0  # for one token: a grammar that takes longer would hold up all other rows
CHUNK = 64  # masks that a thread computes in one call of the pool: they take some microseconds each


@dataclass(frozen=True)
class Vocabulary:
    """What matchers of one tokenizer share.

    num_words: of a mask. eos_mask: [num_words] int32, the tokens that end a text. without_text: ids that
    stand for no text. encode: text to token ids, of which the text can be made again. is_canonical: whether
    a text's tokens are the same whoever splits it, so that text which must come has tokens that must come.
    """

    num_words: int
    eos_mask: NDArray[np.int32]
    without_text: frozenset[int]
    encode: Callable[[str], list[int]]
    is_canonical: bool


class Matcher:
    """The state of a grammar behind the tokens that are known.

    Masks may be computed in another thread, and nothing else meanwhile. A sequence that is preempted keeps
    its known tokens, and so this its state.
    """

    __slots__ = (
        "_allowed", "_ends", "_fresh", "_lock", "_machine", "_vocabulary",
        "end_mask", "error", "may_end", "pool",
    )  # fmt: skip

    def __init__(
        self,
        machine: LLMatcher,
        fresh: LLMatcher,
        vocabulary: Vocabulary,
        pool: Executor,
        end_token_ids: frozenset[int],
        allowed: NDArray[np.int32] | None,
    ) -> None:
        """machine: at the text's beginning, this matcher's own. fresh: the same, of the grammar."""
        self._machine, self._fresh, self._vocabulary, self.pool = machine, fresh, vocabulary, pool
        self._ends = end_token_ids & vocabulary.without_text
        ends = [token_id for token_id in self._ends if token_id < vocabulary.num_words * WORD]
        self.end_mask = token_mask(ends, vocabulary.num_words * WORD)
        self._allowed = allowed
        self._lock = Lock()
        self.error: str | None = None
        #: Whether what is known so far is a whole text of the grammar.
        self.may_end = bool(machine.is_accepting())

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self._vocabulary.num_words

    @property
    def must_end(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return self.may_end and bool(self._machine.is_stopped())

    def accept(self, token_id: int) -> None:
        """Learn the next token. Raises GrammarFailed for one that cannot stand there, and for a negative one.

        A token that ends the completion and stands for no text changes nothing.
        """
        if token_id in self._ends:
            return
        if token_id < 0:
            raise GrammarFailed(self.error or "no token is left that it allows")
        with self._lock:
            if not self._machine.consume_token(token_id):
                raise GrammarFailed(_reason(self._machine) or f"token {token_id} cannot stand there")
            self.may_end = bool(self._machine.is_accepting())

    def accepts(self, text: str) -> bool:
        """Whether a text is a whole one of the grammar, whatever is known so far."""
        machine = self._fresh.deep_copy()
        return bool(machine.consume_tokens(self._vocabulary.encode(text)) and machine.is_accepting())

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever is sampled; [] where one of several may, or the end."""
        if not self._vocabulary.is_canonical or self.error is not None:
            return []
        with self._lock:
            try:
                return list(self._machine.compute_ff_tokens())
            except Exception as error:  # noqa: BLE001 - what a grammar makes it raise is the end of its row
                self.error = str(error)
                return []

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that may come next: [num_words] int32, contiguous, of zeros.

        Tokens that end the completion are in it where the text may end. Where it leaves none, `error` may say
        why; `accept` of the token that is then missing raises.
        """
        with self._lock:
            start = time.monotonic()
            try:
                self._machine.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            except Exception as error:  # noqa: BLE001 - what a grammar makes it raise is the end of its row
                self.error = str(error)
            if self._machine.is_error():
                self.error = _reason(self._machine)
            elif (took_s := time.monotonic() - start) > MAX_MASK_S:
                self.error = f"its next token takes too long to find ({took_s:.1f} s)"
            if self.error is not None:
                mask[:] = 0
                return
        mask &= ~self._vocabulary.eos_mask
        if self.may_end:
            mask |= self.end_mask
        if self._allowed is not None:
            mask[: len(self._allowed)] &= self._allowed


def _reason(machine: LLMatcher) -> str:
    """What llguidance says of its error, on one line."""
    return " ".join(machine.get_error().replace("<non-verbose/>", "").split())


@dataclass(frozen=True)
class MaskFilling:
    """Masks that are being computed."""

    parts: list[Future[None]]

    def wait(self) -> None:
        """Until all are there."""
        for part in self.parts:
            part.result()


def fill_masks(matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> MaskFilling:
    """Begin to compute the mask of each in other threads. masks: [matchers, num_words] int32, of zeros."""
    pool = matchers[0].pool
    return MaskFilling(
        [
            pool.submit(_fill_some, matchers[start : start + CHUNK], masks[start : start + CHUNK])
            for start in range(0, len(matchers), CHUNK)
        ]
    )


def _fill_some(matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.fill(mask)
