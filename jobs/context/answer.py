"""The answer of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Answer:
    """The output columns of one row, by the names of jobs.parquet.outputs.part.OUTPUT_FIELDS.

    What each completion has of its own is a tuple where a row has several. tool_calls: as JSON. columns: what
    stands in others, by their names. attempts, check_error: as of Attempted, where a run has a check.
    """

    completion: str | tuple[str | None, ...] | None
    finish_reason: str | tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int | tuple[int, ...]
    cached_tokens: int
    error: str | None
    reasoning: str | tuple[str | None, ...] | None = None
    tool_calls: str | tuple[str | None, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    attempts: int = 0
    check_error: str | None = None

    def column(self, name: str) -> Any:
        """Return what stands in an output column."""
        return self.columns[name] if name in self.columns else getattr(self, name)

    @property
    def failed_check(self) -> bool:
        """Whether the row has an answer that its check does not take."""
        return self.error is None and self.check_error is not None

    @property
    def is_cut(self) -> bool:
        """Whether an answer of the row ended at its limit of tokens."""
        if self.error is not None or not self.all_completion_tokens:
            return False
        own = [self.finish_reason] if isinstance(self.finish_reason, str) else self.finish_reason
        later = (value for name, value in self.columns.items() if name.endswith("finish_reason"))
        return "length" in (*own, *later)

    @property
    def all_completion_tokens(self) -> int:
        """Tokens of all completions of the row."""
        tokens = self.completion_tokens
        return tokens if isinstance(tokens, int) else sum(tokens)


def failed_answer(reason: str, n: int = 1, prompt_tokens: int = 0, cached_tokens: int = 0) -> Answer:
    """Return what a row has that was not answered. n: completions of each row."""
    if n == 1:
        return Answer(None, "error", prompt_tokens, 0, cached_tokens, reason)
    return Answer((None,) * n, ("error",) * n, prompt_tokens, (0,) * n, cached_tokens, reason)
