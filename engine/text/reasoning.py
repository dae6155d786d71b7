"""Reasoning spans: text that a model writes between two marks before its answer.

The marks are the model's or the request's. A span opens with the first mark, or with a prompt that ends with it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache, partial

from engine.errors import InvalidSampling
from engine.text import harmony
from engine.text.chat_templates import REASONING_MARKS
from engine.text.stop_strings import IncrementalText
from engine.text.tokenizer import Tokenizer

# Tokens of a prompt's end in which the open header of a channel's message is looked for.
MAX_HEADER = 64
MAX_BLANKS = 8  # tokens of spaces and line breaks that a template may write behind a mark


@dataclass(frozen=True)
class Mark:
    """A mark's text, and the tokens that write it.

    token_id: the only token that counts as the mark, as other tokens that spell it are text; None if any tokens may
    write the mark.
    is_hidden: the texts of completions leave it out.
    """

    text: str
    token_ids: tuple[int, ...]
    token_id: int | None = None
    is_hidden: bool = False


@dataclass(frozen=True)
class Marks:
    """The mark that opens a span, and the one that closes it."""

    start: Mark
    end: Mark


class Span(Enum):
    """The state of the span at the end of a prompt."""

    NONE = auto()
    OPEN = auto()
    CLOSED = auto()  # the template has written an empty span: the model is not to reason


def find_known(added_tokens: Iterable[str], template: str | None) -> tuple[str, str] | None:
    """Find the pair of marks among the added tokens, else in the template; None without such a pair."""
    for place in (frozenset(added_tokens), template or ""):
        for start, end in REASONING_MARKS:
            if start in place and end in place:
                return start, end
    return None


def span_at_end(text: str, marks: Marks) -> Span:
    """Return the span's state at the end of this text."""
    text = text.rstrip()
    if text.endswith(marks.end.text):
        return Span.CLOSED
    return Span.OPEN if text.endswith(marks.start.text) else Span.NONE


def split(text: str, marks: Marks, span: Span) -> tuple[str | None, str]:
    """Split a completion's text into its reasoning (None if there is none) and the rest.

    Line breaks beside the marks belong to neither. A start mark in the middle counts only if its span is closed; an
    end mark without a start mark closes a span that began before the text.
    """
    if span is Span.CLOSED:
        return None, text
    start = marks.start.text
    end = marks.end.text
    before, opened, rest = text.partition(start)
    if span is Span.OPEN:
        if not opened or before.strip():
            rest = text
        before = ""
    elif opened and end not in before:
        is_in_middle = before.strip() != ""
        if is_in_middle and end not in rest:
            return None, text
    elif end in text:
        # The span began before the text.
        before = ""
        rest = text
    else:
        return None, text
    inner, _, after = rest.partition(end)
    if not before.strip():
        before = ""
        after = after.lstrip("\n")
    return inner.strip("\n"), before + after


class ThinkingBudget:
    """Closes a span of reasoning once it has `budget` tokens: a Forcing of engine.schedule.

    budget: the most tokens between the marks. text: makes the text of tokens; it is needed if a mark is not one token.
    """

    def __init__(
        self, budget: int, marks: Marks, span: Span, text: Callable[[], IncrementalText]
    ) -> None:
        self._budget = budget
        self._marks = marks
        needs_text = marks.start.token_id is None or marks.end.token_id is None
        self._text = text() if needs_text else None
        self._tail = ""
        self._budget_left: int | None = budget if span is Span.OPEN else None  # None outside a span

    def first(self) -> tuple[int, ...]:
        return self._marks.end.token_ids if self._budget_left == 0 else ()

    def after(self, token_id: int, num_left: int) -> tuple[int, ...]:
        if self._text is not None:
            longest = max(len(self._marks.start.text), len(self._marks.end.text))
            self._tail = self._tail[-longest:] + self._text.add(token_id)
        if num_left:  # some tokens of a forced end mark are still to come
            return ()
        if self._budget_left == 0:  # this token was the last one of the forced end mark
            self._budget_left = None
            self._tail = ""
        elif self._budget_left is None:
            if self._completes(self._marks.start, token_id):
                self._budget_left = self._budget
                self._tail = ""
        elif self._completes(self._marks.end, token_id):
            self._budget_left = None
            self._tail = ""
        else:
            self._budget_left -= 1
        return self.first()

    def _completes(self, mark: Mark, token_id: int) -> bool:
        if mark.token_id is not None:
            return token_id == mark.token_id
        return mark.text in self._tail


