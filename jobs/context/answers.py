"""The answer of a row, and a memory of answers so that shards of one process compute each once."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answer:
    """The output columns of one row, by the names of jobs.parquet.asks.ask.OUTPUT_FIELDS.

    Where a row has several completions, what each has of its own is a tuple. tool_calls: JSON. columns: further ones by
    name; an Arrow array holds one value. attempts, check_error: as of PromptAnswer. reused: the earlier run's row.
    """

    completion: str | tuple[str | None, ...] | None
    finish_reason: str | tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int | tuple[int, ...]
    cached_tokens: int
    error: str | None
    reasoning: str | tuple[str | None, ...] | None = None
    tool_calls: str | tuple[str | None, ...] | None = None
    tool_call_error: str | tuple[str | None, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    attempts: int = 0
    check_error: str | None = None
    reused: str | None = None

    def column(self, name: str) -> Any:
        """Return what stands in an output column; None where the row has no such."""
        return self.columns[name] if name in self.columns else getattr(self, name, None)

    @property
    def is_cut(self) -> bool:
        if self.error is not None or not self.all_completion_tokens:
            return False
        own = [self.finish_reason] if isinstance(self.finish_reason, str) else self.finish_reason
        later = (value for name, value in self.columns.items() if name.endswith("finish_reason"))
        return "length" in (*own, *later)

    @property
    def all_completion_tokens(self) -> int:
        tokens = self.completion_tokens
        return tokens if isinstance(tokens, int) else sum(tokens)


def failed_answer(
    reason: str, n: int = 1, prompt_tokens: int = 0, cached_tokens: int = 0
) -> Answer:
    if n == 1:
        return Answer(None, "error", prompt_tokens, 0, cached_tokens, reason)
    return Answer((None,) * n, ("error",) * n, prompt_tokens, (0,) * n, cached_tokens, reason)


DEFAULT_BYTES = 16 << 20
#: What an answer takes besides its text: key, object, numbers, and its places in two tables.
ENTRY_BYTES = 400
#: What a label and its probability take; the label's text is the run's.
PAIR_BYTES = 96


class AnswerMemo:
    """Keeps the answers used last, in at most `max_bytes`, by a key that names a prompt within its run. Thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, Any] = OrderedDict()
        self.num_bytes = 0  # which the answers take, as estimated
        self._begun: set[bytes] = set()

    def get(self, key: bytes) -> Any:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: bytes, answer: Any) -> None:
        """Keep an answer; those that were not used for longest make room."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            self.num_bytes += _size(answer)
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(self._answers.popitem(last=False)[1])

    def begin(self, key: bytes) -> bool:
        with self._lock:
            if key in self._begun:
                return False
            self._begun.add(key)
            return True

    def end(self, key: bytes) -> None:
        with self._lock:
            self._begun.discard(key)


def _size(answer: Answer) -> int:
    columns = (
        answer.completion,
        answer.reasoning,
        answer.tool_calls,
        answer.tool_call_error,
        answer.check_error,
    )
    all_columns = (*columns, *answer.columns.values())
    texts = [
        text
        for column in all_columns
        for text in (column if isinstance(column, tuple) else (column,))
    ]
    pairs = sum(isinstance(text, tuple) for text in texts)
    num_completions = len(answer.completion) if isinstance(answer.completion, tuple) else 1
    text_bytes = sum(
        sys.getsizeof(text)
        for text in texts
        if isinstance(text, Sized) and not isinstance(text, tuple)
    )
    return ENTRY_BYTES * num_completions + PAIR_BYTES * pairs + text_bytes
