"""Defines the answer of a row, and a memory of answers, so that one process computes equal rows only once."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answer:
    """The output columns of one row, by the names of jobs.parquet.asks.ask.OUTPUT_FIELDS.

    If a row has several completions, each field about completions is a tuple with a value for each of them.
    tool_calls: as JSON. columns: further columns by name. A value may be an Arrow array of length 1.
    attempts, check_error: see PromptAnswer. reused: the row of an earlier run from which the answer was taken.
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
        """Return the value of an output column; None if the answer has no such column."""
        if name in self.columns:
            return self.columns[name]
        return getattr(self, name, None)

    @property
    def is_cut(self) -> bool:
        """Whether any completion of the row ended at its limit of tokens."""
        if self.error is not None or not self.all_completion_tokens:
            return False
        return "length" in self.all_finish_reasons

    @property
    def all_finish_reasons(self) -> list[str]:
        """Return the finish reason of each completion, over all prompts of the row."""
        reasons = []
        # A row with several prompts has a column of finish reasons for each prompt.
        for name, value in self.columns.items():
            if name.endswith("finish_reason") and value is not None:
                reasons.append(value)
        if reasons:
            return reasons
        # The row has one prompt, with one sample or with several samples.
        if isinstance(self.finish_reason, str):
            return [self.finish_reason]
        return list(self.finish_reason)

    @property
    def all_completion_tokens(self) -> int:
        """Return the number of tokens of all completions together."""
        tokens = self.completion_tokens
        return tokens if isinstance(tokens, int) else sum(tokens)


def failed_answer(
    reason: str, n: int = 1, prompt_tokens: int = 0, cached_tokens: int = 0
) -> Answer:
    """Return the answer of a row that failed. reason: the row's error. n: how many completions the row asked for."""
    answer = Answer(
        completion=None,
        finish_reason="error",
        prompt_tokens=prompt_tokens,
        completion_tokens=0,
        cached_tokens=cached_tokens,
        error=reason,
    )
    if n == 1:
        return answer
    return replace(
        answer, completion=(None,) * n, finish_reason=("error",) * n, completion_tokens=(0,) * n
    )


#: The default of AnswerMemo's `max_bytes`.
DEFAULT_BYTES = 16 << 20
#: The bytes of an answer without its texts: its key, object and numbers, and its entry in the memory.
ENTRY_BYTES = 400
#: The bytes of a label and its probability. The label's text is not counted, because all answers of a run share it.
PAIR_BYTES = 96


class AnswerMemo:
    """Remembers the answers of one process, and which answers are being computed. Thread-safe.

    It does in memory what the log of answers (jobs/parquet/reuse/answer_log.py) does in a file. Both have the same
    keys. A key names what a row asks, and the model that answers.
    max_bytes: if the answers take more, the least recently used ones are dropped.
    num_bytes: the estimated bytes of all answers.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, Any] = OrderedDict()
        self.num_bytes = 0
        #: The keys of the answers that are being computed.
        self._keys_in_progress: set[bytes] = set()

    def get(self, key: bytes) -> Any:
        """Return the answer of a key; None if it is not known."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: bytes, answer: Any) -> None:
        """Remember an answer, unless its key has one. Drop the least recently used answers beyond `max_bytes`."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            self.num_bytes += _size(answer)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._answers.popitem(last=False)
                self.num_bytes -= _size(oldest)

    def begin(self, key: bytes) -> bool:
        """Note that a job begins to compute an answer. Return False if another job computes the answer already."""
        with self._lock:
            if key in self._keys_in_progress:
                return False
            self._keys_in_progress.add(key)
            return True

    def end(self, key: bytes) -> None:
        """Note that a job no longer computes an answer, because it is done or has given up."""
        with self._lock:
            self._keys_in_progress.discard(key)


def _size(answer: Answer) -> int:
    """Return an estimate of the bytes that an answer takes."""
    columns = [
        answer.completion,
        answer.reasoning,
        answer.tool_calls,
        answer.tool_call_error,
        answer.check_error,
        *answer.columns.values(),
    ]
    num_completions = len(answer.completion) if isinstance(answer.completion, tuple) else 1
    num_bytes = ENTRY_BYTES * num_completions
    for column in columns:
        values = column if isinstance(column, tuple) else (column,)
        for value in values:
            if isinstance(value, tuple):  # a label and its probability
                num_bytes += PAIR_BYTES
            elif isinstance(value, Sized):
                num_bytes += sys.getsizeof(value)
    return num_bytes