class LeadingSpan:
    """Tells the answer from the reasoning span that a completion begins with, token by token.

    A span that opens later, behind other text, is part of the answer.
    """

    def __init__(self, marks: Marks, span: Span) -> None:
        self._marks = marks
        self._is_open = span is Span.OPEN
        self._is_over = span is Span.CLOSED
        # The end mark has come, but no answer yet: line breaks between the two are no part of the answer.
        self._is_behind = False
        self._held = ""

    def answer_part(self, token_id: int, text: str) -> str:
        """Return the part of this token's text that belongs to the answer, after text that was held back."""
        if self._is_over:
            return text
        self._held += text
        if not self._is_open and not self._is_behind:
            return self._before(token_id)
        if self._is_open:
            self._close(token_id)
        if self._is_behind:
            self._held = self._held.lstrip("\n")
            self._is_over = bool(self._held)
            return self._held
        return ""

    def _before(self, token_id: int) -> str:
        """Look for the start mark. Return the text held back once it shows that there is none."""
        start = self._marks.start
        begun = self._held.lstrip()
        is_mark = begun.startswith(start.text)
        if start.token_id is not None:
            is_mark = token_id == start.token_id
        if is_mark:
            self._is_open = True
            self._held = begun.removeprefix(start.text)
            self._close(token_id)
            return ""
        if begun and start.token_id is None and start.text.startswith(begun):
            return ""
        released = self._held
        self._held = ""
        self._is_over = bool(begun)
        return released

    def _close(self, token_id: int) -> None:
        end = self._marks.end
        if end.token_id is None:
            _, mark, behind = self._held.partition(end.text)
            is_closed = bool(mark)
        else:
            is_closed = token_id == end.token_id
            behind = ""
        if is_closed:
            self._is_open = False
            self._is_behind = True
            self._held = behind
        else:
            # The end mark may have begun here.
            self._held = self._held[-len(end.text) :]


