"""Answers of deterministic prompts, so that the shards of one process compute each of them once."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict

from jobs.context.answer import Answer

#: Room for about forty thousand short answers.
DEFAULT_BYTES = 16 << 20

#: What an answer takes besides its text: key, object, numbers, and its places in two tables.
ENTRY_BYTES = 400

#: What a label and its probability take; the label's text is the run's.
PAIR_BYTES = 96


class AnswerMemo:
    """Keeps the answers that were used last, in at most `max_bytes`. Thread-safe.

    A key names a prompt within its run, and so its sampling values too. `begin` and `end` tell shards that
    are open at the same time which prompts are being computed.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._bytes = 0
        self._begun: set[bytes] = set()

    @property
    def num_bytes(self) -> int:
        """What the answers take, as estimated."""
        return self._bytes

    def get(self, key: bytes) -> Answer | None:
        """Return a prompt's answer, if it is kept."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def put(self, key: bytes, answer: Answer) -> None:
        """Keep an answer; those that were not used for longest make room."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            self._bytes += _size(answer)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._answers.popitem(last=False)[1])

    def begin(self, key: bytes) -> bool:
        """Say that a prompt is being computed; return False when it is already."""
        with self._lock:
            if key in self._begun:
                return False
            self._begun.add(key)
            return True

    def end(self, key: bytes) -> None:
        """Say that a prompt is computed no longer, whether it has an answer or not."""
        with self._lock:
            self._begun.discard(key)


def _size(answer: Answer) -> int:
    columns = (answer.completion, answer.reasoning, answer.tool_calls, answer.check_error)
    all_columns = (*columns, *answer.columns.values())
    texts = [text for column in all_columns for text in (column if isinstance(column, tuple) else (column,))]
    pairs = sum(isinstance(text, tuple) for text in texts)
    num_completions = len(answer.completion) if isinstance(answer.completion, tuple) else 1
    text_bytes = sum(sys.getsizeof(text) for text in texts if isinstance(text, str | array))
    return ENTRY_BYTES * num_completions + PAIR_BYTES * pairs + text_bytes
