"""Rows of a query and a document: how well the one answers the other."""

import json
from collections.abc import Sequence

import pyarrow as pa

from jobs.context.answers import Answer, failed_answer
from jobs.parquet.asks.ask import ROW_FIELDS, Ask, AskedOnce, no_answer
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.arguments import Unusable
from jobs.prompts.scoring_tasks import NO_RELEVANCE, relevance, relevance_request
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Completion


class Relevance(Ask):
    """Asks for the score of each row. has_head: whether the model is a cross-encoder; others say yes or no."""

    is_compared = False

    def __init__(self, has_head: bool) -> None:
        self._has_head = has_head

    @staticmethod
    def fields(spec: RunSpec, embedding_size: int) -> list[pa.Field]:
        return [pa.field("score", pa.float64()), *ROW_FIELDS]

    def begin(self, row: Row, number: int) -> AskedOnce:
        query, document = json.loads(row.prompt)
        request = relevance_request(query, document, self._has_head)
        if isinstance(request, Unusable):
            raise RowProblem(request.reason)
        return AskedOnce(request, self._answer)

    def _answer(self, completions: Sequence[Completion]) -> Answer:
        (completion,) = completions
        if completion.class_scores is None and completion.loglikelihoods is None:
            return no_answer(completion)
        prompt, cached = completion.num_prompt_tokens, completion.num_cached_tokens
        if (score := relevance(completion)) is None:
            return failed_answer(NO_RELEVANCE, 1, prompt, cached)
        return Answer(None, completion.finish_reason, prompt, 0, cached, None, columns={"score": score})
