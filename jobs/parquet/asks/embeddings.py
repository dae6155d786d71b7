"""Rows that are embedded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from jobs.context.answers import Answer, failed_answer
from jobs.parquet.asks.ask import Ask, AskedOnce, request_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.embedding_task import pooling_values
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion

_NOTHING = {"embedding": None}


class Embeddings(Ask):
    """Asks for the embedding of each row."""

    def __init__(self, spec: RunSpec) -> None:
        truncation = spec.chat[0].get("truncate_prompt_tokens")
        self._values = pooling_values(spec.dimensions, prompt_name=spec.prompt_name, truncate_prompt_tokens=truncation)

    def begin(self, row: Row, number: int) -> AskedOnce:
        return AskedOnce(request_of(row, False, self._values, kind="embed"), self._answer)

    def failed(self, reason: str, prompt_tokens: int = 0, cached_tokens: int = 0) -> Answer:
        return replace(failed_answer(reason, 1, prompt_tokens, cached_tokens), columns=_NOTHING)

    def _answer(self, completions: Sequence[Completion]) -> Answer:
        (completion,) = completions
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        if completion.embedding is None:
            return self.failed(completion.error or "the engine gave no reason", prompt, cached)
        columns = {"embedding": array("f", completion.embedding)}
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=columns)