class Reasoner:
    """Closes spans that are too long, and splits reasoning from answers."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known = find_known(tokenizer.added_tokens, tokenizer.template)
        added = tokenizer.added_tokens
        has_channels = harmony.CHANNEL in added and harmony.MESSAGE in added
        self._channels = (
            {added[mark].token_id: mark for mark in harmony.MARKS if mark in added}
            if has_channels
            else {}
        )
        self._marks_of = lru_cache(maxsize=64)(self._read_marks)

    def budget(
        self, budget: int, mark_texts: Sequence[str], prompt: list[int], follows_text: bool
    ) -> ThinkingBudget:
        """Return the ThinkingBudget of one completion.

        mark_texts: the texts of the marks, () for the model's own marks. follows_text: as in Tokenizer.decode.
        Raises InvalidSampling if there are no marks.
        """
        marks = (
            self._analysis()
            if self._channels and not mark_texts
            else self._marks_of(tuple(mark_texts))
        )
        if marks is None:
            raise InvalidSampling(
                "thinking_token_budget needs the marks of a reasoning span, and this model's template and "
                "special tokens name none: give reasoning_marks"
            )
        if max(marks.end.token_ids) >= self._vocab_size:
            raise InvalidSampling(
                f"the mark {marks.end.text!r} is no token of this model: give reasoning_marks"
            )
        # The marks of channels are special tokens, so the text to search must have these.
        has_channel_marks = marks.start.text == harmony.REASONING_START
        text = partial(
            self._tokenizer.incremental_text,
            follows_text=follows_text,
            skip_special_tokens=not has_channel_marks,
        )
        return ThinkingBudget(budget, marks, self._span_after(prompt, marks), text)

    def answer_span(
        self, mark_texts: Sequence[str], prompt: list[int], stop: Sequence[str]
    ) -> LeadingSpan | harmony.AnswerChannels | None:
        """Return an object that tells a completion's answer from its reasoning, for stop strings.

        Returns None if the model has no marks, or if a stop string holds the end mark: then stop strings count in the
        reasoning too.
        """
        if self._channels and not mark_texts:
            return harmony.AnswerChannels(self._channels, self._open_header(prompt))
        marks = self._marks_of(tuple(mark_texts))
        if marks is None or any(marks.end.text in text for text in stop):
            return None
        return LeadingSpan(marks, self._span_after(prompt, marks))

    def marks(self, mark_texts: Sequence[str]) -> dict[int, str]:
        """Return the texts, by token id, of the marks that are tokens. mark_texts: as in `budget`."""
        if self._channels and not mark_texts:
            return self._channels
        marks = self._marks_of(tuple(mark_texts))
        both = () if marks is None else (marks.start, marks.end)
        return {mark.token_id: mark.text for mark in both if mark.token_id is not None}

    def pair(self, mark_texts: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of the marks around a span, () if there are none. mark_texts: as in `budget`."""
        if self._channels and not mark_texts:
            return harmony.MARKS
        marks = self._marks_of(tuple(mark_texts))
        return () if marks is None else (marks.start.text, marks.end.text)

    def is_answer(self, mark_texts: Sequence[str], prompt: list[int]) -> bool:
        """Whether a completion is all answer, as the prompt ends with a closed span. mark_texts: as in `budget`."""
        if self._channels and not mark_texts:
            return False
        marks = self._marks_of(tuple(mark_texts))
        return marks is not None and self._span_after(prompt, marks) is Span.CLOSED

    def split(
        self, text: str, mark_texts: Sequence[str], prompt: list[int]
    ) -> tuple[str | None, str]:
        """Split a completion's text into its reasoning (or None) and the rest.

        text: as `with_marks` returns it, so that marks which are tokens are told from text that spells them.
        mark_texts: as in `budget`.
        """
        if self._channels and not mark_texts:
            header = self._open_header(prompt)
            if harmony.MESSAGE in text or header.endswith(harmony.MESSAGE):
                text = header + text
            return harmony.split_channels(text)
        marks = self._marks_of(tuple(mark_texts))
        return (
            (None, text) if marks is None else split(text, marks, self._span_after(prompt, marks))
        )

    def without_hidden(self, text: str, mark_texts: Sequence[str]) -> str:
        """Take the marks that completions leave out from a text that has been split. mark_texts: as in `budget`."""
        marks = None if self._channels and not mark_texts else self._marks_of(tuple(mark_texts))
        for mark in () if marks is None else (marks.start, marks.end):
            if mark.is_hidden:
                text = text.replace(mark.text, "")
        return text

    def _open_header(self, prompt: list[int]) -> str:
        return harmony.open_header(
            self._tokenizer.decode(prompt[-MAX_HEADER:], skip_special_tokens=False)
        )

    def _analysis(self) -> Marks:
        """Return the marks of reasoning for a model with channels.

        The end mark has more tokens than its text: if it is forced, its tokens also open the answer.
        """
        start_ids = self._tokenizer.encode_behind(harmony.REASONING_START)
        end_ids = self._tokenizer.encode_behind(harmony.ANSWER_START)
        start = Mark(harmony.REASONING_START, tuple(start_ids))
        return Marks(start, Mark(harmony.END, tuple(end_ids)))

    def _span_after(self, prompt: list[int], marks: Marks) -> Span:
        longest = max(len(marks.start.token_ids), len(marks.end.token_ids)) + MAX_BLANKS
        span = span_at_end(
            self._tokenizer.decode(prompt[-longest:], skip_special_tokens=False), marks
        )
        last_mark = {Span.OPEN: marks.start, Span.CLOSED: marks.end}.get(span)
        if last_mark is None or last_mark.token_id is None:
            return span
        # If the mark is one token, the same text in other tokens is no mark.
        return span if last_mark.token_id in prompt[-longest:] else Span.NONE

    def _read_marks(self, mark_texts: tuple[str, ...]) -> Marks | None:
        texts = mark_texts or self._known
        return None if texts is None else Marks(*map(self._mark, texts))

    def _mark(self, text: str) -> Mark:
        token = self._tokenizer.added_tokens.get(text)
        if token is None:
            return Mark(text, tuple(self._tokenizer.encode_behind(text)))
        return Mark(text, (token.token_id,), token.token_id, token.is_special)
