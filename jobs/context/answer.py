"""The answer of a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """The output columns of one row, in the order of jobs.parquet.part.OUTPUT_FIELDS."""

    completion: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error: str | None
