"""The answer of a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """The output columns of one row, by the names of jobs.parquet.part.OUTPUT_FIELDS.

    What each completion has of its own is a tuple where a row has several. tool_calls: as JSON.
    """

    completion: str | tuple[str | None, ...] | None
    finish_reason: str | tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int | tuple[int, ...]
    cached_tokens: int
    error: str | None
    reasoning: str | tuple[str | None, ...] | None = None
    tool_calls: str | tuple[str | None, ...] | None = None

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
