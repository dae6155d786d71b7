"""Rows that are embedded."""

from array import array
from collections.abc import Sequence

import pyarrow as pa

from jobs.context.answers import Answer
from jobs.parquet.asks.ask import ROW_FIELDS, Ask, AskedOnce, no_answer, request_of
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.embedding_task import pooling_values
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion


class Embeddings(Ask):
    is_compared = False

    def __init__(self, spec: RunSpec) -> None:
        truncation = spec.chat[0].get("truncate_prompt_tokens")
        self._values = pooling_values(
            dimensions=spec.dimensions, prompt_name=spec.prompt_name, truncate_prompt_tokens=truncation
        )

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [pa.field("embedding", pa.list_(pa.float32(), embedding_size)), *ROW_FIELDS]

    def begin(self, row: Row, number: int) -> AskedOnce:
        return AskedOnce(request_of(row, False, self._values, kind="embed"), self._answer)

    def _answer(self, completions: Sequence[Completion]) -> Answer:
        (completion,) = completions
        if completion.embedding is None:
            return no_answer(completion)
        columns = {"embedding": array("f", completion.embedding)}
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns=columns)
