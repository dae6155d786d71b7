"""Reasoner: what a model's tokenizer and template say of its reasoning spans."""

from collections.abc import Sequence
from functools import lru_cache, partial

from engine.errors import InvalidSampling
from engine.text.reasoning import Mark, Marks, Span, ThinkingBudget, find_known, span_at_end, split
from engine.text.tokenizer import Tokenizer


class Reasoner:
    """Closes spans that are too long, and parts reasoning from answers.

    vocab_size: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known = find_known(tokenizer.added_tokens, tokenizer.template)
        self._marks_of = lru_cache(maxsize=64)(self._read_marks)

    def budget(
        self, budget: int | None, named: Sequence[str], prompt: list[int], follows_text: bool
    ) -> ThinkingBudget | None:
        """Return what holds one completion to its budget of tokens; None without a budget.

        named: the marks, () for the model's own. follows_text: as of Tokenizer.decode. Raises InvalidSampling
        if there are no marks.
        """
        if budget is None:
            return None
        marks = self._marks_of(tuple(named))
        if marks is None:
            raise InvalidSampling(
                "thinking_token_budget needs the marks of a reasoning span, and this model's template and "
                "special tokens name none: give reasoning_marks"
            )
        if max(marks.end.token_ids) >= self._vocab_size:
            raise InvalidSampling(
                f"the mark {marks.end.text!r} is no token of this model: give reasoning_marks"
            )
        text = partial(self._tokenizer.incremental_text, follows_text=follows_text)
        return ThinkingBudget(budget, marks, self._span_after(prompt, marks), text)

    def split(
        self, text: str, named: Sequence[str], prompt: list[int], token_ids: list[int], follows_text: bool
    ) -> tuple[str | None, str]:
        """Split a completion's text into its reasoning (or None) and the rest.

        token_ids: of the completion. named, follows_text: as of `budget`.
        """
        marks = self._marks_of(tuple(named))
        if marks is None:
            return None, text
        for mark in (marks.end, marks.start):
            if mark.is_hidden and mark.token_id in token_ids and mark.text not in text:
                before = token_ids[: token_ids.index(mark.token_id)]
                place = len(self._tokenizer.decode(before, follows_text=follows_text))
                text = text[:place] + mark.text + text[place:] if place <= len(text) else text
        return split(text, marks, self._span_after(prompt, marks))

    def _span_after(self, prompt: list[int], marks: Marks) -> Span:
        longest = max(len(marks.start.token_ids), len(marks.end.token_ids)) + MAX_BLANKS
        return span_at_end(self._tokenizer.decode_all(prompt[-longest:]), marks)

    def _read_marks(self, named: tuple[str, ...]) -> Marks | None:
        texts = named or self._known
        return None if texts is None else Marks(*map(self._mark, texts))

    def _mark(self, text: str) -> Mark:
        token = self._tokenizer.added_tokens.get(text)
        if token is None:
            return Mark(text, tuple(self._tokenizer.encode_behind(text)))
        return Mark(text, (token.token_id,), token.token_id, token.is_special)


#: Tokens of spaces and line breaks that a template may write behind a mark.
MAX_BLANKS = 8
