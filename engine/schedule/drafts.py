"""Drafts: guesses at a sequence's next tokens, which the step that computes them also checks.

A token depends only on the tokens before it and on its row's seed and place. So sampling behind each guess gives what
would have come without guesses. Guesses are kept up to the first one that was not sampled. Source: arXiv:2304.04487.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.schedule.sequence import Sequence

NUM_LAST = 3  # tokens by which a place is found again
MOST = 8  # tokens of a draft
# Tokens of the newer answers that are looked up. The same number of tokens of older answers stays.
MAX_ANSWERED = 1 << 16
TOKEN_BYTES = 4
# Places in a text whose bytes are those of other tokens: a stranger's may be full of them.
MAX_SKIPPED = 8
LEAST_GAIN = 0.02  # that drafts must promise, as a share of the tokens of a step without
RETRY_STEPS = 256  # each 256th step tries all guesses, whatever they promise
PLAIN_STEPS = 32  # each 32nd step has no drafts, to learn how long a step takes without
FORGETTING = 0.9  # the weight of an observation beside the next one
# A size's least seconds grow by it with each step: measurements are disturbed, and contexts grow.
GROWTH = 1.01
STEPS_OF_DOUBLE = 4  # sizes whose seconds are kept apart, between a number of rows and its double


class Drafts:
    """Guesses what followed the same last tokens in the sequence's own text, else in earlier answers.

    It drafts only if that promises more tokens a second. The promise comes from how long earlier steps took, and from
    the share of earlier guesses that were right.
    """

    def __init__(self) -> None:
        self._answered: tuple[Answers, Answers] = Answers(), Answers()  # the newer, and the older
        # A number of rows and the least seconds of such a step, by the step's size.
        self._seconds: dict[int, tuple[float, float]] = {}
        # Right and tried guesses of all sequences, the older ones with less weight. At first half of them are right.
        self._right = 1.0
        self._tried = 2.0
        self._num_steps = 0

    def choose(
        self, seqs: list[Sequence], token_ids: Iterable[NDArray[np.int32]], most: int
    ) -> list[list[int]]:
        """Return guesses for each sequence, at most `most` in all. token_ids: [tokens], each sequence's known tokens.

        A guess is worth its cost while it is likely to yield more tokens than its row's time would yield otherwise.
        """
        self._num_steps += 1
        if self._num_steps % PLAIN_STEPS == 1:
            return [[] for _ in seqs]
        costs = self._costs(len(seqs), most)
        tries_all = self._num_steps % RETRY_STEPS == 0
        cheapest = 0.0  # the least cost of one guess, in tokens
        if not tries_all:
            cheapest = float((costs[1:] / np.arange(1, most + 1)).min(initial=np.inf))
        shares = np.array([self._share(seq) for seq in seqs])
        guesses = [
            self._guess(seq, ids) if share > cheapest else []
            for seq, ids, share in zip(seqs, token_ids, shares.tolist(), strict=True)
        ]
        lens = np.array([len(guess) for guess in guesses])
        # [seqs, MOST]: the probability that a guess and all before it are right; 0 where there is no guess.
        likely = shares[:, None] ** np.arange(1, MOST + 1)
        likely[np.arange(MOST) >= lens[:, None]] = 0
        likeliest_first = np.sort(likely[likely > 0])[::-1][:most]
        gains = np.cumsum(likeliest_first) - costs[1 : len(likeliest_first) + 1]
        num_taken = len(likeliest_first)
        if num_taken and not tries_all:
            num_taken = int(gains.argmax()) + 1
        if not num_taken:
            return [[] for _ in seqs]
        if not tries_all and gains[num_taken - 1] <= LEAST_GAIN * len(seqs):
            return [[] for _ in seqs]
        least_likely = likeliest_first[num_taken - 1]
        counts = np.minimum((likely >= least_likely).sum(axis=1), lens)
        return [guess[:count] for guess, count in zip(guesses, counts.tolist(), strict=True)]

    def count(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        """Learn how many of a sequence's guesses were right."""
        num_tried = min(num_right + 1, num_guesses)  # behind a wrong guess, the others say nothing
        right, tried = seq.drafts or (self._right, self._tried)
        seq.drafts = FORGETTING * right + num_right, FORGETTING * tried + num_tried
        self._right = FORGETTING * self._right + num_right
        self._tried = FORGETTING * self._tried + num_tried

    def timed(self, num_rows: int, seconds: float) -> None:
        """Learn how long a step took. num_rows: the rows of the step, all of which sampled."""
        size = round(STEPS_OF_DOUBLE * float(np.log2(num_rows)))
        _, least = self._seconds.get(size, (num_rows, seconds))
        self._seconds[size] = num_rows, min(seconds, least * GROWTH)

    def learn(self, finished: list[Sequence]) -> None:
        """Learn the answers of finished sequences."""
        newer, _ = self._answered
        if len(newer.token_ids) > MAX_ANSWERED:  # they become the older ones
            self._answered = Answers(), newer
        for seq in finished:
            self._answered[0].add(seq.generated_token_ids)

    def _guess(self, seq: Sequence, token_ids: NDArray[np.int32]) -> list[int]:
        """Return the tokens that followed the sequence's last tokens where these stood before; [] if nowhere."""
        most = min(MOST, seq.max_len - len(token_ids) - 1)
        text = token_ids[:-1].tobytes()
        last = token_ids[-NUM_LAST:].tobytes()
        at_byte = text.rfind(last)
        for _ in range(MAX_SKIPPED):
            if at_byte > 0 and at_byte % TOKEN_BYTES:  # not where a token begins: look further back
                at_byte = text.rfind(last, 0, at_byte + len(last) - 1)
        if at_byte >= 0 and at_byte % TOKEN_BYTES == 0:
            start = at_byte // TOKEN_BYTES + NUM_LAST
            repeated: list[int] = token_ids[start : start + most].tolist()
            return repeated
        for answers in self._answered:
            guesses = answers.behind(last, most)
            if guesses:
                return guesses
        return []

    def _share(self, seq: Sequence) -> float:
        right, tried = seq.drafts or (self._right, self._tried)
        return right / tried

    def _costs(self, num_rows: int, most: int) -> NDArray[np.float64]:
        """Return [most + 1] float64: what 0 to `most` rows of guesses cost, each as a number of tokens.

        The cost is the number of tokens that steps of num_rows rows without guesses yield in the additional time.
        """
        known = np.array(sorted(self._seconds.values()) or [(1, 1.0)])
        seconds = np.interp(num_rows + np.arange(most + 1), known[:, 0], known[:, 1])
        costs: NDArray[np.float64] = num_rows * (seconds / seconds[0] - 1)
        return costs


class Drafted(NamedTuple):
    """A sequence that is computed with guesses behind its last token, and the Drafts that made the guesses."""

    seq: Sequence
    guesses: list[int]
    drafts: Drafts


class Answers:
    """The tokens of answers, one answer behind another. They are looked up by NUM_LAST tokens in a row."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        # The index of the token behind NUM_LAST tokens, by their bytes.
        self._behind: dict[bytes, int] = {}

    def add(self, token_ids: list[int]) -> None:
        """Add an answer."""
        start = len(self.token_ids)
        self.token_ids += token_ids
        text = np.array(token_ids, np.int32).tobytes()
        size = NUM_LAST * TOKEN_BYTES
        for i in range(len(token_ids) - NUM_LAST):
            at_byte = i * TOKEN_BYTES
            last = text[at_byte : at_byte + size]
            self._behind[last] = start + i + NUM_LAST

    def behind(self, last: bytes, most: int) -> list[int]:
        """Return up to `most` tokens that followed the tokens `last`; [] if there are none."""
        place = self._behind.get(last)
        return [] if place is None else self.token_ids[place : place + most]
